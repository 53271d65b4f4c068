"""What dispatch adds to eager calls of the library."""

from __future__ import annotations

from typing import Any

import pytest

from taxfree_kernels.variant import problem_class
from tests.ranks import Ranks
from tests.taxfree.runtime_tasks import FIELDS

MOST_US = 6.0  # on cores that others use; it is 1 us, and was 18 for decode
OPS: list[tuple[str, dict[str, Any]]] = [
    ("all_gather_matmul", {"bias": True}),
    ("matmul_all_reduce", {"residual": True, "rms_norm": True}),
    ("matmul_reduce_scatter", {}),
    ("flash_decode", {}),
    ("attention", {}),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_given_problem_costs_little_beside_the_librarys_path(
    ranks: Ranks, world_size: int
) -> None:
    matmul = {"m": 4, "n": 32, "k": 36}
    problems = [
        problem_class(op)(**FIELDS.get(op, matmul) | fields, world_size=world_size)
        for op, fields in OPS
    ]
    task = "benchmarks.host_cost:time_library"
    for found in ranks.run(world_size, task, problems=problems):
        assert [each.op for each in found] == [op for op, _ in OPS]
        assert {each.library for each in found} == {"baseline"}
        assert max(each.given_us for each in found) < MOST_US
        assert min(min(each.library_us, each.dispatched_us) for each in found) > 0
