"""Which weights a plan loads before the preceding kernel has ended."""

from __future__ import annotations

import pytest
import torch

from taxfree_check.cross_compile.record import GhostFabric
from taxfree_kernels.fabric.heap import arena_bytes
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import launching_through
from taxfree_kernels.meta import meta_tensors
from taxfree_kernels.variant import Ready, problem_class, variants

OP, HARDWARE = "all_gather_matmul", KNOWN["h200"]
PROBLEM = problem_class(OP)(m=16, n=64, k=512, gather_dim=1, world_size=2, dtype="bfloat16")
VARIANT = variants(OP)["push_specialized"]
(CONFIG,) = VARIANT.seed_configs(PROBLEM, HARDWARE)


def loaded_early(promised: bool, pitch: int = PROBLEM.k) -> tuple[str, ...]:
    """Arguments of a call's kernel that it loads early; rows of the weight are `pitch` apart."""
    fabric = GhostFabric(PROBLEM.world_size, HARDWARE, arena_bytes(PROBLEM.slot_bytes))
    fabric.static_weights = promised
    plan = Ready(VARIANT.plan(PROBLEM, fabric, CONFIG))
    a, weight, bias, out = meta_tensors(PROBLEM)
    weight = torch.empty(PROBLEM.n, pitch, dtype=weight.dtype, device="meta")[:, : PROBLEM.k].t()
    launched = []
    with launching_through(lambda kernel, args: launched.append(kernel)):
        plan(a, weight, bias, out)
    (kernel,) = launched
    assert bool(kernel.static) == bool(kernel.constants["WORK"].PREFETCH)
    return kernel.static


def test_weights_are_loaded_early_if_they_are_static():
    assert loaded_early(promised=True) == ("w_desc",)
    assert loaded_early(promised=False) == ()


@pytest.mark.parametrize(("pitch", "expected"), [(520, ("w_desc",)), (513, ())])
def test_a_copy_of_a_weight_is_not_loaded_early(pitch, expected):
    assert loaded_early(promised=True, pitch=pitch) == expected
