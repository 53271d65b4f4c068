"""The register of assembly checks, and their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from taxfree_check.cross_compile.assembly import AsmInstruction
from taxfree_check.cross_compile.compiled_kernel import CompiledKernel


@dataclass(frozen=True)
class BrokenRule:
    """A broken rule, and the line of the assembly that shows it."""

    check: str
    message: str
    line: int = 0
    evidence: str = ""

    def __str__(self) -> str:
        where = f" (line {self.line}: {self.evidence})" if self.line else ""
        return f"{self.check}: {self.message}{where}"


class Finding(NamedTuple):
    """The way a kernel breaks a rule, and the instruction that shows it."""

    message: str
    at: AsmInstruction | None = None


Check = Callable[[CompiledKernel], Iterator[Finding]]
CHECKS: dict[str, Check] = {}
#: checks of speed alone; a kernel that breaks another rule may give wrong results
SPEED_CHECKS: set[str] = set()


def assembly_check(function: Check) -> Check:
    """Enter a check into the register, under its name."""
    CHECKS[function.__name__] = function
    return function


def speed_check(function: Check) -> Check:
    """Enter a check whose rule is about speed."""
    SPEED_CHECKS.add(function.__name__)
    return assembly_check(function)


def violations(kernel: CompiledKernel, speed: bool = True) -> list[BrokenRule]:
    """The rules that `kernel` breaks, check by check.

    Args:
        speed: run the checks of speed as well.
    """
    violations = []
    for name, check in CHECKS.items():
        if speed or name not in SPEED_CHECKS:
            for message, instruction in check(kernel):
                line, text = (
                    (instruction.line, instruction.text) if instruction is not None else (0, "")
                )
                violations.append(BrokenRule(name, message, line, text))
    return violations
