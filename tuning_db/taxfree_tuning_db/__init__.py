"""The tuning database of taxfree: records, the store, look-up, exchange and shipped tables.

It imports neither torch, triton nor optuna, and nothing else of taxfree.
"""

from .errors import (
    DatabaseCorrupt,
    DatabaseError,
    DatabaseFull,
    DatabaseLocked,
    DatabaseMissing,
    DatabaseReadOnly,
    DatabaseTooNew,
    DatabaseUnreadable,
    ForeignRecord,
    InvalidRecord,
    NotAnExport,
)
from .exchange import ImportReport, export, import_records, read_export
from .lookup import LookUp, LookupStep, Table, differing_fields, look_up, neighbours
from .records import (
    MODES,
    OF_A_BENCH,
    OF_A_MODEL,
    SCHEMA_VERSION,
    TRIAL_STATES,
    HardwareFingerprint,
    Measurement,
    Record,
    Scalar,
    SoftwareFingerprint,
    TrialRecord,
    TrialState,
    record_key,
)
from .staleness import prune, stale_reason
from .store import Database, default_path
from .tables import shipped_records

__all__ = [
    "MODES",
    "OF_A_BENCH",
    "OF_A_MODEL",
    "SCHEMA_VERSION",
    "TRIAL_STATES",
    "Database",
    "DatabaseCorrupt",
    "DatabaseError",
    "DatabaseFull",
    "DatabaseLocked",
    "DatabaseMissing",
    "DatabaseReadOnly",
    "DatabaseTooNew",
    "DatabaseUnreadable",
    "ForeignRecord",
    "HardwareFingerprint",
    "ImportReport",
    "InvalidRecord",
    "LookUp",
    "LookupStep",
    "Measurement",
    "NotAnExport",
    "Record",
    "Scalar",
    "SoftwareFingerprint",
    "Table",
    "TrialRecord",
    "TrialState",
    "default_path",
    "differing_fields",
    "export",
    "import_records",
    "look_up",
    "neighbours",
    "prune",
    "read_export",
    "record_key",
    "shipped_records",
    "stale_reason",
]
