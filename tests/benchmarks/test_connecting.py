"""Whatever makes plans serves variants that have a setup among peers before their first call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from taxfree_kernels.launch import _launcher
from taxfree_kernels.variant import Plan, operation_names, variants
from tests.ranks import OP, Ranks

GATHER = {"m": 5, "n": 32, "k": 36}
STEP = {"BLOCK_H": 16, "BLOCK_N": 16, "SPLITS": 1, "OUT_ROWS": 1}


class Connecting(Plan):
    """A plan that runs once it is connected; its launches may go elsewhere before."""

    def __init__(self, plan: Plan, group: Any) -> None:
        self._plan, self._group, self.launches = plan, group, plan.launches
        self.peers: list[Any] = []

    def connect(self) -> None:
        assert not self.peers
        self._plan.connect()
        self.peers = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(self.peers, dist.get_rank(self._group), self._group)

    def kernels(self, size: int) -> Any:
        return self._plan.kernels(size)

    def run(self, *tensors: Any) -> torch.Tensor:
        assert self.peers or _launcher.get() is not None
        return self._plan.run(*tensors)

    def steps(self, *tensors: Any) -> Any:
        assert self.peers
        return self._plan.steps(*tensors)


@contextlib.contextmanager
def every_plan_connects() -> Iterator[list[Connecting]]:
    """Within the context all plans that are made have a setup among peers; these plans."""
    made: list[Connecting] = []

    def connecting(plan: Callable[..., Plan]) -> Callable[..., Plan]:
        def make(self: Any, problem: Any, fabric: Any, config: Any) -> Plan:
            found = plan(self, problem, fabric, config)
            if fabric.name != "host" or isinstance(found, Connecting):
                return found
            made.append(Connecting(found, fabric.group))
            return made[-1]

        return make

    kinds = {type(variant) for op in operation_names() for variant in variants(op).values()}
    with contextlib.ExitStack() as patches:
        for kind in kinds:
            patches.enter_context(mock.patch.object(kind, "plan", connecting(kind.plan)))
        yield made


# -- what runs on the ranks --------------------------------------------------------------------


def run(fabric: Any, what: str) -> int:
    """How many plans were connected in one of the functions below."""
    with every_plan_connects() as made:
        globals()[what](fabric)
    return sum(plan.peers == list(range(dist.get_world_size(fabric.group))) for plan in made)


def _gather(fabric: Any) -> Any:
    from tests.taxfree.runtime_tasks import problem_of

    return problem_of(**GATHER)


def trial_and_bench(fabric: Any) -> None:
    from taxfree_tune.benching.tasks import measure_problem
    from taxfree_tune.measuring.trial import Candidate
    from tests.taxfree.runtime_tasks import record_of

    problem = _gather(fabric)
    tried = [
        Candidate(name, variants(OP)[name].seed_configs(problem, fabric.hardware)[0])
        for name in ("baseline", "one_shot", "push")
    ]
    fields, record = dataclasses.asdict(problem), record_of(fabric, problem)
    found = measure_problem(fabric, OP, fields, tried, [record], repetitions=1)
    assert {each.state for each in found.outcomes.values()} == {"measured"}


def explain(fabric: Any) -> None:
    from taxfree_tune.measuring.trial import Candidate
    from taxfree_tune.profiling.step_timer import measure_pipelines

    problem = _gather(fabric)
    config = variants(OP)["one_shot"].seed_configs(problem, fabric.hardware)[0]
    tried = [Candidate("baseline", {}), Candidate("one_shot", config)]
    measure_pipelines(fabric, OP, dataclasses.asdict(problem), tried, repetitions=1)


def runtime(fabric: Any) -> None:
    from tests.taxfree.runtime_tasks import record_of, runtime_of, tensors_of

    problem = _gather(fabric)
    (a, weight, _), expected = tensors_of(fabric, problem)
    for records in ([], [record_of(fabric, problem)]):
        rt = runtime_of(fabric, *records)
        assert torch.equal(rt.all_gather_matmul(a, weight, gather_dim=1), expected)
        rt.prepare([problem.for_rows(1, 8)])
        assert torch.equal(rt.all_gather_matmul(a, weight, gather_dim=1), expected)


def soak(fabric: Any) -> None:
    from benchmarks.soak_ranks import Soak

    made = Soak(fabric, 1, 1, inside=False, names=["push"], problems=[_gather(fabric)])
    for chained in (False, True):
        found = made.run([0], "eager", chained, first_generation=0, calls=4)
        assert found.mismatches == [0]


# -- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [trial_and_bench, explain, runtime, soak])
def test_ranks_connect_what_they_call(ranks: Ranks, what: Callable[..., Any]) -> None:
    assert min(ranks.run(2, f"{__name__}:run", what=what.__name__)) > 0
