"""What one Triton spoils is refused there, and a default that compiles well takes its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import assuming
from taxfree_kernels.variant import operation_shapes, variants

H200 = KNOWN["h200"]
REASON = "Triton 3.8 would run its matrix instructions one by one"


@pytest.mark.parametrize("name", ["push", "push_two_kernel"])
def test_gather_tiles_that_wait_once_wait_for_each_source_there(name: str) -> None:
    variant, refused = variants("all_gather_matmul")[name], 0
    for problem in operation_shapes("all_gather_matmul").aligned:
        with assuming("3.9.0"):
            config = variant.seed_configs(problem, H200)[0]
            assert variant.illegal_reason(problem, H200, config) is None
        with assuming("3.8.0"):
            other = variant.seed_configs(problem, H200)[0]
            assert variant.illegal_reason(problem, H200, other) is None
            reason = variant.illegal_reason(problem, H200, config)
        if reason is None:
            assert other == config
        else:
            assert (reason, other["SOURCES_PER_WAIT"]) == (REASON, 1)
            refused += 1
    assert refused == 2  # of 16-bit rows, and of fp8


def test_attention_of_warps_with_roles_is_causal_and_of_wide_heads_there() -> None:
    variant = variants("attention")["warp_specialized"]
    problem = next(p for p in operation_shapes("attention").aligned if p.causal and not p.packed)
    problem = replace(problem, head_dim=128)
    found = {}
    for changes in ({}, {"causal": False}, {"head_dim": 64}):
        for version in ("3.7.1", "3.8.0", "3.9.0"):
            with assuming(version):
                reason = variant.unsupported_reason(replace(problem, **changes), H200)
            found[version, str(changes)] = reason
    assert {where: why for where, why in found.items() if why is not None} == {
        ("3.8.0", "{'causal': False}"): REASON,
        ("3.8.0", "{'head_dim': 64}"): REASON,
    }
