"""Plans that can be called, as ranks make them together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

from taxfree._runtime import collectives
from taxfree._runtime.collectives import Failure
from taxfree._runtime.ready import ready_plans
from taxfree_kernels.all_gather_matmul import torch_fused as gather
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.errors import PlanError
from taxfree_kernels.launch import is_compiling
from taxfree_kernels.matmul_reduce_scatter import torch_fused as scatter
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import Plan, Ready, Variant
from taxfree_tune.measuring.trial import Calls, Candidate

FABRIC: Any = SimpleNamespace(group=None, device=torch.device("cpu"))


class LibraryPlan(Plan):
    """As PyTorch's fused ops: nothing of ours to compile, and no run before peers are known."""

    def __init__(self, reason: str = "") -> None:
        self.is_connected, self._reason = False, reason

    def connect(self) -> None:
        if self._reason:
            raise PlanError(self._reason)
        self.is_connected = True

    def run(self, *tensors: Any) -> torch.Tensor:
        assert self.is_connected
        assert not is_compiling()
        out: torch.Tensor = tensors[-1]
        return out


class Library(Variant):
    name = "library"

    def plan(self, *_: Any) -> Plan:
        return LibraryPlan()


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the other rank says in each vote; it agrees where nothing is left."""
    said: list[Any] = []
    monkeypatch.setattr(
        collectives, "vote", lambda _, own: [own, said.pop(0) if said else [None] * len(own)]
    )
    monkeypatch.setattr(collectives.dist, "get_rank", lambda _: 0)
    return said


def test_a_plan_is_not_callable_until_it_is_ready() -> None:
    plan, out = LibraryPlan(), torch.zeros(1)
    assert not callable(plan)
    (ready,) = ready_plans(FABRIC, [lambda: plan])
    assert isinstance(ready, Ready)
    assert ready(out) is out


def test_what_fails_on_another_rank_is_not_connected(two_ranks: list[Any]) -> None:
    failure = Failure(1, "out of registers")
    two_ranks.append([None, failure])
    plans = LibraryPlan(), LibraryPlan()
    first, second = ready_plans(FABRIC, [lambda: plans[0], lambda: plans[1]])
    assert isinstance(first, Ready)
    assert second is failure
    assert [each.is_connected for each in plans] == [True, False]


def test_what_cannot_connect_on_a_rank_is_no_plan(two_ranks: list[Any]) -> None:
    failure = Failure(1, "no such op")
    two_ranks += [[None, None], [failure, None]]
    plans = LibraryPlan(), LibraryPlan("no multicast")
    found = ready_plans(FABRIC, [lambda: plans[0], lambda: plans[1]])
    assert found == [failure, Failure(0, "no multicast")]


def test_a_trial_runs_nothing_before_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taxfree_tune.measuring.trial.variants", lambda _: {"library": Library()})
    calls = object.__new__(Calls)
    calls.fabric, calls.op, calls.problem = FABRIC, "all_gather_matmul", AllGatherMatmul(5, 32, 32)
    calls.inputs, calls.outputs = [()], [torch.zeros(1)]
    calls.call(calls.plan(Candidate("library", {})))(0)


@pytest.mark.parametrize(
    ("variant", "problem", "wanted"),
    [
        (gather.VARIANT, AllGatherMatmul(64, 32, 96, gather_dim=0, world_size=2), 64 * 96 * 2),
        (gather.VARIANT, AllGatherMatmul(16384, 32, 96, 0, world_size=2), 8192 * 96 * 2),
        (scatter.VARIANT, MatmulReduceScatter(64, 32, 96, world_size=2), 2 * 32 * 32 * 2),
    ],
)
def test_pytorchs_ops_find_their_workspace_when_they_run(
    monkeypatch: pytest.MonkeyPatch, variant: Variant, problem: Any, wanted: int
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(symm_mem, "enable_symm_mem_for_group", lambda _: None)
    monkeypatch.setattr(symm_mem, "get_symm_mem_workspace", lambda *given: asked.append(given))
    fabric: Any = SimpleNamespace(group=SimpleNamespace(group_name="ranks"))
    Ready(variant.plan(problem, fabric, {}))
    assert asked == [("ranks", wanted)]
