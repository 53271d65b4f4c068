"""Compiled kernels of whole variants, executed on two ranks, each in a process that compiles."""

from __future__ import annotations

import json

import pytest

from taxfree_cli.app import run
from taxfree_kernels.variant import operation_names, operation_shapes, variants
from tests.kernels.cross_compile.conftest import ROOT, TRITONS, run_python, triton_path

VARIANTS = [
    (op, name) for op in operation_names() for name, each in variants(op).items() if each.fused
]
PATH = ":".join(str(ROOT / each) for each in ("", "kernels", "tuning_db"))
ARCHITECTURES = ("gfx942", "gfx950")
ALONE = {"attention"}  # its ranks share nothing
AT_ONCE = 6  # of one process

#: of one kernel, outside of the path of giving up. The lengths that a few seeds draw leave paths
#: out, such as the merge of several splits; and the compiler adds code for lanes that change one
#: address together, as none of ours do.
MOST_NEVER_EXECUTED = 0.6


def python_path(triton="installed"):
    return ":".join([str(path) for path in [triton_path(triton)] if path] + [PATH])


def cases(worlds, corners, seeds):
    """Problem by problem, of every variant: see `whole.py`."""
    return [
        (op, name, world, at, corner, None, seeds)
        for op, name in VARIANTS
        for world in worlds
        for at in range(len(operation_shapes(op).tiny(world)))
        for corner in corners
    ]


def executed(given, architecture, triton="installed", *options):
    given = [(*case[:5], architecture, case[6]) for case in given]
    for begin in range(0, len(given), AT_ONCE):
        text = json.dumps(given[begin : begin + AT_ONCE])
        program = ("-m", "tests.kernels.executed.whole", text, *options)
        out = run_python(*program, triton=triton, PYTHONPATH=python_path(triton))
        yield from json.loads(out)


def require_right(checked):
    for shown in checked["runs"]:
        assert shown["verdict"] == "right", (shown["details"], shown["replay"])
        assert shown["instructions"] > 100
    if checked["runs"]:
        assert bool(checked["runs"][-1]["gave_up"]) == (checked["op"] not in ALONE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_variants_are_right_on_two_ranks(architecture, triton, sample):
    given, options = cases((2,), (None,), (0, 1, 2, 3)), ()
    if triton == "oldest":  # which AMD's fabric refuses: each case for one architecture
        given, options = given[ARCHITECTURES.index(architecture) :: 2], ("repaired",)
    given = sample.of(given)
    for checked in executed(given, architecture, triton, *options):
        require_right(checked)
        assert max(checked["shares"].values(), default=0.0) < MOST_NEVER_EXECUTED, checked["shares"]


def test_a_signal_that_overtakes_its_write_back_is_found():
    """The oldest Triton's LLVM does not wait for some of them."""
    case = ("all_gather_matmul", "push", 2, 1, None, None, [0, 4, 8])
    (checked,) = executed([case], "gfx950", "oldest", "adverse")
    assert "wrong" in {shown["verdict"] for shown in checked["runs"]}
    (checked,) = executed([case], "gfx950", "oldest", "adverse", "repaired")
    require_right(checked)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_variants_are_right_on_more_ranks_and_with_other_configs(
    architecture, step, sample
):
    if sample.is_part:
        pytest.skip("minutes: for the whole list")
    given = cases((4, 8), (None,), (0, 3)) + cases((2,), range(6), (1, 2))
    for checked in executed(given[ARCHITECTURES.index(architecture) :: step], architecture):
        require_right(checked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--executed", "--compiled"], "are two checks"), (["--arch", "gfx942"], "--arch is for"),
     (["--executed", "--arch", "sm_90"], "--arch is for"),
     (["--executed"], "needs compiled kernels")],
)  # fmt: skip
def test_usage(arguments, message, capsys):
    assert run(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
