"""The cost model: how long each variant would take, from a machine's rates. There is one.

Times are in microseconds, sizes in bytes, of one rank. W ranks, A [M, K], weights [K, N]::

    gemm       = start + max(2 ceil(M, 64) N K / flops, memory_bytes / memory)
    collective = latency + (W - 1) / W * gathered_bytes / collective
    copy       = start_copy + 2 * A_bytes / copy
    send       = signal + max(bytes to receive / link, bytes of a chunk / sender)
    tiles      = waves * tile,  waves = ceil(programs / (compute units * resident))
    tile       = max(2 BM BN K / splits / (flops / compute units * tile efficiency),
                     memory_bytes / memory / waves)
    pulled     = signal + bytes to receive * ceil(N / BN) / pull

    baseline         = collective + copy (gather_dim 1, or ragged M) + gemm
    registered       = the same with the registered collective, and a copy in
    one_shot         = send + 2 * A_bytes / memory + gemm
    push             = start + max(tiles, send + tile * what waits)
    push_two_kernel  = start + send + tiles
    pull             = start + max(tiles, pulled)

    t_graph = the kernels + gap * (kernels - 1)
    t_eager = max(t_graph, host)

What waits is all of a tile for gather_dim 0, and (W - 1) / W of it for gather_dim 1. `host` is what
the host takes for a call: a constant per call, per kernel, and per collective. Skew, power and
noise are not modelled. The rates of H200 are fitted to measured rows (benchmarks/model_error.py,
which also says how wrong the model is). Other machines are taken to reach the same fractions of
their data sheets, with the same overheads: no measurement stands behind them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taxfree.bounds import Bounds, Peaks, bounds
from taxfree.errors import UsageError
from taxfree.taxes import INSIDE, Account, Part, Tax
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.hardware import KNOWN, Hardware

VARIANTS = ("baseline", "registered", "one_shot", "push", "push_two_kernel", "pull")

_GEMM_ROWS = 64  # a matrix instruction's rows, to which M is rounded up


@dataclass(frozen=True)
class Machine:
    """One kind of GPU in a fully connected node.

    Args:
        hardware: its limits.
        flops_per_s: of the vendor's matmul on large matrices.
        memory_bytes_per_s: of device memory.
        link_bytes_per_s: that a rank receives from all peers through symmetric memory.
        collective_bytes_per_s, registered_bytes_per_s: that the collective library delivers, on
            ordinary and on registered buffers.
        pull_bytes_per_s: of loads from peers by tiles.
        copy_bytes_per_s: read and written by a strided copy.
        sender_bytes_per_s: of one sending program.
        tile_efficiency: of a Triton tile, of a compute unit's share of the flops.
        resident: programs of a tile kernel per compute unit.
        latency_us, registered_latency_us: of the collective on next to nothing.
        signal_us: from a rank's signal to the end of a peer's wait, and what is around it.
        gemm_start_us, tile_start_us, copy_start_us: from launch to full speed, and back.
        gap_us: from one kernel to the next in a graph.
        host_call_us, host_kernel_us, host_collective_us: of the host, per call, kernel, collective.
    """

    hardware: Hardware
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    collective_bytes_per_s: float
    registered_bytes_per_s: float
    pull_bytes_per_s: float
    copy_bytes_per_s: float
    sender_bytes_per_s: float
    tile_efficiency: float
    resident: float
    latency_us: float
    registered_latency_us: float
    signal_us: float
    gemm_start_us: float
    tile_start_us: float
    copy_start_us: float
    gap_us: float
    host_call_us: float
    host_kernel_us: float
    host_collective_us: float

    def bounds(self, problem: Any) -> Bounds:
        """The bounds of a problem at this machine's rates."""
        peaks = Peaks(self.flops_per_s, self.memory_bytes_per_s, self.link_bytes_per_s)
        return bounds(problem.cost, peaks, gemm_us(self, problem))


@dataclass(frozen=True)
class Times:
    """One variant on one problem, modelled; microseconds per call.

    Args:
        kernels: of a call, collectives counted as one.
        collective_us: of the collective's kernel, latency included; 0 for fused variants.
        latency_us: of the collective on next to nothing.
        copies_us: of re-layout copies.
        t_graph_us, t_eager_us: of a call.
    """

    kernels: int
    collective_us: float
    latency_us: float
    copies_us: float
    t_graph_us: float
    t_eager_us: float


def machine(name: str) -> Machine:
    """A machine by name.

    Raises:
        UsageError: there is no model of it.
    """
    if name not in MACHINES:
        raise UsageError(f"no cost model for {name!r}", f"one of: {', '.join(MACHINES)}")
    return MACHINES[name]


