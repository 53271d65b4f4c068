"""The protocol checker: races and deadlocks of fused kernels, found on a CPU.

All ranks run in one process under a seeded scheduler; every access is checked against what happened
before it. ``docs/memory-model.md`` describes what this finds and what it cannot find. Kernels must
be interpreted: set ``TRITON_INTERPRET=1`` before Triton is imported.
"""

from taxfree_kernels.checker.check import (
    MIXED,
    Checked,
    ProtocolError,
    assert_protocol_holds,
    check_variant,
    checkable_variants,
    coverage_rows,
)
from taxfree_kernels.checker.coverage import Wanted
from taxfree_kernels.checker.fabric import SimulatedFabric, Simulation
from taxfree_kernels.checker.report import Reason, Violation
from taxfree_kernels.checker.simulate import Outcome

__all__ = [
    "MIXED",
    "Checked",
    "Outcome",
    "ProtocolError",
    "Reason",
    "SimulatedFabric",
    "Simulation",
    "Violation",
    "Wanted",
    "assert_protocol_holds",
    "check_variant",
    "checkable_variants",
    "coverage_rows",
]
