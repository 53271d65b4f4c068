"""The stored values: fingerprints, measurements, records and trials.

Their constructors check all fields, and raise `InvalidRecord` with the name of the wrong one. They
are stored as JSON only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from itertools import repeat
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from .errors import InvalidRecord
from .renamed import with_new_names

SCHEMA_VERSION = 1
OF_A_BENCH = "bench"  # `method` of a record that a bench has made, not a search
OF_A_LENDER = "lent"  # `method` of a record of a winner that another device lent, and no search
_SAME_MEMORY = 0.05  # of a device: drivers report less than the part has, and not always the same

Scalar: TypeAlias = int | str | bool | float
Mode: TypeAlias = Literal["eager", "graph"]
TrialState: TypeAlias = Literal["measured", "refused", "failed", "wrong", "crashed", "hung"]

MODES: tuple[str, ...] = get_args(Mode)
TRIAL_STATES: tuple[str, ...] = get_args(TrialState)

_T = TypeVar("_T")


@dataclass(frozen=True)
class HardwareFingerprint:
    """The hardware a record was measured on; devices that compute like it may borrow the record.

    Args:
        gpu: product name, as the driver gives it; with the number of nodes, if there are several.
        architecture: compiler target, such as `sm_90` or `gfx942`.
        compute_units: SMs or CUs that are enabled.
        memory_bytes: device memory, in bytes.
        link: the link between GPUs, such as `nvlink`.
        num_xcds: chiplets, each with an L2 cache.
    """

    gpu: str
    architecture: str
    compute_units: int
    memory_bytes: int
    link: str
    num_xcds: int = 1

    def __post_init__(self) -> None:
        for name in ("gpu", "architecture", "link"):
            _text(name, getattr(self, name))
        for name in ("compute_units", "memory_bytes", "num_xcds"):
            _count(name, getattr(self, name))

    def computes_like(self, other: HardwareFingerprint) -> bool:
        """Whether two devices differ in nothing but their names, memory and clocks."""
        names = ("architecture", "compute_units", "link", "num_xcds")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def is_kind_of(self, other: HardwareFingerprint) -> bool:
        """Whether two devices differ in nothing but their names; one may not be their driver's."""
        apart = abs(self.memory_bytes - other.memory_bytes)
        return self.computes_like(other) and apart <= _SAME_MEMORY * other.memory_bytes

    def is_same(self, other: HardwareFingerprint) -> bool:
        """Whether both are of one device, whatever a driver says of its memory."""
        return self.gpu == other.gpu and self.is_kind_of(other)


@dataclass(frozen=True)
class SoftwareFingerprint:
    """The versions a record was measured with; other versions are a soft mismatch.

    Args:
        taxfree, triton, torch: their versions.
        driver: version of the GPU driver.
        runtime: `cuda 13.0`, `rocm 7.1` or `cpu`.
        collectives: the collective library and its version.
    """

    taxfree: str
    triton: str
    torch: str
    driver: str
    runtime: str
    collectives: str

    def __post_init__(self) -> None:
        for field in fields(self):
            _text(field.name, getattr(self, field.name))


@dataclass(frozen=True)
class Measurement:
    """One variant with one configuration, measured.

    Args:
        variant: name of the variant.
        config: its configuration.
        version: of the variant, when it was measured; 0 is older than all.
        median_us: median time per mode (`eager`, `graph`), in microseconds.
        iqr_us: interquartile range for the same modes, in microseconds.
        samples: repetitions behind the medians.
        relative_error: against the fp64 reference, or None where it was not taken.
    """

    variant: str
    config: dict[str, Scalar]
    version: int
    median_us: dict[str, float]
    iqr_us: dict[str, float]
    samples: int
    relative_error: float | None

    def __post_init__(self) -> None:
        _name("variant", self.variant)
        _scalars("config", self.config)
        _count("version", self.version)
        _times("median_us", self.median_us)
        _require(bool(self.median_us), "median_us", "holds no mode")
        _times("iqr_us", self.iqr_us)
        _require(self.iqr_us.keys() == self.median_us.keys(), "iqr_us", "modes unlike median_us")
        _count("samples", self.samples, least=1)
        if self.relative_error is not None:
            _number("relative_error", self.relative_error)


