"""Compiled kernels of whole variants, executed on two ranks, each in a process that compiles."""

from __future__ import annotations

import json

import pytest

from taxfree_cli.app import run
from taxfree_kernels.variant import operation_names, variants
from tests.kernels.cross_compile.conftest import ROOT, run_python

VARIANTS = [
    (op, name) for op in operation_names() for name, each in variants(op).items() if each.fused
]
PATH = ":".join(str(ROOT / each) for each in ("", "kernels", "tuning_db"))
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


def test_a_kernel_without_its_write_back_or_invalidation_is_not_right():
    out = run_python("-m", "tests.kernels.executed.scopes", PYTHONPATH=PATH)
    tried = json.loads(out)
    assert {kind for kind, _, _ in tried} == {
        "sc0 of a cache instruction", "buffer_wbl2", "buffer_inv",
    }  # fmt: skip
    assert [one for one in tried if one[2] == "survives"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--executed", "--compiled"], "are two checks"), (["--arch", "gfx942"], "--arch is for"),
     (["--executed", "--arch", "sm_90"], "--arch is for"),
     (["--executed"], "needs compiled kernels")],
)  # fmt: skip
def test_usage(arguments, message, capsys):
    assert run(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
