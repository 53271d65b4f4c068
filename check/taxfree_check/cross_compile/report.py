"""Reports of the assembly checks: made, and formatted as text."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from taxfree_check.cross_compile.asm_checks import BrokenRule
from taxfree_check.cross_compile.coverage import Case
from taxfree_check.cross_compile.pool import CompilePool
from taxfree_check.cross_compile.resources import Resources, illegal_reason
from taxfree_check.cross_compile.screen import request

#: checks that only default configs have to pass; the screen and the clock judge other configs
_DEFAULT_ONLY = {"no_spills", "overlapping_matrices"}


@dataclass(frozen=True)
class KernelReport:
    """The result of one kernel of one case.

    Args:
        op, problem, variant, config, device: the case.
        kernel: its name; empty when nothing was compiled.
        architecture: that it was compiled for.
        triton: version of the compiler.
        resources: of one program; None when it does not compile.
        violations: of assembly checks.
        error: why it does not compile, or None.
    """

    op: str
    problem: dict[str, Any]
    variant: str
    config: dict[str, Any]
    device: str
    kernel: str
    architecture: str
    triton: str
    resources: Resources | None = None
    violations: list[BrokenRule] = field(default_factory=list)
    error: str | None = None

    @property
    def is_good(self) -> bool:
        return self.error is None and not self.violations

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check(
    cases: Iterable[Case],
    triton_path: Path | None = None,
    workers: int | None = None,
) -> Iterator[KernelReport]:
    """Compile cases and run the assembly checks on their kernels, one report per kernel.

    Args:
        cases: what to compile; those that launch no kernel of ours report nothing.
        triton_path: folder of another Triton than the installed one.
        workers: processes; half the cores by default.
    """
    version = triton_version(triton_path)
    cases = list(cases)
    with CompilePool(workers, triton_path=triton_path) as pool:
        answers = pool.answers(
            request(c.op, c.problem, c.variant, c.config, c.hardware, aligned=c.aligned)
            for c in cases
        )
        for case, answer in zip(cases, answers, strict=True):
            yield from _reports(case, version, answer)


def triton_version(path: Path | None) -> str:
    """Version of the Triton in a folder, or of the installed one, without importing it."""
    folders = sys.path if path is None else [str(path)]
    for distribution in importlib.metadata.distributions(path=folders):
        if (distribution.name or "").lower() in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
            return distribution.version
    return "unknown"


def _reports(case: Case, version: str, answer: dict[str, Any]) -> Iterator[KernelReport]:
    common: dict[str, Any] = {
        "op": case.op,
        "problem": asdict(case.problem),
        "variant": case.variant,
        "config": dict(case.config),
        "device": case.device,
        "architecture": case.hardware.architecture,
        "triton": version,
    }
    if "error" in answer:
        yield KernelReport(kernel="", error=answer["error"], **common)
    for kernel in answer.get("kernels", ()):
        resources = Resources(**kernel["resources"])
        broken = [BrokenRule(**one) for one in kernel["violations"]]
        if not case.is_default:
            broken = [one for one in broken if one.check not in _DEFAULT_ONLY]
        elif reason := illegal_reason(resources, case.hardware, spill_limit=1 << 30):
            broken.append(BrokenRule("default_fits", reason))
        yield KernelReport(
            kernel=kernel["kernel"], resources=resources, violations=broken, **common
        )


# -- text ---------------------------------------------------------------------------------------


def format_report(report: KernelReport) -> str:
    """A heading, the kernel's resources, and what is wrong with it."""
    problem = " ".join(f"{name}={value}" for name, value in report.problem.items())
    config = " ".join(f"{name}={value}" for name, value in report.config.items())
    lines = [
        f"{report.op} {report.variant} {report.kernel or '-'}: {report.architecture}, "
        f"Triton {report.triton}",
        f"  problem    {problem}",
        f"  config     {config}",
    ]
    if report.resources is not None:
        taken = report.resources
        lines.append(
            f"  takes      {taken.registers} registers, {taken.spill_bytes} bytes spilled, "
            f"{taken.shared_memory} bytes of shared memory, "
            f"{taken.programs_per_unit} programs per compute unit"
        )
    if report.error is not None:
        lines.append(f"  error      {report.error}")
    lines += [f"  violation  {violation}" for violation in report.violations]
    if report.is_good:
        lines.append("  checks     all passed")
    return "\n".join(lines)


def summary(reports: Iterable[KernelReport]) -> str:
    """One line: kernels, compilers, targets, violations."""
    every = list(reports)
    bad = [report for report in every if not report.is_good]
    versions = ", ".join(sorted({report.triton for report in every}))
    targets = ", ".join(sorted({report.architecture for report in every}))
    return f"{len(every)} kernels for {targets} under Triton {versions}: {len(bad)} with violations"
