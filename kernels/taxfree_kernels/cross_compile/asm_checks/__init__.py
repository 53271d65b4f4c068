"""Rules that the assembly of every kernel has to obey; each gate names one.

The interpreter runs kernels as they are written; what the compiler made of their synchronisation,
loads and loops shows only here. A gate takes a :class:`Subject` and tells what breaks its rule.
"""

from taxfree_kernels.cross_compile.asm_checks import reductions, signals, speed, waits, words  # noqa: F401
from taxfree_kernels.cross_compile.asm_checks.rules import GATES, OF_SPEED, Violation, violations
from taxfree_kernels.cross_compile.asm_checks.subject import Subject

__all__ = ["GATES", "OF_SPEED", "Subject", "Violation", "violations"]
