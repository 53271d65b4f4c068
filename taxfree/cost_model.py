"""The cost model: how long each variant would take, from a machine's rates. There is one.

A call is a row of pieces, each a kernel or what the collective library does in one call. Times are
in microseconds, sizes in bytes, of one rank of W::

    matmul      = start + max(2 ceil(M, 64) N K / flops, its bytes / memory) + split
    collective  = latency + steps of a ring * step + received / rate
    rate of sums: 1 / rate = 1 / link + 1 / ((W - 1) summed)
    copy        = start + 2 * bytes / copy
    exchange    = signal + max(received / link, (blocks of a sender - 1) * round_trip)
    tiles       = waves * tile, at least the problem's bytes / memory
    waves       = ceil(programs / compute units)
    tile        = max(2 BM BN K' / (flops / compute units), (BM + BN) K' item / loads)
    pulled      = signal + received * ceil(N / BN) / pull
    barrier     = start + signal
    engine copy = engine + received / link; announced ones of a stream take turns

The vendor's matmul splits K where its tiles (of 128 x 64) fill less than half of the compute units,
and then adds the parts: `split`, else 0. A tile is bound by what its compute unit can load, mostly
from the L2 cache, and that differs between loads by threads (cp.async) and by TMA. A sender has one
block under way at a time (Little's law), and its signal waits for the last. K' is K / SPLIT_K.
`_FORMULAS` says which pieces a variant consists of, and

    t_graph = the pieces + gap * (pieces - 1)
    t_eager = max(t_graph, host)

where the host takes so much per call, and more by what it does: it launches a kernel of ours, calls
an op of PyTorch or the collective library, makes a stream wait for another. Skew, power and noise
are not modelled. The rates of H200 are fitted to measured rows (benchmarks/model_error.py, which
also says how wrong the model is). Other machines are taken to reach the same fractions of their
data sheets, with the same overheads: no measurement stands behind them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from taxfree.bounds import Bounds, Peaks, bounds
from taxfree.errors import UsageError
from taxfree.taxes import INSIDE, Account, Part, Tax
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.variant import op_of

_GEMM_ROWS = 64  # a matrix instruction's rows, to which M is rounded up
_VENDOR_TILE = 128, 64
_ITEM_BYTES = 2  # of float16 and bfloat16, which all problems have

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """One kind of GPU in a fully connected node.

    Args:
        hardware: its limits.
        flops_per_s: of the vendor's matmul on large matrices.
        memory_bytes_per_s: of device memory.
        link_bytes_per_s: that a rank receives from all peers through symmetric memory.
        copy_bytes_per_s: read and written by a strided copy.
        collective_bytes_per_s: that the collective library gathers; on registered buffers it
            reaches the link's rate.
        summed_bytes_per_s: that it adds from each peer, beside the link.
        pull_bytes_per_s: of loads from peers by tiles.
        loads_bytes_per_s, tma_bytes_per_s: that one compute unit's tiles load, by threads or TMA.
        latency_us, registered_latency_us: of the collective on next to nothing.
        step_us: and for each step of its ring, where buffers are not registered.
        signal_us: from a rank's signal to the end of a peer's wait, and what is around it.
        round_trip_us: that a sender takes for each block but the last, and a poll for words.
        matmul_start_us, tile_start_us, kernel_start_us: from launch to full speed, and back: of the
            vendor's matmul, of our kernels of tiles, of any other.
        split_us: that the vendor's matmul takes longer when it splits K.
        engine_us: of a copy engine on next to nothing.
        gap_us: from one kernel to the next in a graph.
        host_call_us: of the host, per call.
        host_kernel_us, host_descriptors_us: and per kernel of ours, and for its TMA descriptors.
        host_op_us, host_composed_us: and per op of PyTorch that launches one kernel, and per op
            that is Python on top of such.
        host_collective_us: and per call of the collective library.
        host_stream_us: and each time that a stream waits for another.
    """

    hardware: Hardware
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    copy_bytes_per_s: float
    collective_bytes_per_s: float
    summed_bytes_per_s: float
    pull_bytes_per_s: float
    loads_bytes_per_s: float
    tma_bytes_per_s: float
    latency_us: float
    registered_latency_us: float
    step_us: float
    signal_us: float
    round_trip_us: float
    matmul_start_us: float
    split_us: float
    tile_start_us: float
    kernel_start_us: float
    engine_us: float
    gap_us: float
    host_call_us: float
    host_kernel_us: float
    host_descriptors_us: float
    host_op_us: float
    host_composed_us: float
    host_collective_us: float
    host_stream_us: float

    def bounds(self, problem: Any) -> Bounds:
        """The bounds of a problem at this machine's rates."""
        peaks = Peaks(self.flops_per_s, self.memory_bytes_per_s, self.link_bytes_per_s)
        return bounds(problem.cost, peaks, vendor_us(self, problem))


