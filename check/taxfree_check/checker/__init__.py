"""The protocol checker: races and deadlocks of kernels that run on several GPUs, found on a CPU.

All ranks run in one process under a seeded scheduler; every access is checked against what happened
before it. ``docs/memory-model.md`` describes what this finds and what it cannot find. Any kernels
run in a :class:`World` (``docs/check.md``); the variants of operations run as their plans do, and
need ``TRITON_INTERPRET=1`` before Triton is imported.
"""

from taxfree_check.checker.check import (
    MIXED,
    STEP,
    assert_protocol_holds,
    check_variant,
    checkable_variants,
    tiny_problems,
)
from taxfree_check.checker.checked import Checked, CheckFailed, coverage_rows
from taxfree_check.checker.coverage import Wanted
from taxfree_check.checker.fabric import SimulatedFabric, Simulation
from taxfree_check.checker.ranks import Symmetric
from taxfree_check.checker.report import Reason, Violation
from taxfree_check.checker.simulate import ScheduleOutcome
from taxfree_check.checker.world import Overrides, World, overrides

__all__ = [
    "MIXED",
    "STEP",
    "CheckFailed",
    "Checked",
    "Overrides",
    "Reason",
    "ScheduleOutcome",
    "SimulatedFabric",
    "Simulation",
    "Symmetric",
    "Violation",
    "Wanted",
    "World",
    "assert_protocol_holds",
    "check_variant",
    "checkable_variants",
    "coverage_rows",
    "overrides",
    "tiny_problems",
]