@dataclass(frozen=True)
class Record:
    """The outcome of tuning one problem on one machine, or of modelling it.

    Args:
        op: name of the operation.
        problem: fields of the problem, with `world_size` and `dtype`.
        hardware, software: of the measurement.
        winner: the variant to run; the baseline where nothing was faster.
        baseline: the library's path.
        runners_up: the next best, best first.
        trials: number of candidates tried.
        seconds_spent: duration of the search, in seconds.
        provenance: `source` ("user", "imported" or "shipped"), `created` (ISO time), perhaps
            `from` (the file of an import), `commit` (of the sources that were measured), `method`
            (:data:`OF_A_BENCH`, :data:`OF_A_LENDER`), `lender` (the GPU that lent it), ...
        schema: version of this layout.
    """

    op: str
    problem: dict[str, Scalar]
    hardware: HardwareFingerprint
    software: SoftwareFingerprint
    winner: Measurement
    baseline: Measurement
    runners_up: tuple[Measurement, ...]
    trials: int
    seconds_spent: float
    provenance: dict[str, str]
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        _name("op", self.op)
        _scalars("problem", self.problem)
        _require("world_size" in self.problem, "problem.world_size", "missing")
        _count("problem.world_size", self.problem["world_size"], least=1)
        _require("dtype" in self.problem, "problem.dtype", "missing")
        _name("problem.dtype", self.problem["dtype"])
        _count("trials", self.trials)
        _number("seconds_spent", self.seconds_spent)
        _provenance(self.provenance)
        _require(self.schema == SCHEMA_VERSION, "schema", f"is not {SCHEMA_VERSION}")

    @property
    def is_lent(self) -> bool:
        """Whether another device lent the winner, which was only timed beside the library here."""
        return self.provenance.get("method") == OF_A_LENDER

    @property
    def lender(self) -> str:
        """The GPU that lent it; empty if none did."""
        return self.provenance.get("lender", "")

    @property
    def key(self) -> str:
        """The key of the record in the store."""
        return record_key(self.op, self.problem, self.hardware)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON document."""
        return asdict(self) | {"runners_up": [asdict(runner_up) for runner_up in self.runners_up]}

    @classmethod
    def from_json(cls, document: object) -> Record:
        """Return the record that a JSON document describes.

        Raises:
            InvalidRecord: naming the field that is missing, unknown or wrong.
        """
        _known_schema(document)
        op = document.get("op") if isinstance(document, Mapping) else None
        values = _values(cls, with_new_names(op, document))
        values["hardware"] = _nested("hardware", HardwareFingerprint, values["hardware"])
        values["software"] = _nested("software", SoftwareFingerprint, values["software"])
        values["winner"] = _nested("winner", Measurement, values["winner"])
        values["baseline"] = _nested("baseline", Measurement, values["baseline"])
        others = values["runners_up"]
        _require(isinstance(others, list), "runners_up", "is not a list")
        paths = (f"runners_up[{index}]" for index in range(len(others)))
        values["runners_up"] = tuple(map(_nested, paths, repeat(Measurement), others))
        return cls(**values)


@dataclass(frozen=True)
class TrialRecord:
    """One candidate that the tuner tried.

    Args:
        variant, config, version: as in `Measurement`.
        state: the outcome.
        reason: why it was not measured; empty if it was.
        median_us: median time per mode, in microseconds; empty unless measured.
        seconds: duration of the trial, in seconds.
    """

    variant: str
    config: dict[str, Scalar]
    state: TrialState
    reason: str
    median_us: dict[str, float]
    seconds: float
    version: int

    def __post_init__(self) -> None:
        _name("variant", self.variant)
        _scalars("config", self.config)
        _require(self.state in TRIAL_STATES, "state", f"is none of {', '.join(TRIAL_STATES)}")
        _text("reason", self.reason)
        _times("median_us", self.median_us)
        measured = self.state == "measured"
        _require(bool(self.median_us) == measured, "median_us", f"does not fit {self.state!r}")
        _number("seconds", self.seconds)
        _count("version", self.version)

    def to_json(self) -> dict[str, Any]:
        """Return the trial as a JSON document."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: object, op: str | None = None) -> TrialRecord:
        """Return the trial that a JSON document describes.

        Args:
            document: as `to_json` returned it, in this or an older version of taxfree.
            op: the operation, whose old names are replaced.

        Raises:
            InvalidRecord: naming the field that is missing, unknown or wrong.
        """
        return cls(**_values(cls, with_new_names(op, document)))