@dataclass(frozen=True)
class Piece:
    """A part of a call that begins when the part before it has ended.

    Args:
        kind: as of `taxfree_kernels.variant.Step`.
        us: microseconds.
        host_us: that the host takes to launch it.
        latency_us: what of a collective is there on next to nothing.
        memory_bytes: that a copy moves.
        kernels: launched.
    """

    kind: Literal["collective", "copy", "consumer", "fused"]
    us: float
    host_us: float
    latency_us: float = 0.0
    memory_bytes: float = 0.0
    kernels: int = 1


Formula = Callable[[Machine, Any, Config], list[Piece]]


@dataclass(frozen=True)
class Times:
    """One variant on one problem, modelled; microseconds per call.

    Args:
        pieces: of a call, in order.
        t_graph_us, t_eager_us: of a call.
    """

    pieces: tuple[Piece, ...]
    t_graph_us: float
    t_eager_us: float

    @property
    def kernels(self) -> int:
        """Of a call, collectives counted as one."""
        return sum(piece.kernels for piece in self.pieces)


def machine(name: str) -> Machine:
    """A machine by name.

    Raises:
        UsageError: there is no model of it.
    """
    if name not in MACHINES:
        raise UsageError(f"no cost model for {name!r}", f"one of: {', '.join(MACHINES)}")
    return MACHINES[name]


def machine_like(hardware: Hardware) -> Machine | None:
    """The machine that is of the same architecture, or None."""
    alike = (m for m in MACHINES.values() if m.hardware.architecture == hardware.architecture)
    return next(alike, None)


def times(machine: Machine, problem: Any, variant: str, config: Config) -> Times:
    """A variant's times.

    Args:
        config: the variant's knobs.

    Raises:
        UsageError: there is no model of the variant.
    """
    op = op_of(problem)
    if variant not in modelled_variants(op):
        raise UsageError(
            f"no cost model of {variant} of {op}",
            f"{op} has one of: {', '.join(modelled_variants(op))}",
        )
    pieces = tuple(_FORMULAS[op][variant](machine, problem, config))
    graph = sum(piece.us for piece in pieces) + machine.gap_us * (len(pieces) - 1)
    host = machine.host_call_us + sum(piece.host_us for piece in pieces)
    return Times(pieces, graph, max(graph, host))


def modelled_variants(op: str) -> tuple[str, ...]:
    """The variants of an operation that have a model."""
    return tuple(_FORMULAS.get(op, ()))


# -- pieces --


