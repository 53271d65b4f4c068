"""Assembly checks: rules that the compiled code of every kernel has to obey.

The interpreter runs kernels as they are written; what the compiler made of their synchronisation,
loads and loops shows only here. A check takes a compiled kernel and yields what breaks its rule.
"""

from taxfree_check.cross_compile.asm_checks import (  # noqa: F401
    layouts,
    packets,
    persistent,
    signals,
    speed,
    waits,
)
from taxfree_check.cross_compile.asm_checks.rules import (
    CHECKS,
    SPEED_CHECKS,
    BrokenRule,
    violations,
)

__all__ = ["CHECKS", "SPEED_CHECKS", "BrokenRule", "violations"]
