"""Kernels that are launched before the kernel before them has ended."""

from __future__ import annotations

import pytest

from taxfree_check.cross_compile.record import record
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants
from tests.kernels.tasks import Case

EARLY = [
    ("all_gather_matmul", "pull"),
    ("all_gather_matmul", "push"),
    ("all_gather_matmul", "push_tma"),
    ("all_gather_matmul", "push_two_kernel"),
    ("matmul_all_reduce", "push"),
    ("matmul_all_reduce", "push_in_place"),
    ("matmul_all_reduce", "push_lamport"),
    ("matmul_all_reduce", "push_two_shot"),
    ("matmul_all_reduce", "push_two_shot_lamport"),
    ("matmul_reduce_scatter", "push"),
    ("matmul_reduce_scatter", "push_lamport"),
]


@pytest.mark.parametrize(("op", "name"), EARLY)
class TestTheMetaParameter:
    def test_is_for_the_last_kernel_of_a_call_and_on_at_first(self, op, name):
        problem = problem_class(op)(m=64, n=256, k=512, world_size=2)
        variant, hardware = variants(op)[name], KNOWN["h200"]
        first = variant.seed_configs(problem, hardware)[0]
        assert first["launch_pdl"] is True
        for early in (False, True):
            launches = record(op, name, problem, first | {"launch_pdl": early}, hardware)
            options = [launch.kernel.options.get("launch_pdl", False) for launch in launches]
            assert options == [False] * (len(launches) - 1) + [early]

    def test_is_nvidias_alone(self, op, name):
        problem = problem_class(op)(m=64, n=256, k=512, world_size=2)
        for hardware in (KNOWN["mi300x"], KNOWN["cpu"]):
            assert "launch_pdl" not in variants(op)[name].space(problem, hardware)


@pytest.mark.parametrize("fabric", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize(("op", "name"), EARLY)
def test_an_early_kernel_waits_for_whatever_brings_its_input(ranks, op, name):
    fields = {"m": 64, "n": 256, "k": 512, "dtype": "bfloat16"}
    tried = Case(name, fields, {"launch_pdl": True}, op=op)
    task = "tests.kernels.tasks:early_behind_others"
    for found in ranks.run(2, task, case=tried, replays=20):
        assert found == []
