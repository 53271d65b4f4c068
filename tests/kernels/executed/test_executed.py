"""Compiled kernels of whole variants, executed on two ranks, each in a process that compiles."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from taxfree_cli.app import run
from taxfree_kernels.variant import operation_names, variants
from tests.kernels.cross_compile.conftest import ROOT, run_python
from tests.kernels.executed.mutated import Result, cases

VARIANTS = [
    (op, name) for op in operation_names() for name, each in variants(op).items() if each.fused
]
PATH = ":".join(str(ROOT / each) for each in ("", "kernels", "tuning_db"))
CACHE_CONTROL = ("buffer_wbl2", "buffer_wbl2 sc0", "buffer_inv", "buffer_inv sc0")
COMMAND = "import sys; from taxfree_cli.app import run; sys.exit(run(sys.argv[1:]))"


def executed(op, variant, architecture, seed):
    out = run_python(
        "-c", COMMAND, "check", "--executed", "--op", op, "--variant", variant, "--arch",
        architecture, "--seeds", "1", "--first-seed", str(seed), "--json",
        PYTHONPATH=PATH,
    )  # fmt: skip
    return json.loads(out)["runs"]


def test_compiled_variants_are_right(sample):
    tried = [(*variant, arch) for arch in ("gfx942", "gfx950") for variant in VARIANTS]
    for seed, (op, variant, architecture) in enumerate(sample.of(tried)):
        for shown in executed(op, variant, architecture, seed):
            assert shown["verdict"] == "right"
            assert shown["instructions"] > 1000


def outcomes(*arguments):
    out = run_python("-m", "tests.kernels.executed.changed", *arguments, PYTHONPATH=PATH)
    return Result.of_json(json.loads(out)).outcomes


def test_a_kernel_without_its_write_back_or_invalidation_is_not_right():
    tried = outcomes("all_gather_matmul", "push", "9", *CACHE_CONTROL)
    assert {one.kind for one in tried} == set(CACHE_CONTROL)
    assert {one.verdict for one in tried} <= {"wrong", "hang"}


def test_most_mutants_that_are_not_equivalent_are_found(sample):
    for op, variant in sample.of(cases()):
        tried = outcomes(op, variant, "1")
        count = Counter(one.verdict for one in tried)
        assert count["survives"] <= 0.2 * (len(tried) - count["equivalent"] - count["harmless"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--executed", "--compiled"], "are two checks"), (["--arch", "gfx942"], "--arch is for"),
     (["--executed", "--arch", "sm_90"], "--arch is for"),
     (["--executed"], "needs compiled kernels")],
)  # fmt: skip
def test_usage(arguments, message, capsys):
    assert run(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