def matmul_us(machine: Machine, m: int, n: int, k: int) -> float:
    """The vendor's kernel alone."""
    rows = -(-m // _GEMM_ROWS) * _GEMM_ROWS
    moved = _ITEM_BYTES * (m * k + k * n + m * n)
    longer = max(2 * rows * n * k / machine.flops_per_s, moved / machine.memory_bytes_per_s)
    tiles = -(-m // _VENDOR_TILE[0]) * -(-n // _VENDOR_TILE[1])
    is_split = tiles < machine.hardware.compute_units / 2
    return machine.matmul_start_us + 1e6 * longer + is_split * machine.split_us


def vendor_us(machine: Machine, problem: Any) -> float:
    """The vendor's kernel on what a rank computes itself: a matmul, or attention."""
    if op_of(problem) == "flash_decode":
        return _attention(machine, problem).us
    return matmul_us(machine, problem.m, problem.n, problem.k)


def exchange_us(
    machine: Machine, received: float, message: float, block: int, rounds: int = 1
) -> float:
    """Senders that each store one message after another at a peer, and signal.

    Args:
        received: bytes that a rank receives from all peers.
        message: bytes of a message.
        block: bytes that a sender has under way at a time.
        rounds: messages of a sender.
    """
    link = received / machine.link_bytes_per_s
    # The last block's round trip is what the signal waits for.
    sender = max(0.0, rounds * message / block - 1) * machine.round_trip_us * 1e-6
    return machine.signal_us + 1e6 * max(link, sender)


def tiles_us(machine: Machine, problem: Any, config: Config, *, tma: bool) -> tuple[float, float]:
    """All tiles of a matmul, and one wave of them."""
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    depth = problem.k / config["SPLIT_K"]
    programs = -(-problem.m // block_m) * -(-problem.n // block_n) * config["SPLIT_K"]
    units = machine.hardware.compute_units
    waves = math.ceil(programs / units)
    flops = 2 * block_m * block_n * depth / (machine.flops_per_s / units)
    rate = machine.tma_bytes_per_s if tma else machine.loads_bytes_per_s
    loads = _ITEM_BYTES * (block_m + block_n) * depth / rate
    memory = problem.cost.memory_bytes / machine.memory_bytes_per_s / waves
    wave = 1e6 * max(flops, loads, memory)
    return waves * wave, wave


def _launch_us(machine: Machine, *, tma: bool) -> float:
    return machine.host_kernel_us + tma * machine.host_descriptors_us


def _matmul(machine: Machine, m: int, n: int, k: int) -> Piece:
    return Piece("consumer", matmul_us(machine, m, n, k), machine.host_op_us)


def _collective(
    machine: Machine, received: float, peers: int, *, registered: bool, rounds: int = 0
) -> Piece:
    """The collective library's.

    Args:
        received: bytes that a rank receives.
        registered: whether its buffers are.
        rounds: of its ring, for sums: one if they are scattered, two for all; none for a gather.
    """
    latency = machine.registered_latency_us
    if not registered:
        latency = machine.latency_us + max(1, rounds) * peers * machine.step_us
    if rounds:
        pace = 1 / machine.link_bytes_per_s + 1 / (max(1, peers) * machine.summed_bytes_per_s)
    elif registered:
        pace = 1 / machine.link_bytes_per_s
    else:
        pace = 1 / machine.collective_bytes_per_s
    us = latency + 1e6 * received * pace
    return Piece("collective", us, machine.host_collective_us, latency_us=latency)


def _copy(machine: Machine, size: float, *, views: bool = False) -> Piece:
    """PyTorch's; a view of what is copied takes the host as long as the copy."""
    us = machine.kernel_start_us + 2e6 * size / machine.copy_bytes_per_s
    return Piece("copy", us, (1 + views) * machine.host_op_us, memory_bytes=2 * size)


def _own_collective(machine: Machine, exchanges: list[float], memory_bytes: float) -> Piece:
    """A kernel of ours between library kernels: exchanges one after another, and local traffic."""
    local = 1e6 * memory_bytes / machine.memory_bytes_per_s
    us = machine.kernel_start_us + sum(exchanges) + local
    latency = machine.kernel_start_us + len(exchanges) * machine.signal_us
    return Piece("collective", us, machine.host_kernel_us, latency_us=latency)


def _small(machine: Machine, memory_bytes: float = 0.0) -> Piece:
    """A kernel that does little."""
    us = machine.kernel_start_us + 1e6 * memory_bytes / machine.memory_bytes_per_s
    return Piece("copy", us, machine.host_kernel_us, memory_bytes=memory_bytes)


def _barrier_us(machine: Machine) -> float:
    """A kernel in which each rank signals all others, and waits for them."""
    return machine.kernel_start_us + machine.signal_us


def _composed(machine: Machine, us: float, ops: int, barriers: int, waits: int) -> Piece:
    """An op that PyTorch composes in Python, of so many others and waits of streams for each other.

    A barrier, which is no op, takes the host half as long.
    """
    host = (
        machine.host_composed_us
        + (ops + barriers / 2) * machine.host_op_us
        + waits * machine.host_stream_us
    )
    return Piece("fused", us, host, kernels=ops + barriers)


# -- all_gather_matmul --


def _shard_bytes(problem: Any) -> float:
    size: int = problem.slot_bytes
    return size / int(problem.world_size)


def _gathers(*, registered: bool) -> Formula:
    def formula(machine: Machine, problem: Any, config: Config) -> list[Piece]:
        shard = _shard_bytes(problem)
        pieces = []
        if registered or (problem.gather_dim == 0 and problem.m % problem.world_size):
            pieces.append(_copy(machine, shard, views=True))
        peers = problem.world_size - 1
        pieces.append(_collective(machine, peers * shard, peers, registered=registered))
        if problem.gather_dim == 1 and problem.m > 1:
            pieces.append(_copy(machine, problem.slot_bytes, views=True))
        return [*pieces, _matmul(machine, problem.m, problem.n, problem.k)]

    return formula


def _gather_exchange(machine: Machine, problem: Any, config: Config) -> float:
    """Of an all-gather's shards, by programs that each send one chunk, or SENDERS that walk."""
    world, chunks, shard = problem.world_size, config["CHUNKS"], _shard_bytes(problem)
    to_self = "SENDERS" in config and problem.tiles_mix_ranks(config["BLOCK_M"])
    receivers = world - 1 + to_self
    messages = chunks * receivers
    rounds = math.ceil(messages / min(messages, config.get("SENDERS", messages)))
    block = _ITEM_BYTES * config["SEND_BLOCK"]
    return exchange_us(machine, (world - 1) * shard, shard / chunks, block, rounds)


def _gather_one_shot(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    gather = _gather_exchange(machine, problem, config)
    return [
        _own_collective(machine, [gather], 2 * problem.slot_bytes),
        _matmul(machine, problem.m, problem.n, problem.k),
    ]


def _gather_push(*, tma: bool) -> Formula:
    def formula(machine: Machine, problem: Any, config: Config) -> list[Piece]:
        tiles, wave = tiles_us(machine, problem, config, tma=tma)
        send = _gather_exchange(machine, problem, config)
        if problem.gather_dim == 1:  # the first wave has its own rank's share of K before it waits
            own, peers = wave / problem.world_size, problem.world_size - 1
            waits = -(-peers // config["SOURCES_PER_WAIT"]) if tma else 1
            computed = _in_turns(own, waits, send, wave - own) + tiles - wave
        elif tma and config["K_PARTS"] > 1:
            computed = _in_turns(0.0, config["K_PARTS"], send, wave) + tiles - wave
        elif problem.tiles_mix_ranks(config["BLOCK_M"]):
            computed = send + tiles
        else:
            computed = _waves_of_rows(machine, problem, tiles, wave, send)
        us = machine.tile_start_us + computed
        return [Piece("fused", us, _launch_us(machine, tma=tma))]

    return formula


def _in_turns(begin: float, parts: int, send: float, work: float) -> float:
    """Until tiles, which wait for each of so many parts of what is sent, have multiplied all."""
    end = begin
    for part in range(1, parts + 1):
        end = max(end, send * part / parts) + work / parts
    return end


def _waves_of_rows(machine: Machine, problem: Any, tiles: float, wave: float, send: float) -> float:
    """Until all tiles are finished: own rows come first, then others in the order of arrival."""
    world, waves, end = problem.world_size, round(tiles / wave), 0.0
    for done in range(1, waves + 1):
        others = max(0.0, (world * done / waves - 1) / (world - 1))
        arrived = (others > 0) * machine.signal_us + others * (send - machine.signal_us)
        end = max(end, arrived) + wave
    return end


def _gather_push_two_kernel(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    tiles, _ = tiles_us(machine, problem, config, tma=False)
    send = _gather_exchange(machine, problem, config)
    us = machine.tile_start_us + send + tiles
    return [Piece("fused", us, 2 * machine.host_kernel_us, kernels=2)]


def _gather_pull(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    tiles, _ = tiles_us(machine, problem, config, tma=False)
    received = (problem.world_size - 1) * _shard_bytes(problem)
    columns = -(-problem.n // config["BLOCK_N"])
    pulled = machine.signal_us + 1e6 * received * columns / machine.pull_bytes_per_s
    return [Piece("fused", machine.tile_start_us + max(tiles, pulled), machine.host_kernel_us)]


def _gather_overlap(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """Copy engines gather while the vendor's matmul computes the rows that are here, in parts.

    The slowest rank is the last one: if rows do not reach it, it has nothing to compute meanwhile.
    """
    world, chunks, rows = problem.world_size, config["CHUNKS"], problem.shard_rows
    received = (world - 1) * _shard_bytes(problem)
    messages = (world - 1) * chunks
    filled = -(-problem.m // rows)  # shards that have rows
    others = filled - (filled == world)
    parts = -(-others * chunks // config["CHUNKS_PER_WAIT"])
    own = matmul_us(machine, rows, problem.n, problem.k) if filled == world else 0.0
    start, gap = machine.kernel_start_us, machine.gap_us

    # A rank enters; on each stream an engine copies, and a kernel announces the copy, and so on.
    turns = -(-messages // config["STREAMS"])
    link = turns * _announced_copy_us(machine) + 1e6 * received / machine.link_bytes_per_s
    entered = _barrier_us(machine) + gap
    multiplied = matmul_us(machine, -(-others * rows // parts), problem.n, problem.k)
    step = start + gap + multiplied + gap  # a kernel waits, then the matmul
    us = max(max(own, entered + link / parts) + parts * step, entered + link + step)
    us += start  # a kernel ends the call
    kernels, ops = 2 + messages + parts, messages + parts + (filled == world)
    host = kernels * machine.host_kernel_us + ops * machine.host_op_us
    host += 2 * config["STREAMS"] * machine.host_stream_us
    return [Piece("fused", us, host, kernels=kernels + ops)]


def _announced_copy_us(machine: Machine) -> float:
    """Of a copy by an engine, and the kernel that announces it; without the bytes."""
    return machine.engine_us + machine.gap_us + _barrier_us(machine) + machine.gap_us


def _torch_pipelined_gather(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """PyTorch's op: shards are copied out, and then in by copy engines, and multiplied one by one.

    There are barriers before and after the copy out, and in the end.
    """
    world, shard = problem.world_size, _shard_bytes(problem)
    multiplied = matmul_us(machine, problem.m // world, problem.n, problem.k)
    copied = machine.engine_us + 1e6 * shard / machine.link_bytes_per_s
    pipeline = max(world * multiplied, (world - 1) * copied + multiplied)
    copies = _copy(machine, shard).us + _copy(machine, _ITEM_BYTES * problem.m * problem.n).us
    barriers = 3
    gaps = (barriers + world + 1) * machine.gap_us
    us = barriers * _barrier_us(machine) + copies + pipeline + gaps
    ops = 2 * world + 1  # copies of shards, matmuls, the copy of the product
    return [_composed(machine, us, ops, barriers, waits=3)]


# -- matmul_all_reduce and matmul_reduce_scatter --


def _sums(*, registered: bool) -> Formula:
    """The library's matmul, then its sum; registered buffers cost a copy out."""

    def formula(machine: Machine, problem: Any, config: Config) -> list[Piece]:
        pieces = [_matmul(machine, problem.m, problem.n, problem.k)]
        whole = _ITEM_BYTES * problem.m * problem.n
        if getattr(problem, "scatter_dim", 0) == 1:
            pieces.append(_copy(machine, whole, views=True))
        received, peers = problem.cost.link_bytes, problem.world_size - 1
        rounds = 1 if hasattr(problem, "shard_rows") else 2
        summed = _collective(machine, received, peers, registered=registered, rounds=rounds)
        pieces.append(summed)
        if getattr(problem, "residual", False):
            pieces.append(_addition(machine, problem))
        elif registered:
            pieces.append(_copy(machine, _kept_bytes(problem)))
        return pieces

    return formula


def _kept_bytes(problem: Any) -> float:
    """Of the sum that a rank keeps: all of it, or its shard."""
    rows: int = getattr(problem, "shard_rows", problem.m)
    columns: int = getattr(problem, "shard_columns", problem.n)
    return float(_ITEM_BYTES * rows * columns)


def _addition(machine: Machine, problem: Any) -> Piece:
    """Of a residual, by PyTorch: two are read, one is written."""
    return _copy(machine, 1.5 * _kept_bytes(problem))


def _one_shot_sum(machine: Machine, problem: Any, config: Config) -> Piece:
    """Everybody's partial sum of what a rank keeps is sent to it, and added there."""
    kept, world = _kept_bytes(problem), problem.world_size
    block = _ITEM_BYTES * config["SEND_BLOCK"]
    sent = exchange_us(machine, (world - 1) * kept, kept / config["CHUNKS"], block)
    return _own_collective(machine, [sent], (world + 1) * kept)


def _words_sum(machine: Machine, problem: Any, config: Config) -> Piece:
    """As `_one_shot_sum`, in words of which half is a flag: twice the bytes, and half the signal.

    A signal is sent when the data before it has arrived; a word travels once.
    """
    kept, world = _kept_bytes(problem), problem.world_size
    latency = machine.kernel_start_us + machine.signal_us / 2
    link = 1e6 * 2 * (world - 1) * kept / machine.link_bytes_per_s
    local = 1e6 * 2 * (world + 1) * kept / machine.memory_bytes_per_s
    us = latency + link + local
    return Piece("collective", us, machine.host_kernel_us, latency_us=latency)


def _two_shot_sum(machine: Machine, problem: Any, config: Config) -> Piece:
    """Each rank adds a block, and sends the sum to all."""
    world, size = problem.world_size, _kept_bytes(problem)
    block = _ITEM_BYTES * config["SEND_BLOCK"]
    received, message = size * (world - 1) / world, size / world / config["CHUNKS"]
    shot = exchange_us(machine, received, message, block)
    return _own_collective(machine, [shot, shot], 3 * size)


def _then(add: Callable[[Machine, Any, Config], Piece]) -> Formula:
    """The vendor's matmul, then a sum of ours."""

    def formula(machine: Machine, problem: Any, config: Config) -> list[Piece]:
        return [
            _matmul(machine, problem.m, problem.n, problem.k),
            add(machine, problem, config),
        ]

    return formula


def _copied_sum(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """Copy engines scatter while the vendor's matmul computes, peers' shards first, in parts.

    Then each rank adds; and where all keep the whole sum, it fetches the others' shards. With
    PARTS of the rows this is so for each, and all but the last one's are hidden.
    """
    world, turns = problem.world_size, config.get("PARTS", 1)
    is_whole = not hasattr(problem, "shard_rows")
    if is_whole:
        m, n = -(-problem.m // (turns * world)), problem.n
    else:
        m, n = problem.shard_rows, problem.shard_columns
    messages = (world - 1) * config["CHUNKS"]
    parts = -(-messages // config["CHUNKS_PER_WAIT"])
    start, gap = machine.kernel_start_us, machine.gap_us
    shard = float(_ITEM_BYTES * m * n)
    link = 1e6 * (world - 1) * shard / machine.link_bytes_per_s
    # What leaves a matmul waits for what its stream copies before.
    copied = -(-messages // config["STREAMS"]) * _announced_copy_us(machine) + link
    part = matmul_us(machine, -(-(world - 1) * m // parts), n, problem.k) + gap
    turn = parts * part + matmul_us(machine, m, n, problem.k) + gap
    us = max(turn, parts * part + copied / parts, part + copied) + (turns - 1) * turn
    us += gap + start + 1e6 * (world + 1) * shard / machine.memory_bytes_per_s  # the addition
    if is_whole:
        # Nothing stands between these copies: they follow each other at once.
        us += gap + _barrier_us(machine) + gap + machine.engine_us + link
    us += gap + start  # a kernel ends the call
    kernels = 2 + turns * (1 + messages + is_whole)
    ops = turns * (parts + 1 + messages + is_whole * (world - 1))
    waits = config["STREAMS"] * (turns * (parts + 1 + is_whole) + 2)
    host = kernels * machine.host_kernel_us + ops * machine.host_op_us
    host += waits * machine.host_stream_us
    return [Piece("fused", us, host, kernels=kernels + ops)]


def _push_sum(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """Tiles leave when they are finished; the sum of the last one is waited for."""
    tma = config.get("TMA", False)
    tiles, wave = tiles_us(machine, problem, config, tma=tma)
    kept, world = _kept_bytes(problem), problem.world_size
    link = 1e6 * (world - 1) * kept / machine.link_bytes_per_s
    added = 1e6 * (world + 1) * kept / machine.memory_bytes_per_s
    us = machine.tile_start_us + max(tiles, wave + link) + machine.signal_us + added
    return [Piece("fused", us, _launch_us(machine, tma=tma))]


def _push_two_shot_sum(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """Tiles leave when they are finished; so do sums, but the last AHEAD waves' come behind."""
    tma = config.get("TMA", False)
    tiles, wave = tiles_us(machine, problem, config, tma=tma)
    kept, world = _kept_bytes(problem), problem.world_size
    shot = 1e6 * kept * (world - 1) / world / machine.link_bytes_per_s
    behind = min(1.0, config["AHEAD"] * wave / tiles) * shot
    added = 1e6 * 3 * kept / machine.memory_bytes_per_s
    us = max(tiles, wave + 2 * shot - behind) + behind + 2 * machine.signal_us + added
    return [Piece("fused", machine.tile_start_us + us, _launch_us(machine, tma=tma))]


def _push_in_place_sum(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """As `_push_sum`, but each wave of tiles waits for its peers, and the own part is not stored.

    Words are as in `_words_sum`: twice the bytes, and half a signal.
    """
    tiles, wave = tiles_us(machine, problem, config, tma=config["TMA"])
    words = 1 + config["IN_DATA"]
    kept, peers = _kept_bytes(problem), problem.world_size - 1
    link = 1e6 * words * peers * kept / machine.link_bytes_per_s
    waits = tiles / wave * machine.signal_us / words
    added = 1e6 * (words * peers + 1) * kept / machine.memory_bytes_per_s
    us = machine.tile_start_us + max(tiles, wave + link) + waits + added
    return [Piece("fused", us, _launch_us(machine, tma=config["TMA"]))]


def _push_words_sum(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """As `_push_sum`, by bare words: each wave of tiles polls for its peers', without signals."""
    tiles, wave = tiles_us(machine, problem, config, tma=config["TMA"])
    kept, world = _kept_bytes(problem), problem.world_size
    link = 1e6 * (world - 1) * kept / machine.link_bytes_per_s
    waits = tiles / wave * machine.round_trip_us
    added = 1e6 * (world + 1) * kept / machine.memory_bytes_per_s
    us = machine.tile_start_us + max(tiles, wave + link) + waits + added
    return [Piece("fused", us, _launch_us(machine, tma=config["TMA"]))]


def _push_two_shot_words_sum(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """As `_push_words_sum`, but slices cross the link, and then their sums."""
    tiles, wave = tiles_us(machine, problem, config, tma=config["TMA"])
    kept, world = _kept_bytes(problem), problem.world_size
    shot = 1e6 * kept * (world - 1) / world / machine.link_bytes_per_s
    waits = tiles / wave * 2 * machine.round_trip_us
    added = 1e6 * 5 * kept / machine.memory_bytes_per_s
    us = machine.tile_start_us + max(tiles, wave + shot) + shot + waits + added
    return [Piece("fused", us, _launch_us(machine, tma=config["TMA"]))]


_TORCH_BLOCKS = 24  # that PyTorch's all-reduces over symmetric memory have at most
_TORCH_THREADS = {1: 512, 2: 1024}  # of such a block, by shots; each has 16 bytes under way


def _torch_symm_mem(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """The vendor's matmul, then ranks load from each other, between barriers inside a kernel.

    In one shot each loads all of the others' sums; in two the block that it adds, and then the
    blocks that the others have added.
    """
    world, size, shots = problem.world_size, _kept_bytes(problem), config["SHOTS"]
    loaded = (world - 1) * (size if shots == 1 else size / world)
    block = 16 * _TORCH_THREADS[shots] * (world - 1)
    blocks = min(_TORCH_BLOCKS, math.ceil(loaded / block))
    shot = exchange_us(machine, loaded, loaded / blocks, block)
    # The last barrier is for those that still load.
    added = _own_collective(machine, [*shots * [shot], machine.signal_us], (1 + shots) * size)
    pieces = [
        _matmul(machine, problem.m, problem.n, problem.k),
        dataclasses.replace(added, host_us=machine.host_op_us),
    ]
    if problem.residual:
        pieces.append(_addition(machine, problem))
    return pieces


def _torch_pipelined_sum(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """PyTorch's op: per shard a matmul, a barrier, a copy from the peer, a barrier; then the sum.

    Its two streams hide copies behind matmuls, but not barriers: work of both is short.
    """
    world, kept = problem.world_size, _kept_bytes(problem)
    m, n = problem.m, problem.n
    m, n = (m, n // world) if problem.scatter_dim == 1 else (m // world, n)
    multiplied = matmul_us(machine, m, n, problem.k)
    copied = machine.engine_us + 1e6 * kept / machine.link_bytes_per_s
    pipeline = max(world * multiplied, (world - 1) * copied + multiplied)
    barriers = 2 * world
    added = _small(machine, (world + 1) * kept).us + _copy(machine, kept).us
    gaps = (barriers + 2) * machine.gap_us
    us = pipeline + barriers * _barrier_us(machine) + added + gaps
    ops = 2 * world - 1 + 3  # a kernel that sleeps, the sum, the copy of it
    return [_composed(machine, us, ops, barriers, waits=2)]


# -- flash_decode --


def _attention(machine: Machine, problem: Any) -> Piece:
    cost = problem.cost
    longer = max(cost.flops / machine.flops_per_s, cost.memory_bytes / machine.memory_bytes_per_s)
    return Piece("consumer", machine.tile_start_us + 1e6 * longer, machine.host_kernel_us)


def _decode(pieces: Callable[[Machine, Any], list[Piece]]) -> Formula:
    def formula(machine: Machine, problem: Any, config: Config) -> list[Piece]:
        return [_attention(machine, problem), *pieces(machine, problem)]

    return formula


def _part_bytes(problem: Any) -> float:
    return float(4 * problem.part_elements)


def _parts_exchanged(machine: Machine, problem: Any, shots: int = 1) -> Piece:
    """Parts are small: the link and signals are what they take."""
    received = (problem.world_size - 1) * _part_bytes(problem)
    us = machine.signal_us + 1e6 * received / machine.link_bytes_per_s
    return _own_collective(machine, shots * [us], received)


def _decode_library(machine: Machine, problem: Any) -> list[Piece]:
    peers = problem.world_size - 1
    gathered = _collective(machine, peers * _part_bytes(problem), peers, registered=False)
    return [_small(machine), gathered, _small(machine)]


def _decode_gather(machine: Machine, problem: Any) -> list[Piece]:
    return [_small(machine), _parts_exchanged(machine, problem), _small(machine)]


def _decode_persistent(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    attention, rest = _attention(machine, problem), _parts_exchanged(machine, problem)
    return [Piece("fused", attention.us + rest.us, machine.host_kernel_us)]


_FORMULAS: dict[str, dict[str, Formula]] = {
    "all_gather_matmul": {
        "baseline": _gathers(registered=False),
        "registered": _gathers(registered=True),
        "one_shot": _gather_one_shot,
        "push": _gather_push(tma=False),
        "push_tma": _gather_push(tma=True),
        "push_two_kernel": _gather_push_two_kernel,
        "pull": _gather_pull,
        "overlap": _gather_overlap,
        "torch_fused": _torch_pipelined_gather,
    },
    "matmul_all_reduce": {
        "baseline": _sums(registered=False),
        "registered": _sums(registered=True),
        "torch_symm_mem": _torch_symm_mem,
        "one_shot": _then(_one_shot_sum),
        "one_shot_ll": _then(_words_sum),
        "two_shot": _then(_two_shot_sum),
        "overlap": _copied_sum,
        "push": _push_sum,
        "push_two_shot": _push_two_shot_sum,
        "push_in_place": _push_in_place_sum,
        "push_two_shot_lamport": _push_two_shot_words_sum,
    },
    "matmul_reduce_scatter": {
        "baseline": _sums(registered=False),
        "registered": _sums(registered=True),
        "one_shot": _then(_one_shot_sum),
        "overlap": _copied_sum,
        "push": _push_sum,
        "push_lamport": _push_words_sum,
        "torch_fused": _torch_pipelined_sum,
    },
    "flash_decode": {
        "baseline": _decode(_decode_library),
        "library": _decode(_decode_library),
        "gather": _decode(_decode_gather),
        "fine_wait": _decode(_decode_gather),
        "fused": _decode(lambda m, p: [_parts_exchanged(m, p)]),
        "two_shot": _decode(lambda m, p: [_parts_exchanged(m, p, shots=2)]),
        "persistent": _decode_persistent,
    },
}


# -- the account --


@dataclass(frozen=True)
class Modelled:
    """A modelled account, and the kernels of a call."""

    account: Account
    kernels: int


def modelled(machine: Machine, problem: Any, variant: str, config: Config) -> Modelled:
    """The account of the taxes that a variant pays; each part says that it is modelled."""
    found = times(machine, problem, variant, config)
    limits = machine.bounds(problem)
    gaps = machine.gap_us * (len(found.pieces) - 1)
    parts = [
        _part("host", "launch", found.t_eager_us - found.t_graph_us, "host time beyond t_graph"),
        _part("gaps", "launch", gaps, f"{len(found.pieces) - 1} x {machine.gap_us:.1f} us"),
    ]
    collectives = [piece for piece in found.pieces if piece.kind == "collective"]
    copies = [piece for piece in found.pieces if piece.kind == "copy"]
    if collectives:
        exposed = max(0.0, limits.t_link_us - limits.t_floor_us)
        latency = sum(piece.latency_us for piece in collectives)
        transfer = sum(piece.us for piece in collectives) - latency - exposed
        bulk: Tax = "bulk synchronous"
        parts.append(_part("latency", bulk, latency, "of the collective"))
        parts.append(_part("transfer", bulk, transfer, "bytes to receive / rate"))
    if copies:
        size = round(sum(piece.memory_bytes for piece in copies))
        copied = sum(piece.us for piece in copies)
        parts.append(_part("copies", "locality", copied, "start + bytes / rate", size))
    account = Account(
        0, found.t_eager_us, found.t_graph_us, limits.t_bound_us, tuple(parts), None,
        "" if collectives else INSIDE,
    )  # fmt: skip
    return Modelled(account, found.kernels)


def _part(name: str, tax: Tax, us: float, formula: str, memory_bytes: int = 0) -> Part:
    return Part(name, tax, us, None, f"modelled: {formula}", memory_bytes)


# -- machines --

H200 = Machine(
    hardware=KNOWN["h200"],
    # measured: the peaks in the result files, and re-layout copies in place
    flops_per_s=770e12,
    memory_bytes_per_s=4.63e12,
    link_bytes_per_s=355e9,
    copy_bytes_per_s=1.9e12,
    # fitted
    collective_bytes_per_s=150e9,
    summed_bytes_per_s=328e9,
    pull_bytes_per_s=278e9,
    loads_bytes_per_s=58.1e9,
    tma_bytes_per_s=71.3e9,
    latency_us=6.66,
    registered_latency_us=6.93,
    step_us=0.943,
    signal_us=3.2,
    matmul_start_us=4.0,
    split_us=3.78,
    tile_start_us=7.07,
    kernel_start_us=1.42,
    engine_us=15.4,
    host_call_us=6.28,
    host_kernel_us=12.8,
    host_descriptors_us=18.9,
    host_op_us=10.4,
    host_composed_us=143.0,
    host_collective_us=38.5,
    host_stream_us=28.9,
    # assumed: rows without a profile do not tell it from the starts above
    gap_us=1.0,
    # assumed: more would contradict the rows, less would not
    round_trip_us=0.7,
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
    of_a_unit = flops * H200.hardware.compute_units / hardware.compute_units
    return dataclasses.replace(
        H200,
        hardware=hardware,
        flops_per_s=H200.flops_per_s * flops,
        memory_bytes_per_s=H200.memory_bytes_per_s * memory,
        link_bytes_per_s=H200.link_bytes_per_s * link,
        collective_bytes_per_s=H200.collective_bytes_per_s * link,
        summed_bytes_per_s=H200.summed_bytes_per_s * link,
        pull_bytes_per_s=H200.pull_bytes_per_s * link,
        copy_bytes_per_s=H200.copy_bytes_per_s * memory,
        loads_bytes_per_s=H200.loads_bytes_per_s * of_a_unit,
        tma_bytes_per_s=H200.tma_bytes_per_s * of_a_unit,
    )


MACHINES = {
    "h200": H200,
    "mi300x": _scaled(KNOWN["mi300x"], _DataSheet(1307e12, 5.3e12, 448e9)),
    "mi325x": _scaled(KNOWN["mi325x"], _DataSheet(1307e12, 6.0e12, 448e9)),
}
