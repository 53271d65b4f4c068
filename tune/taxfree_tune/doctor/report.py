"""The findings of `taxfree doctor`, as plain data; a probe that fails becomes a `problem`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from taxfree.errors import one_line
from taxfree_tune.drivers.gpu import Gpu, GpuProcess


@dataclass(frozen=True)
class Package:
    """A Python package.

    Args:
        name: of its import.
        loaded: version of the module that an import gives; None where it cannot be imported.
        installed: "distribution version" of each distribution that brings it.
    """

    name: str
    loaded: str | None
    installed: tuple[str, ...]


@dataclass(frozen=True)
class IrisReport:
    """Whether ROCm's Iris is there.

    Args:
        state: "present", "missing", "broken", or "namesake" for another package of this name.
        detail: its version, or why it cannot be used.
    """

    state: str
    detail: str


@dataclass(frozen=True)
class Software:
    """Versions installed, and versions that an import gives.

    Args:
        versions: name -> version, of what is no Python package.
        packages: Python packages.
        iris: ROCm's Iris.
    """

    versions: Mapping[str, str]
    packages: tuple[Package, ...]
    iris: IrisReport

    def loaded(self, name: str) -> str | None:
        """Version of a package that an import gives."""
        return next((package.loaded for package in self.packages if package.name == name), None)


@dataclass(frozen=True)
class ExaminedMachine:
    """The machine below the software.

    Args:
        system: name -> description, of everything but the GPUs.
        vendors: whose GPUs are there: "nvidia", "amd".
        gpus, processes: as the driver sees them.
        links: [gpu][gpu] how two GPUs are joined, such as "NV18" or "XGMI".
        environment: the variables that matter, and are set.
    """

    system: Mapping[str, str] = field(default_factory=dict)
    vendors: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """The rates that bounds are computed with; see :class:`taxfree_tune.measuring.bounds.Peaks`.

    Args:
        matmul_tflop_s: of bfloat16.
        memory_gb_s: of device memory.
        links_gb_s: that a rank receives from all peers at once; None for one rank.
    """

    matmul_tflop_s: float
    memory_gb_s: float
    links_gb_s: float | None


@dataclass(frozen=True)
class StartOrder:
    """In which order the programs of one launch start.

    Args:
        programs: of a launch.
        resident: how many of them the device holds at a time.
        chiplets: to which programs are assigned round-robin; only the order within each counts.
        largest_inversion: the largest number of lower ids that surely had not started before some
            program; 0 is the order of ids.
        elsewhere: number of programs that run on another chiplet than the one assigned so.
    """

    programs: int
    resident: int
    chiplets: int
    largest_inversion: int
    elsewhere: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether no program started a wave before a lower id.

        Programs that start together race for their tickets, so less says nothing.
        """
        return self.largest_inversion < max(1, self.resident // self.chiplets)


@dataclass(frozen=True)
class BarrierTime:
    """Microseconds of a barrier of all ranks on their devices.

    Args:
        eager_us: launched by itself.
        graph_us: replayed from a captured graph; None where the fabric has no graphs.
    """

    eager_us: float
    graph_us: float | None


@dataclass(frozen=True)
class PeerBandwidth:
    """Bandwidth between each rank r and a peer while all transfer, in GB/s of the slowest.

    Args:
        distance: the peer is rank (r + distance) % world_size.
        push_gb_s, pull_gb_s: by stores to, and loads from, the peer's memory in a kernel.
    """

    distance: int
    push_gb_s: float
    pull_gb_s: float


@dataclass(frozen=True)
class SignalTime:
    """Microseconds from a signal of rank 0 to the arrival of `peer`'s answer, of the fastest."""

    peer: int
    round_trip_us: float


@dataclass(frozen=True)
class Coherence:
    """Whether a running kernel sees what a peer's running kernel has stored and signalled.

    Fused kernels live by it. It needs symmetric memory that GPUs do not cache on their own, which
    HIP calls fine-grained.

    Args:
        rounds: hand-overs in each direction between rank 0 and each peer, all in one place.
        stale_words: that had an older content when their signal had come; over all ranks.
    """

    rounds: int
    stale_words: int


@dataclass(frozen=True)
class ProbeResults:
    """Measurements on a group of ranks; None is a probe that failed.

    Args:
        fabric: among the ranks.
        interpreted: kernels ran in Triton's interpreter, so that the figures only say that it
            works.
    """

    fabric: str
    world_size: int
    interpreted: bool
    rates: Rates | None = None
    order: StartOrder | None = None
    barrier: BarrierTime | None = None
    peers: tuple[PeerBandwidth, ...] | None = None
    coherence: Coherence | None = None
    signals: tuple[SignalTime, ...] | None = None


@dataclass(frozen=True)
class MachineReport:
    """All that was found out.

    Args:
        asked: the fabric that was asked for.
        fabrics: name -> why it cannot serve here, or None.
        measured: on the asked fabric, or for "auto" on the first that serves; None where none does.
        problems: what was looked at -> why it could not be found out.
        advice: what to do next.
    """

    asked: str
    software: Software
    machine: ExaminedMachine
    fabrics: Mapping[str, str | None]
    measured: ProbeResults | None
    problems: Mapping[str, str]
    advice: tuple[str, ...] = ()

    @property
    def serves(self) -> bool:
        """Whether the asked fabric opened; for "auto", whether any did."""
        return self.measured is not None

    @property
    def reason(self) -> str:
        """Why the asked fabric does not serve."""
        if self.asked == "auto":
            return "no fabric can serve on this machine"
        return f"fabric {self.asked}: {self.fabrics.get(self.asked) or 'unknown'}"


_T = TypeVar("_T")


class Guard:
    """Runs probes; one that raises leaves its reason in `problems`.

    Attributes:
        problems: what was looked at -> why it could not be found out, in one line.
    """

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}

    def __call__(self, what: str, probe: Callable[[], _T], default: _T) -> _T:
        """Return the probe's result, or `default` if it raises."""
        try:
            return probe()
        except Exception as error:
            self.problems[what] = one_line(error)
            return default
