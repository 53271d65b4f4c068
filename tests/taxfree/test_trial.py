"""Calls of a problem, as they are made ready on a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from taxfree.measuring import trial
from taxfree.measuring.trial import Calls, Candidate
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.launch import is_compiling
from taxfree_kernels.variant import Plan


class LibraryPlan(Plan):
    """As PyTorch's fused ops: nothing of ours to compile, and no call before peers are known."""

    is_connected = False

    def connect(self) -> None:
        self.is_connected = True

    def __call__(self, *tensors: Any) -> torch.Tensor:
        assert self.is_connected
        assert not is_compiling()
        return tensors[-1]


def test_a_plan_without_kernels_of_ours_is_not_called_before_it_is_connected(monkeypatch):
    monkeypatch.setattr(trial, "attempt", lambda _, steps: [step() for step in steps])
    calls = object.__new__(Calls)
    calls.fabric = SimpleNamespace(group=None)
    calls.op, calls.problem = "all_gather_matmul", AllGatherMatmul(5, 32, 32)
    calls.inputs, calls.outputs = [()], [torch.zeros(1)]
    monkeypatch.setattr(calls, "plan", lambda candidate: LibraryPlan(), raising=False)
    plan = calls.ready(Candidate("torch_fused", {}))
    assert isinstance(plan, LibraryPlan)
    assert plan.is_connected
    calls.call(plan)(0)
