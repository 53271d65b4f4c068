"""The register of gates, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from taxfree_kernels.cross_compile.asm_checks.subject import Subject
from taxfree_kernels.cross_compile.assembly import Instruction


@dataclass(frozen=True)
class Violation:
    """A broken rule, and the line of the assembly that shows it."""

    gate: str
    message: str
    line: int = 0
    evidence: str = ""

    def __str__(self) -> str:
        where = f" (line {self.line}: {self.evidence})" if self.line else ""
        return f"{self.gate}: {self.message}{where}"


class Finding(NamedTuple):
    """How a kernel breaks a rule, and the instruction that shows it."""

    message: str
    at: Instruction | None = None


Gate = Callable[[Subject], Iterator[Finding]]
GATES: dict[str, Gate] = {}
#: those whose rules are about speed alone: what breaks another one may give wrong results
OF_SPEED: set[str] = set()


def gate(function: Gate) -> Gate:
    """Enter a gate into the register, under its name."""
    GATES[function.__name__] = function
    return function


def gate_of_speed(function: Gate) -> Gate:
    """Enter a gate whose rule is about speed."""
    OF_SPEED.add(function.__name__)
    return gate(function)


def violations(subject: Subject, of_speed: bool = True) -> list[Violation]:
    """What `subject` breaks, gate by gate.

    Args:
        of_speed: look through the gates of speed as well.
    """
    found = []
    for name, look in GATES.items():
        if of_speed or name not in OF_SPEED:
            for message, at in look(subject):
                line, text = (at.line, at.text) if at is not None else (0, "")
                found.append(Violation(name, message, line, text))
    return found
