"""Compiled kernels of whole variants, executed on two ranks, in processes that compile."""

from __future__ import annotations

import json

import pytest

from taxfree_check.executed.check import tiny_problems
from taxfree_cli.app import run
from taxfree_kernels.variant import operation_names, variants
from tests.check.cross_compile.conftest import run_python
from tests.check.executed.mutated import ARCHITECTURE, OF_OTHER, OTHER_ARCHITECTURE
from tests.tritons import NEWEST, OLDEST, needs_3_8, needs_before_3_8

VARIANTS = [
    (op, name) for op in operation_names() for name, each in variants(op).items() if each.fused
]
#: of gfx950, which has the same memory model and other matrix instructions, one of each operation
WHOLE = {ARCHITECTURE: VARIANTS, OTHER_ARCHITECTURE: OF_OTHER}
ARCHITECTURES = tuple(WHOLE)
SEEDS = (0, 1, 2)
ALONE = {"attention"}  # its ranks share nothing

#: of one kernel, all that was compiled of it together; but for the path of giving up, and the code
#: of atomics for lanes that change one word, as none of ours do.
MOST_NEVER_EXECUTED = 0.1


def cases(op, name, world, seeds, corners=(None,)):
    """All problems of a variant; or of each of `corners`, one problem. See `whole.py`."""
    problems = range(len(tiny_problems(op, world)))
    if corners == (None,):
        return [(op, name, world, at, None, seeds) for at in problems]
    return [(op, name, world, corner % len(problems), corner, seeds) for corner in corners]


def executed(given, architecture, *options, triton=NEWEST):
    """What each case showed, and of each kernel the share that never ran; all in one process."""
    program = ("-m", "tests.check.executed.whole", json.dumps(given), architecture, *options)
    out = json.loads(run_python(*program, triton=triton))
    return out["checks"], out["shares"]


def require_right(checked):
    for shown in checked["runs"]:
        assert shown["verdict"] == "right", (shown["details"], shown["replay"])
        assert shown["instructions"] > 100
    if checked["runs"]:
        assert bool(checked["runs"][-1]["gave_up"]) == (checked["op"] not in ALONE)


@needs_3_8
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_variants_are_right_and_most_of_their_code_runs(architecture, sample):
    tried = sample.of(WHOLE[architecture], fortnights=2)
    given = [case for each in tried for case in cases(*each, 2, SEEDS)]
    checks, shares = executed(given, architecture)
    for checked in checks:
        require_right(checked)
    for *kernel, share in shares:
        assert share < MOST_NEVER_EXECUTED, (kernel, share)


@needs_before_3_8
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_variants_that_the_oldest_triton_compiles_are_right_but_for_its_write_backs(
    architecture, sample
):
    tried = sample.of(VARIANTS[ARCHITECTURES.index(architecture) :: 2])
    given = [case for each in tried for case in cases(*each, 2, SEEDS[1:2])]
    checks, _ = executed(given, architecture, "repaired", triton=OLDEST)
    for checked in checks:
        require_right(checked)


@needs_3_8
def test_a_stencil_that_gives_up_is_right_where_some_programs_are_far_ahead():
    """Tiles have other programs in the next step."""
    out = run_python("-m", "tests.check.executed.ahead")
    assert json.loads(out) == {"silent 0": [], "silent 1": []}


@needs_before_3_8
def test_a_signal_that_overtakes_its_write_back_is_found():
    """The oldest Triton's LLVM does not wait for some of them."""
    case = ("all_gather_matmul", "push", 2, 1, None, (0, 3, 6))
    ((checked,), _) = executed([case], "gfx950", "adverse", triton=OLDEST)
    assert "wrong" in {shown["verdict"] for shown in checked["runs"]}
    ((checked,), _) = executed([case], "gfx950", "adverse", "repaired", triton=OLDEST)
    require_right(checked)


@needs_3_8
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_variants_are_right_on_more_ranks_and_with_other_configs(architecture, sample):
    if sample.is_part:
        pytest.skip("minutes: for the whole list")
    world, corners = {"gfx942": (4, (0, 2)), "gfx950": (8, (1, 3))}[architecture]
    given = []
    for at, (op, name) in enumerate(VARIANTS):
        if op not in ALONE and (op, name) in WHOLE[architecture]:
            given += cases(op, name, world, (0,))[:1]
        # test_defaults_and_corners_pass_the_checks compiles configs for both; one executes them
        if at % 2 == ARCHITECTURES.index(architecture):
            given += cases(op, name, 2, (1,), corners)
    checks, _ = executed(given, architecture)
    for checked in checks:
        require_right(checked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--executed", "--compiled"], "are two checks"), (["--arch", "gfx942"], "--arch is for"),
     (["--executed", "--arch", "sm_90"], "unknown architecture"),
     (["--executed"], "needs compiled kernels")],
)  # fmt: skip
def test_usage(arguments, message, capsys):
    assert run(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
