"""Reports of the assembly checks: made, cached, and formatted as text."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

import taxfree_kernels
from taxfree_check.cross_compile.asm_checks import BrokenRule
from taxfree_check.cross_compile.coverage import Case
from taxfree_check.cross_compile.pool import CompilePool
from taxfree_check.cross_compile.resources import Resources, illegal_reason
from taxfree_check.cross_compile.screen import request
from taxfree_tuning_db.files import users_folder

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
    cache_dir: Path | None = None,
) -> Iterator[KernelReport]:
    """Compile cases and run the assembly checks on their kernels, one report per kernel.

    Args:
        cases: what to compile; those that launch no kernel of ours report nothing.
        triton_path: folder of another Triton than the installed one.
        workers: processes; half the cores by default.
        cache_dir: of the compiler's answers; the user's cache folder when None.
    """
    version = triton_version(triton_path)
    folder = cache_dir or users_folder(platformdirs.user_cache_path) / "compiled"
    wanted = [(case, folder / f"{_key(case, version)}.json") for case in cases]
    missing = {file: case for case, file in wanted if not file.exists()}  # each once
    with CompilePool(workers, triton_path=triton_path) as pool:
        answers = pool.answers(
            request(c.op, c.problem, c.variant, c.config, c.hardware, aligned=c.aligned)
            for c in missing.values()
        )
        for case, file in wanted:
            if file in missing:
                _save(file, next(answers))
                del missing[file]
            yield from _reports(case, version, json.loads(file.read_text()))


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


# -- cache --------------------------------------------------------------------------------------


@cache
def _source_hash() -> str:
    """A hash of all that can change an answer: kernels, fabrics, checks."""
    digest = hashlib.sha256()
    for root in (Path(taxfree_kernels.__file__).parent, Path(__file__).parent):
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _key(case: Case, version: str) -> str:
    return hashlib.sha256(f"{_source_hash()}\0{version}\0{case}".encode()).hexdigest()[:32]


def _save(file: Path, answer: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(answer))
    partial.replace(file)


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
