"""The shipped table on GPUs: what each record says has won still compiles, and is right.

Records outlive changes of the sources that leave the variants' versions, of Triton and of drivers.
Where there are fewer GPUs than ranks, these share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from taxfree.problems import recorded_problem
from taxfree_kernels.variant import operation_names
from taxfree_tune import devices
from taxfree_tune.measuring.trial import Candidate, try_candidates
from taxfree_tuning_db import shipped_records
from tests.ranks import ELSEWHERE, start_group

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEADLINE_S = 300.0
_MOST_KEYS = 1 << 20  # of all sequences and ranks: the reference reads all of them on each rank


def winners(op: str, world_size: int) -> Iterator[tuple[Any, Candidate]]:
    """Problems of this machine's records, with what has won them."""
    gpu = devices.gpu_name("cuda")
    assert gpu is not None, "the driver does not name its GPUs"
    for record in shipped_records():
        problem = recorded_problem(record.op, record.problem)
        assert problem is not None, record
        if (
            (record.op, problem.world_size) == (op, world_size)
            and record.hardware.gpu == gpu
            and record.winner.variant not in ELSEWHERE
            and _keys(problem) <= _MOST_KEYS
        ):
            yield problem, Candidate(record.winner.variant, record.winner.config)


def _keys(problem: Any) -> int:
    keys = getattr(problem, "kv_len_per_rank", 0)
    return int(keys and keys * problem.batch * problem.world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("op", operation_names())
def test_every_winner_is_right(op: str, world_size: int) -> None:
    tried = list(winners(op, world_size))
    if not tried:
        pytest.skip("no such record is of this GPU")
    heap_bytes = devices.heap_bytes([problem for problem, _ in tried])
    complaints = []
    with start_group(world_size, "cuda", heap_bytes) as group:
        for problem, winner in tried:
            run = {"op": op, "problem": asdict(problem), "candidates": [winner]}
            (outcome,) = group.call(try_candidates, DEADLINE_S, **run, modes=(), repetitions=1)[0]
            if outcome.state != "measured":
                complaints.append(f"{problem}: {winner}: {outcome.state}, {outcome.reason}")
    assert complaints == []
