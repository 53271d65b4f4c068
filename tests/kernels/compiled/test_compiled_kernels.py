"""Every kernel, for every architecture, under the oldest and the installed Triton, at the gates."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest

from taxfree_kernels.compiled.coverage import DEVICES, EXAMPLES, Case, cases, smallest_cases
from taxfree_kernels.compiled.report import check, format_report
from taxfree_kernels.variant import operation_names

from .conftest import TRITONS, triton_path

OPERATIONS = operation_names()


def expect_good(wanted: Iterable[Case], triton: str) -> None:
    reports = list(check(wanted, triton_path(triton), workers=1))
    assert reports
    bad = [format_report(report) for report in reports if not report.is_good]
    assert not bad, "\n\n".join(bad)


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_operation_has_examples(op: str) -> None:
    assert EXAMPLES[op]


def test_each_case_gets_its_own_report(tmp_path: Path) -> None:
    """Also one that is asked for twice, and those behind it."""
    few = [c for c in cases("matmul_all_reduce", "h200", examples=1) if "shot" in c.variant]
    asked = [few[0], few[0], *few[1:]]
    found = list(check(asked, workers=1, cache_dir=tmp_path))
    assert [(each.variant, each.kernel) for each in found] == [
        (c.variant, c.variant) for c in asked
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_default_configs_pass_the_gates(op: str, triton: str) -> None:
    """Of all examples where compilers have failed most; of few and of many rows everywhere."""
    every = {("oldest", "h200"), ("oldest", "mi300x")}
    examples = {device: None if (triton, device) in every else 2 for device in DEVICES}
    expect_good(chain(*(cases(op, device, examples=n) for device, n in examples.items())), triton)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_corners_of_the_spaces_pass_the_gates(op: str, triton: str) -> None:
    """They are dealt out to devices and compilers: each meets a third; all do in the long tests."""
    first = list(TRITONS).index(triton)
    corners = (list(cases(op, device, corners=True, examples=1)) for device in DEVICES)
    dealt = (each[(first + turn) % 3 :: 3] for turn, each in enumerate(corners))
    expect_good(chain(*dealt), triton)


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_smallest_problems_compile(op: str, triton: str) -> None:
    """What is right has to be right here, too; what is for speed may fail."""
    wanted = chain(*(smallest_cases(op, device) for device in ("h200", "mi300x")))
    reports = list(check(wanted, triton_path(triton), workers=1))
    found = [violation for report in reports for violation in report.violations]
    assert [report.error for report in reports if report.error] == []
    for_speed = {"no_spills", "no_waterfall", "overlapping_matrices"}
    assert {violation.gate for violation in found} <= for_speed


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPERATIONS)
def test_all_corners_pass_the_gates(op: str, device: str, triton: str) -> None:
    expect_good(cases(op, device, corners=True), triton)