# -- parts --


def gemm_us(machine: Machine, problem: AllGatherMatmul) -> float:
    """The vendor's kernel alone."""
    rows = -(-problem.m // _GEMM_ROWS) * _GEMM_ROWS
    flops = 2 * rows * problem.n * problem.k / machine.flops_per_s
    memory = problem.cost.memory_bytes / machine.memory_bytes_per_s
    return machine.gemm_start_us + max(flops, memory) * 1e6


def _received(problem: AllGatherMatmul) -> float:
    """Bytes from peers, in full shards."""
    gathered: int = problem.slot_bytes
    return gathered * (1 - 1 / problem.world_size)


def _send_us(machine: Machine, problem: AllGatherMatmul, config: Mapping[str, Any]) -> float:
    shard = problem.slot_bytes / problem.world_size
    chunk: float = shard / config["CHUNKS"] / machine.sender_bytes_per_s
    return machine.signal_us + 1e6 * max(_received(problem) / machine.link_bytes_per_s, chunk)


def _tiles_us(
    machine: Machine, problem: AllGatherMatmul, config: Mapping[str, Any]
) -> tuple[float, float]:
    """All tiles, and one wave of them."""
    block_m, block_n, splits = config["BLOCK_M"], config["BLOCK_N"], config["SPLIT_K"]
    programs = -(-problem.m // block_m) * -(-problem.n // block_n) * splits
    units = machine.hardware.compute_units
    waves = max(1, math.ceil(programs / (units * machine.resident)))
    per_unit = machine.flops_per_s / units * machine.tile_efficiency
    # Programs that share a unit share its rate.
    sharing = min(machine.resident, max(1.0, programs / units))
    compute = 2 * block_m * block_n * problem.k / splits / per_unit * sharing
    memory = problem.cost.memory_bytes / machine.memory_bytes_per_s / waves
    wave = 1e6 * max(compute, memory)
    return waves * wave, wave


# -- variants --


def times(
    machine: Machine, problem: AllGatherMatmul, variant: str, config: Mapping[str, Any]
) -> Times:
    """A variant's times.

    Args:
        config: the variant's knobs.

    Raises:
        UsageError: there is no model of the operation or the variant.
    """
    if not isinstance(problem, AllGatherMatmul) or variant not in VARIANTS:
        raise UsageError(
            f"no cost model of {variant} on {type(problem).__name__}",
            f"all_gather_matmul has one of: {', '.join(VARIANTS)}",
        )
    if variant in ("baseline", "registered"):
        return _library(machine, problem, variant == "registered")
    if variant == "one_shot":
        laid_out = 2e6 * problem.slot_bytes / machine.memory_bytes_per_s
        gather = _send_us(machine, problem, config) + laid_out
        kernels = gather + gemm_us(machine, problem)
        return _times(machine, kernels, 2, collective=gather, latency=machine.signal_us)
    tiles, wave = _tiles_us(machine, problem, config)
    if variant == "pull":
        columns = -(-problem.n // config["BLOCK_N"])
        pulled = 1e6 * _received(problem) * columns / machine.pull_bytes_per_s
        return _times(machine, machine.tile_start_us + max(tiles, machine.signal_us + pulled), 1)
    send = _send_us(machine, problem, config)
    if variant == "push_two_kernel":
        return _times(machine, machine.tile_start_us + send + tiles, 2)
    waiting = 1.0
    if problem.gather_dim == 1:
        waiting = (problem.world_size - 1) / problem.world_size
    return _times(machine, machine.tile_start_us + max(tiles, send + waiting * wave), 1)


def _library(machine: Machine, problem: AllGatherMatmul, registered: bool) -> Times:
    latency, rate = machine.latency_us, machine.collective_bytes_per_s
    if registered:
        latency, rate = machine.registered_latency_us, machine.registered_bytes_per_s
    collective = latency + 1e6 * _received(problem) / rate
    shard = problem.slot_bytes / problem.world_size
    moved = []
    if registered or (problem.gather_dim == 0 and problem.m % problem.world_size):
        moved.append(shard)
    if problem.gather_dim == 1 and problem.m > 1:
        moved.append(problem.slot_bytes)
    copies = sum(machine.copy_start_us + 2e6 * size / machine.copy_bytes_per_s for size in moved)
    kernels = collective + copies + gemm_us(machine, problem)
    return _times(
        machine, kernels, 2 + len(moved), collectives=1, collective=collective,
        latency=latency, copies=copies,
    )  # fmt: skip


def _times(
    machine: Machine,
    kernels_us: float,
    kernels: int,
    collectives: int = 0,
    collective: float = 0.0,
    latency: float = 0.0,
    copies: float = 0.0,
) -> Times:
    graph = kernels_us + machine.gap_us * (kernels - 1)
    host = machine.host_call_us + machine.host_kernel_us * (kernels - collectives)
    host += machine.host_collective_us * collectives
    return Times(kernels, collective, latency, copies, graph, max(graph, host))


# -- the account --


@dataclass(frozen=True)
class Modelled:
    """A modelled account, and the kernels of a call."""

    account: Account
    kernels: int


def modelled(
    machine: Machine, problem: AllGatherMatmul, variant: str, config: Mapping[str, Any]
) -> Modelled:
    """The account of the taxes that a variant pays; each part says that it is modelled."""
    found = times(machine, problem, variant, config)
    limits = machine.bounds(problem)
    gaps = machine.gap_us * (found.kernels - 1)
    parts = [
        _part("host", "launch", found.t_eager_us - found.t_graph_us, "host time beyond t_graph"),
        _part("gaps", "launch", gaps, f"{found.kernels - 1} x {machine.gap_us:.1f} us"),
    ]
    unsplit = ""
    if found.collective_us:
        exposed = max(0.0, limits.t_link_us - limits.t_floor_us)
        transfer = found.collective_us - found.latency_us - exposed
        bulk: Tax = "bulk synchronous"
        parts.append(_part("latency", bulk, found.latency_us, "of the collective"))
        parts.append(_part("transfer", bulk, transfer, "bytes to receive / rate"))
        size = 2 * problem.slot_bytes if found.copies_us else 0
        parts.append(_part("copies", "locality", found.copies_us, "start + bytes / rate", size))
    else:
        unsplit = INSIDE
    account = Account(
        0, found.t_eager_us, found.t_graph_us, limits.t_bound_us, tuple(parts), None, unsplit
    )
    return Modelled(account, found.kernels)


def _part(name: str, tax: Tax, us: float, formula: str, memory_bytes: int = 0) -> Part:
    return Part(name, tax, us, None, f"modelled: {formula}", memory_bytes)


# -- machines --

H200 = Machine(
    hardware=KNOWN["h200"],
    # measured: the peaks in the result files
    flops_per_s=769e12,
    memory_bytes_per_s=4.25e12,
    link_bytes_per_s=357e9,
    # fitted
    collective_bytes_per_s=143e9,
    registered_bytes_per_s=361e9,
    pull_bytes_per_s=282e9,
    copy_bytes_per_s=1.9e12,
    sender_bytes_per_s=7.5e9,
    tile_efficiency=0.6,
    latency_us=8.8,
    registered_latency_us=5.3,
    signal_us=2.4,
    gemm_start_us=6.9,
    tile_start_us=6.7,
    copy_start_us=1.7,
    host_call_us=19.0,
    host_kernel_us=23.5,
    host_collective_us=34.0,
    # assumed: rows without a profile do not tell these from the starts above
    resident=2.0,
    gap_us=1.0,
)


@dataclass(frozen=True)
class _DataSheet:
    """Peak rates as the vendor states them: dense 16-bit, memory, and links into one GPU."""

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


_H200_SHEET = _DataSheet(989e12, 4.8e12, 450e9)


def _scaled(hardware: Hardware, sheet: _DataSheet) -> Machine:
    """A machine that reaches of its data sheet what H200 does of its own, with H200's overheads."""
    flops = sheet.flops_per_s / _H200_SHEET.flops_per_s
    memory = sheet.memory_bytes_per_s / _H200_SHEET.memory_bytes_per_s
    link = sheet.link_bytes_per_s / _H200_SHEET.link_bytes_per_s
    return dataclasses.replace(
        H200,
        hardware=hardware,
        flops_per_s=H200.flops_per_s * flops,
        memory_bytes_per_s=H200.memory_bytes_per_s * memory,
        link_bytes_per_s=H200.link_bytes_per_s * link,
        collective_bytes_per_s=H200.collective_bytes_per_s * link,
        registered_bytes_per_s=H200.registered_bytes_per_s * link,
        pull_bytes_per_s=H200.pull_bytes_per_s * link,
        copy_bytes_per_s=H200.copy_bytes_per_s * memory,
    )


MACHINES = {
    "h200": H200,
    "mi300x": _scaled(KNOWN["mi300x"], _DataSheet(1307e12, 5.3e12, 448e9)),
    "mi325x": _scaled(KNOWN["mi325x"], _DataSheet(1307e12, 6.0e12, 448e9)),
}
