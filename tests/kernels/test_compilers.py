"""What one Triton spoils is refused there, and a default that compiles well takes its place."""

from __future__ import annotations

import pytest

from taxfree_kernels.compilers import assuming
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_shapes, variants

H200 = KNOWN["h200"]
#: operation, variant, what decides of the configs that are refused
SPOILED = [
    ("all_gather_matmul", "push", "SOURCES_PER_WAIT"),
    ("all_gather_matmul", "push_two_kernel", "SOURCES_PER_WAIT"),
    ("attention", "warp_specialized", "CONSUMERS"),
]


@pytest.mark.parametrize(("op", "name", "parameter"), SPOILED)
def test_what_a_compiler_spoils_is_refused_there(op: str, name: str, parameter: str) -> None:
    variant, refused = variants(op)[name], 0
    for problem in operation_shapes(op).aligned:
        if variant.unsupported_reason(problem, H200) is not None:
            continue
        with assuming("3.9.0"):
            config = variant.seed_configs(problem, H200)[0]
            assert variant.illegal_reason(problem, H200, config) is None
        with assuming("3.8.0"):
            other = variant.seed_configs(problem, H200)[0]
            assert variant.illegal_reason(problem, H200, other) is None
            reason = variant.illegal_reason(problem, H200, config)
        assert (reason is None) == (other == config)
        if reason is not None:
            assert "Triton 3.8" in reason
            assert other[parameter] != config[parameter]
            refused += 1
    assert refused == 1
