"""The three taxes of one pipeline: arithmetic on times and clock readings, wherever they come from.

For each rank, in microseconds per call::

    t_eager = t_bound + launch + bulk synchronous + locality + graph penalty + residual

docs/taxes.md defines the parts, and says why each is measured as it is. Parts may be negative and
are kept so. What cannot be attributed is not a part and therefore stays in the residual. The share
of the residual that was observed to be kernels' work, beyond the bound, is reported separately.
"""

from taxfree_tune.taxes.account import INSIDE, Account, Part, Tax, slowest, stacked
from taxfree_tune.taxes.critical_path import Inside, inside
from taxfree_tune.taxes.measured import (
    Alignment,
    ClockReadings,
    Nanoseconds,
    PipelineMeasurement,
    ProgramTrace,
    StepInfo,
    Times,
)
from taxfree_tune.taxes.reconcile import accounts

__all__ = [
    "INSIDE",
    "Account",
    "Alignment",
    "ClockReadings",
    "Inside",
    "Nanoseconds",
    "Part",
    "PipelineMeasurement",
    "ProgramTrace",
    "StepInfo",
    "Tax",
    "Times",
    "accounts",
    "inside",
    "slowest",
    "stacked",
]