def record_key(op: str, problem: Mapping[str, Scalar], hardware: HardwareFingerprint) -> str:
    """Return the key of a problem on a machine: canonical JSON, the same in every process.

    All keys are made here: if tuner and dispatcher disagreed, look-ups would silently miss.

    Raises:
        InvalidRecord: a field of the problem is not a finite scalar.
    """
    _scalars("problem", problem)
    return canonical_json({"op": op, "problem": dict(problem), "hardware": asdict(hardware)})


def canonical_json(document: object) -> str:
    """Return JSON text that is the same for equal documents.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def stale_reason(measured: Record | Measurement, versions: Mapping[str, int]) -> str | None:
    """Return why a measurement, or a record's winner, is not of today's kernel; None if it is.

    Args:
        versions: the current version of every variant of the operation.
    """
    winner = measured.winner if isinstance(measured, Record) else measured
    current = versions.get(winner.variant)
    if current is None:
        return f"variant {winner.variant} is unknown"
    if winner.version != current:
        return f"measured with version {winner.version} of {winner.variant}, now {current}"
    return None


# -- checks --


def _require(condition: bool, field: str, why: str) -> None:
    if not condition:
        raise InvalidRecord(field, why)


def _text(field: str, value: object) -> None:
    try:
        str.encode(value)  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):  # JSON can hold halves of characters
        raise InvalidRecord(field, "is not text") from None


def _name(field: str, value: object) -> None:
    _text(field, value)
    _require(value != "", field, "is empty")


def _count(field: str, value: Any, least: int = 0) -> None:
    # bool is a subclass of int
    _require(isinstance(value, int) and not isinstance(value, bool), field, "is not an integer")
    _require(value >= least, field, f"is below {least}")
    _require(_is_finite(value), field, "is not finite")


def _number(field: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(is_number, field, "is not a number")
    _require(_is_finite(value), field, "is not finite")
    _require(value >= 0, field, "is negative")


def _is_finite(value: object) -> bool:
    try:
        return not isinstance(value, int | float) or math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _items(field: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise InvalidRecord(field, "is not a mapping")
    for name, item in value.items():
        _name(f"{field} name", name)
        yield f"{field}.{name}", item


def _scalars(field: str, value: object) -> None:
    for path, item in _items(field, value):
        _require(isinstance(item, int | str | float), path, "is not a scalar")
        if isinstance(item, str):
            _text(path, item)
        _require(_is_finite(item), path, "is not finite")


def _times(field: str, value: object) -> None:
    for path, item in _items(field, value):
        _require(path.removeprefix(f"{field}.") in MODES, path, "is not a mode")
        _number(path, item)


def _provenance(value: object) -> None:
    for path, item in _items("provenance", value):
        _text(path, item)
        if path == "provenance.created":
            try:
                datetime.fromisoformat(str(item))
            except ValueError:
                raise InvalidRecord(path, "is not an ISO time") from None


def _known_schema(document: object) -> None:
    schema = document.get("schema") if isinstance(document, Mapping) else None
    newer = isinstance(schema, int) and schema > SCHEMA_VERSION
    _require(not newer, "schema", f"{schema} is newer than {SCHEMA_VERSION}: update taxfree")


def _values(cls: type, document: object) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise InvalidRecord("", "is not a JSON object")
    names = [field.name for field in fields(cls)]
    for name in names:
        _require(name in document, name, "missing")
    for name in document:
        _require(name in names, str(name), "unknown field")
    return dict(document)


def _nested(path: str, cls: type[_T], document: object) -> _T:
    try:
        return cls(**_values(cls, document))
    except InvalidRecord as error:
        field = f"{path}.{error.field}" if error.field else path
        raise InvalidRecord(field, error.why) from None
