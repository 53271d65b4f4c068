"""What matmul_all_reduce alone promises: RMSNorm, and libraries that need GPUs."""

from __future__ import annotations

import pytest

from tests.kernels.contract import ALL_REDUCE, NORMALISING, TASKS, case, complaints
from tests.ranks import on_every_fabric, require


@on_every_fabric
@pytest.mark.parametrize("variant", NORMALISING)
class TestRMSNorm:
    def test_is_right_for_all_types_addends_and_sizes(self, ranks, variant):
        cases = [
            case(
                ALL_REDUCE, variant, rms_norm=True, m=m, n=n, dtype=dtype, bias=bias, residual=other
            )
            for m, n, dtype, bias, other in [
                (1, 1, "float16", False, True),
                (17, 37, "bfloat16", True, False),
                (3, 64, "float16", True, True),
            ]
        ]
        assert complaints(ranks, ranks.few, cases) == []

    def test_both_outputs_are_no_less_exact_than_the_librarys(self, ranks, variant):
        """Each alone, as the error of both could be that of one."""
        size = {"m": 4, "n": 256, "k": 64, "dtype": "bfloat16"}
        tried = case(ALL_REDUCE, variant, rms_norm=True, residual=True, **size)
        for errors, of_library in ranks.run(ranks.few, f"{TASKS}:errors_by_output", case=tried):
            for error, allowed in zip(errors, of_library, strict=True):
                assert 0 < error <= 1.25 * allowed


@pytest.mark.parametrize("fabric", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize(
    ("variant", "config"),
    [("registered", None), *(("torch_symm_mem", {"SHOTS": shots}) for shots in (1, 2, 3))],
)
class TestLibrariesOfGpus:
    def test_is_right_with_and_without_addends(self, ranks, variant, config):
        require(ranks.few, ranks.fabric)
        size = {"n": 40, "k": 64, "dtype": "bfloat16"}
        cases = [
            case(ALL_REDUCE, variant, config, **size, m=m, bias=adds, residual=adds, rms_norm=norm)
            for m, adds, norm in [(1, False, False), (34, True, False), (34, True, True)]
        ]
        assert complaints(ranks, ranks.few, cases) == []
