"""Every kernel, for every architecture, under each Triton, passes the assembly checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import pytest

from taxfree_check.cross_compile.coverage import DEVICES, Case, cases, smallest_cases
from taxfree_check.cross_compile.report import check, format_report
from taxfree_kernels.launch import assuming
from taxfree_kernels.variant import operation_names, operation_shapes
from tests.sample import Sample
from tests.tritons import BEFORE_3_8, FOLDERS, SINCE_3_8, TRITONS

OPERATIONS = operation_names()


#: device -> its compilers; AMD's fabric refuses the others
COMPILERS = {device: TRITONS if device == "h200" else SINCE_3_8 for device in DEVICES}
#: compiler and device; each meets its share of the corners
TARGETS = [pair for pair in product(TRITONS, DEVICES) if pair[0] in COMPILERS[pair[1]]]


def expect_good(wanted: Iterable[Case], triton: str) -> None:
    reports = list(check(wanted, FOLDERS[triton], workers=1))  # none of variants without kernels
    bad = [format_report(report) for report in reports if not report.is_good]
    assert not bad, "\n\n".join(bad)


@pytest.mark.dealt("triton")
@pytest.mark.parametrize("triton", TRITONS)
def test_old_tritons_signal_before_the_write_back_on_amd(triton: str) -> None:
    push = [
        case for case in cases("matmul_all_reduce", "mi300x", examples=1) if case.variant == "push"
    ]
    (report,) = check(push, FOLDERS[triton], workers=1)
    expected = {"written_back"} if triton in BEFORE_3_8 else set()
    assert {violation.check for violation in report.violations} == expected


def defaults(device: str, turn: int) -> Iterator[Case]:
    """Of all examples where compilers have failed most: for NVIDIA, by the oldest.

    The other compilers and devices have few or many rows, in turns.
    """
    for op in OPERATIONS:
        shapes = operation_shapes(op)
        taken = (*shapes.aligned, *shapes.ragged)[turn % 2]
        for case in cases(op, device, examples=2 if turn else None):
            if not turn or case.problem == taken:
                yield case


def corners(device: str, turn: int) -> Iterator[Case]:
    """A part of each operation's: another one for each device and compiler.

    The soak has all, and `taxfree tune` checks each that it meets.
    """
    for op in OPERATIONS:
        yield from list(cases(op, device, corners=True, examples=1))[turn :: 2 * len(TARGETS)]


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_operation_has_examples(op: str) -> None:
    assert operation_shapes(op).aligned or operation_shapes(op).ragged


def test_each_case_gets_its_own_report() -> None:
    """Also one that is asked for twice, and those behind it."""
    every = cases("matmul_all_reduce", "h200", examples=1)
    few = [case for case in every if "two_shot" in case.variant]
    asked = [few[0], few[0], *few[1:]]
    found = check(asked, workers=1)
    assert [(each.variant, each.kernel) for each in found] == [
        (case.variant, case.variant) for case in asked
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("triton", TRITONS)
def test_defaults_and_corners_pass_the_checks(triton: str, sample: Sample) -> None:
    """The oldest has all examples, each other one every variant on one of them.

    Those between the oldest and the newest come with releases of torch, and have faults of their
    own, as 3.8's atomics of buffers. All have a part of the corners, so that no part is met twice.
    """
    wanted: list[Case] = []
    with assuming(triton):
        for turn, (compiler, device) in enumerate(TARGETS):
            if compiler == triton:
                wanted += defaults(device, turn)
                wanted += corners(device, turn)
    expect_good(sample.of(wanted, fortnights=len(TRITONS)), triton)


@pytest.mark.parametrize("triton", TRITONS)
def test_the_smallest_problems_compile(triton: str, sample: Sample) -> None:
    """They compile correctly; checks of speed may fail. Each Triton has every second one."""
    devices = [device for device in ("h200", "mi300x") if triton in COMPILERS[device]]
    pairs = product(OPERATIONS, devices)
    smallest = [case for op, device in pairs for case in smallest_cases(op, device)]
    taken = sample.of(smallest[TRITONS.index(triton) % 2 :: 2], fortnights=len(TRITONS))
    reports = list(check(taken, FOLDERS[triton], workers=1))
    found = [violation for report in reports for violation in report.violations]
    assert [report.error for report in reports if report.error] == []
    allowed = {"no_spills", "no_waterfall", "overlapping_matrices"}
    assert {violation.check for violation in found} <= allowed


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("triton", "device"), TARGETS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_all_corners_pass_the_checks(op: str, device: str, triton: str) -> None:
    with assuming(triton):
        wanted = list(cases(op, device, corners=True))
    expect_good(wanted, triton)
