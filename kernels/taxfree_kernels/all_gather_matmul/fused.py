"""Shared by the fused variants: send a chunk of the shard, compute a gathered tile; their plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.device import sync, tiles
from taxfree_kernels.device.peers import Group, Memory, translate
from taxfree_kernels.device.sync import signal_by_chiplet
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options, pdl_options
from taxfree_kernels.variant import Config, Plan, Space, Variant, resized


class Gather(NamedTuple):
    """The constants of a kernel that gathers A: its ``GATHER: tl.constexpr``.

    Args:
        GATHER_DIM: 0 for shards of rows, 1 for shards of columns.
        CHUNKS: number of chunks of rows per shard; each has a channel.
        SEND_BLOCK: elements that a sender copies at a time.
        SOURCES_PER_WAIT: peers that a tile waits for at once, with gather_dim 1.
        HAS_BIAS: a bias is added to the product.
        SENDERS: number of programs before the tiles'.
        TO_SELF: a rank also sends its own rows to itself.
        K_PARTS, PART_COLUMNS: number of parts of a row, and the columns of each but the last.
        SEND_STAGES: blocks that a sender has in flight.
        XCD_SIGNALS: chiplets whose senders signal together; 0 if each sender signals.
        SCALE_COLUMNS: scales that travel with a row of a shard.
        SCALE_BLOCK: scales that a sender copies at a time: one a thread where they are unaligned.
    """

    GATHER_DIM: int
    CHUNKS: int
    SEND_BLOCK: int = 0
    SOURCES_PER_WAIT: int = 1
    HAS_BIAS: bool = False
    SENDERS: int = 0
    TO_SELF: bool = False
    K_PARTS: int = 1
    PART_COLUMNS: int = 0
    SEND_STAGES: int = 1
    XCD_SIGNALS: int = 0
    SCALE_COLUMNS: int = 0
    SCALE_BLOCK: int = 0

    @classmethod
    def of(cls, problem: AllGatherMatmul, config: Config, **derived: Any) -> Gather:
        """The constants from a config, and others that are derived from it."""
        meta_parameters = {name: config[name] for name in cls._fields if name in config}
        fixed = {
            "GATHER_DIM": problem.gather_dim,
            "HAS_BIAS": problem.bias,
            "SCALE_COLUMNS": problem.scale_columns,
            "SCALE_BLOCK": 128 if problem.scale_columns % 4 else 1024,
        }
        return cls(**{**fixed, **meta_parameters, **derived})


class Weight(NamedTuple):
    """The weight [k, n], and in fp8 its scales."""

    ptr: Any
    stride_k: Any
    stride_n: Any
    scale_ptr: Any = None


class Output(NamedTuple):
    """The output [m, n], contiguous, and the bias [n]; any pointer if there is no bias."""

    bias_ptr: Any
    ptr: Any


class ScaledOutput(NamedTuple):
    """As `Output`, with the scales of fp8 factors, of A as in `InputShard`."""

    bias_ptr: Any
    ptr: Any
    a_scale_ptr: Any
    w_scale_ptr: Any


class InputShard(NamedTuple):
    """This rank's part of A; a kernel makes it from its arguments.

    Args:
        ptr: [own_rows, columns], contiguous.
        rows: of a full shard.
        scale_ptr: in fp8, [own_rows, SCALE_COLUMNS], or those of the whole A.
    """

    ptr: Any
    own_rows: Any
    rows: Any
    columns: Any
    scale_ptr: Any = None


@triton.jit
def _copy_columns(
    target_ptr, source_ptr, pitch, row_begin, row_end, column_begin, column_end,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copy some rows and columns of matrices with `pitch` elements a row, aligned to 16 bytes.

    Args:
        BLOCK: elements at a time.
        COLUMNS: maximum number of columns.
        STAGES: blocks in flight: all but the one being stored are prefetched into shared memory,
            because loads are slow while tiles load as well.
    """
    WIDTH: tl.constexpr = min(triton.next_power_of_2(COLUMNS), BLOCK)
    HEIGHT: tl.constexpr = BLOCK // WIDTH
    across = tl.cdiv(column_end - column_begin, WIDTH)
    for block in tl.range(0, tl.cdiv(row_end - row_begin, HEIGHT) * across, num_stages=STAGES):
        rows = row_begin + block // across * HEIGHT + tl.arange(0, HEIGHT)
        columns = column_begin + block % across * WIDTH + tl.arange(0, WIDTH)
        offsets = (rows * pitch)[:, None] + columns[None, :]
        mask = (rows < row_end)[:, None] & (columns < column_end)[None, :]
        tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def inbox_scales(slot_ptr, shard, GROUP: tl.constexpr):
    """The scales in an inbox, [source, shard.rows, SCALE_COLUMNS]: they are behind the rows."""
    row_bytes = tl.cdiv(GROUP.WORLD * shard.rows * shard.columns, 16) * 16
    return tl.cast(slot_ptr + row_bytes, tl.pointer_type(tl.float32))


@triton.jit
def push_chunk(
    message, shard, slot_ptr, peers, GROUP: tl.constexpr, GATHER: tl.constexpr, counters_ptr=None
):
    """Send one chunk of rows of this rank's shard to one rank's inbox, and signal it.

    The inbox is [source, shard.rows, shard.columns]; the channel is the chunk. Chunks without rows
    are signalled too. A rank needs its own rows first, then those of the ranks after it. So each
    rank sends first to the rank before it, then to the one before that, and so on. Ranks start with
    different peers, so they never all send to the same one.

    Rows may be sent in K_PARTS parts of PART_COLUMNS columns, the last possibly narrower: each part
    goes to all ranks before the next, each of its chunks on a channel of its own. Scales of rows go
    with the first part.

    Args:
        message: in each part, CHUNKS to the own inbox when TO_SELF, then CHUNKS to each peer.
        counters_ptr: int32 [XCD_SIGNALS]; the message is the id of the program then.
    """
    CHUNKS: tl.constexpr = GATHER.CHUNKS
    part = 0
    if GATHER.K_PARTS > 1:
        messages: tl.constexpr = CHUNKS * (GROUP.WORLD - 1 + GATHER.TO_SELF)
        part, message = message // messages, message % messages
    distance = message // CHUNKS + 1 - GATHER.TO_SELF
    chunk = message % CHUNKS
    peer = (peers.rank + GROUP.WORLD - distance) % GROUP.WORLD
    chunk_rows = tl.cdiv(shard.rows, CHUNKS)
    begin = chunk * chunk_rows
    end = min(begin + chunk_rows, shard.own_rows)
    own_block = slot_ptr + peers.rank.to(tl.int64) * shard.rows * shard.columns
    target = translate(own_block, peers, peer)
    if GATHER.K_PARTS == 1 and GATHER.SEND_STAGES == 1:
        tiles.copy(target, shard.ptr, begin * shard.columns, end * shard.columns, GATHER.SEND_BLOCK)
    else:
        column = part * GATHER.PART_COLUMNS
        column_end = min(column + GATHER.PART_COLUMNS, shard.columns)
        _copy_columns(
            target, shard.ptr, shard.columns, begin, end, column, column_end, GATHER.SEND_BLOCK,
            GATHER.PART_COLUMNS, GATHER.SEND_STAGES,
        )  # fmt: skip
    if GATHER.SCALE_COLUMNS > 0:
        if part == 0:
            WIDTH: tl.constexpr = GATHER.SCALE_COLUMNS
            own_ptr = inbox_scales(slot_ptr, shard, GROUP) + peers.rank * shard.rows * WIDTH
            tiles.copy(
                translate(own_ptr, peers, peer), shard.scale_ptr, begin * WIDTH, end * WIDTH,
                GATHER.SCALE_BLOCK,
            )  # fmt: skip
    if GATHER.XCD_SIGNALS:
        signal_by_chiplet(message, GATHER.SENDERS, counters_ptr, peers, GROUP, GATHER.XCD_SIGNALS)
    else:
        sync.signal(peers, part * CHUNKS + chunk, peer, GROUP)


@triton.jit
def wait_for_rows(
    row_begin, row_end, nearest, farthest, peers, m, shard_rows,
    GROUP: tl.constexpr, GATHER: tl.constexpr, part=0,
):  # fmt: skip
    """Wait for the chunks, of a part of K, that hold rows [row_begin, row_end) of some ranks.

    With gather_dim 1 these are the peers at distances [nearest, farthest) from this rank; with
    gather_dim 0 the peers, when TO_SELF also this rank, whose shards have such rows, and for the
    last tile also those without any, so that every rank waits for every peer in each call.
    """
    CHUNKS: tl.constexpr = GATHER.CHUNKS
    lanes: tl.constexpr = triton.next_power_of_2(GROUP.WORLD * CHUNKS)
    lane = tl.arange(0, lanes)
    source, chunk = lane % GROUP.WORLD, lane // GROUP.WORLD
    chunk_rows = tl.cdiv(shard_rows, CHUNKS)
    begin = chunk * chunk_rows
    end = tl.minimum(begin + chunk_rows, shard_rows)
    if GATHER.GATHER_DIM == 0:
        begin = tl.minimum(source * shard_rows + begin, m)
        end = tl.minimum(source * shard_rows + end, m)
        needed = (source != peers.rank) | GATHER.TO_SELF
    else:
        distance = (source - peers.rank + GROUP.WORLD) % GROUP.WORLD
        needed = (distance >= nearest) & (distance < farthest)
    has_rows = (begin < row_end) & (end > row_begin)
    last_row = tl.zeros_like(lane) + row_end
    is_last = (begin >= end) & (last_row >= m)  # a chunk without rows falls to the last tile
    needed = needed & (has_rows | is_last) & (lane < GROUP.WORLD * CHUNKS)
    channel = part * CHUNKS + chunk
    if GATHER.XCD_SIGNALS:  # of the source's message to this rank, see push_chunk
        distance = (source + GROUP.WORLD - 1 - peers.rank) % GROUP.WORLD
        channel = (distance * CHUNKS + chunk) % GATHER.XCD_SIGNALS
    return sync.wait(peers, channel, source, GROUP, mask=needed)


@triton.jit
def place_of(index, rank, m, n, shard, GATHER_DIM: tl.constexpr, TILE: tl.constexpr):
    """The work of a tile program, by its number; splits of K vary fastest.

    Returns:
        The tile and the split; its first row and column; its steps of K in each source, [begin,
        end). Each split takes a share of every source, so that all splits begin with local data.
    """
    tiles_m, tiles_n = tl.cdiv(m, TILE.BLOCK_M), tl.cdiv(n, TILE.BLOCK_N)
    index = tiles.xcd_swizzle(index, tiles_m * tiles_n * TILE.SPLIT_K, TILE.XCDS)
    tile, split = index // TILE.SPLIT_K, index % TILE.SPLIT_K
    tile_m, tile_n = tiles.swizzle2d(tile, tiles_m, tiles_n, TILE.GROUP_M)
    if GATHER_DIM == 0:  # local rows come first
        tile_m = tiles.rank_rotated(tile_m, rank * shard.rows // TILE.BLOCK_M, tiles_m)
    steps = tl.cdiv(shard.columns, TILE.BLOCK_K)
    step_begin, step_end = tiles.stream_k(split, TILE.SPLIT_K, steps)
    return tile, split, tile_m * TILE.BLOCK_M, tile_n * TILE.BLOCK_N, step_begin, step_end


@triton.jit
def gathered_tile(
    index, shard, weight, output, memory, slot_ptr, peers, m, n, k,
    GROUP: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr, PULL: tl.constexpr = False,
):  # fmt: skip
    """Compute one tile of out = gathered A @ W + bias; wait for its rows of each source.

    Args:
        index: number of the tile and its K split; splits vary fastest.
        slot_ptr: the running slot: peers' shards in this rank's inbox, or, when PULL, each
            peer's own shard in its outbox.
    """
    tile, split, row, col, step_begin, step_end = place_of(
        index, peers.rank, m, n, shard, GATHER.GATHER_DIM, TILE
    )
    rows, cols = row + tl.arange(0, TILE.BLOCK_M), col + tl.arange(0, TILE.BLOCK_N)
    row_mask, col_mask = rows < m, cols < n
    row_end = min(row + TILE.BLOCK_M, m)
    w_cols = weight.ptr + cols.to(tl.int64) * weight.stride_n
    acc = tiles.zero_tile(TILE)
    arrived = peers.rank >= 0
    scales = None
    if GATHER.GATHER_DIM == 0:
        # -- one loop over K; rows are in the own shard or in the inbox of their source ----------
        arrived = wait_for_rows(row, row_end, 0, 0, peers, m, shard.rows, GROUP, GATHER)
        source = tl.minimum(rows // shard.rows, GROUP.WORLD - 1)
        own_row = (rows - peers.rank * shard.rows).to(tl.int64)
        if PULL:
            shard_row = (rows - source * shard.rows).to(tl.int64)
            a_rows = translate(slot_ptr + shard_row * k, peers, source)
        else:
            a_rows = slot_ptr + rows.to(tl.int64) * k
        ALIGNMENT: tl.constexpr = 2 if TILE.SCALES == "none" else 1
        a_rows = tiles.select(
            source == peers.rank, shard.ptr + own_row * k, a_rows, 16 if TILE.EVEN_K else ALIGNMENT
        )
        if TILE.SCALES != "none":
            x_scales = gathered_scales(rows, peers.rank, shard, slot_ptr, GROUP, GATHER, TILE)
            scales = tiles.scales_of_tile(x_scales, weight.scale_ptr, row_mask, col, n, k, TILE)
        acc = tiles.accumulate(
            acc, a_rows, 0, row_mask, w_cols, weight.stride_k, col_mask, 0, 1, k, step_begin,
            step_end, 1, TILE, scales,
        )  # fmt: skip
    else:
        # -- the own shard, then groups of peers, each after one wait ----------------------------
        row_offset = rows.to(tl.int64) * shard.columns
        peers_scales = None
        if TILE.SCALES != "none":
            scales, peers_scales = scales_of_sources(
                rows, row_mask, col, n, k, shard, weight.scale_ptr, slot_ptr, GROUP, GATHER, TILE
            )
        acc = tiles.accumulate(
            acc, shard.ptr + row_offset, 0, row_mask, w_cols, weight.stride_k, col_mask, peers.rank,
            peers.rank + 1, shard.columns, step_begin, step_end, GROUP.WORLD, TILE, scales,
        )  # fmt: skip
        for first in range(1, GROUP.WORLD, GATHER.SOURCES_PER_WAIT):
            last = min(first + GATHER.SOURCES_PER_WAIT, GROUP.WORLD)
            here = wait_for_rows(row, row_end, first, last, peers, m, shard.rows, GROUP, GATHER)
            arrived = arrived & here
            source_rows = slot_ptr + row_offset
            stride_source = shard.rows * shard.columns
            if PULL:
                peer = (peers.rank + first) % GROUP.WORLD
                source_rows = translate(source_rows, peers, peer)
                stride_source = 0
            acc = tiles.accumulate(
                acc, source_rows, stride_source, row_mask, w_cols, weight.stride_k, col_mask,
                peers.rank + first, peers.rank + last, shard.columns, step_begin, step_end,
                GROUP.WORLD, TILE, peers_scales,
            )  # fmt: skip

    finish_tile(
        acc, arrived, tile, split, rows, cols, m, n, output, memory, GROUP, GATHER.HAS_BIAS, TILE,
        scales,
    )  # fmt: skip


@triton.jit
def gathered_scales(
    rows, rank, shard, slot_ptr, GROUP: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr
):
    """With gather_dim 0: where the scales of rows of A are, see ``first_scales``."""
    scales = tiles.first_scales(shard.scale_ptr, rows - rank * shard.rows, shard.columns, TILE)
    if GATHER.SCALE_COLUMNS > 0:
        own_scales = scales
        inbox_ptr = inbox_scales(slot_ptr, shard, GROUP)
        scales = tiles.first_scales(inbox_ptr, rows, shard.columns, TILE)
        if not GATHER.TO_SELF:
            scales = tiles.select(rows // shard.rows == rank, own_scales, scales, 4)
    return scales


@triton.jit
def scales_of_sources(
    rows, row_mask, col, n, k, shard, w_scale_ptr, slot_ptr,
    GROUP: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """With gather_dim 1: the scales of a tile, see ``scales_of_tile``, of the own shard and peers'.

    They differ where each rank has some of its own, of blocks.
    """
    own_scales = tiles.first_scales(shard.scale_ptr, rows, shard.columns, TILE)
    scales = tiles.scales_of_tile(own_scales, w_scale_ptr, row_mask, col, n, k, TILE, shard.columns)
    peers_scales = scales
    if GATHER.SCALE_COLUMNS > 0:
        inbox_ptr = inbox_scales(slot_ptr, shard, GROUP)
        peers_scales = tiles.scales_of_tile(
            tiles.first_scales(inbox_ptr, rows, shard.columns, TILE), w_scale_ptr, row_mask, col, n,
            k, TILE, shard.columns, shard.rows * GATHER.SCALE_COLUMNS,
        )  # fmt: skip
    return scales, peers_scales


@triton.jit
def finish_tile(
    acc, arrived, tile, split, rows, cols, m, n, output, memory,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr, scales=None,
):  # fmt: skip
    """Write a tile of the output; with a split K, the last split to finish writes the total.

    Args:
        acc: float32 [rows, cols], or [cols, rows] when SWAP_AB.
        arrived: whether all operands have arrived; if not, NaN is written.
        scales: in fp8, see ``scales_of_tile``.
    """
    acc = tl.where(arrived, acc, float("nan"))
    if TILE.SWAP_AB:
        acc = tl.trans(acc)
    mask = (rows < m)[:, None] & (cols < n)[None, :]
    offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
    if TILE.SPLIT_K == 1:
        if TILE.SCALES != "none":
            acc = tiles.scaled_tile(acc, scales, TILE)
        _store(output.ptr + offsets, acc, mask, output.bias_ptr, cols, cols < n, HAS_BIAS)
    else:
        plane = m.to(tl.int64) * n
        tl.store(memory.partials_ptr + split * plane + offsets, acc, mask=mask)
        if sync.arrive(memory.counters_ptr + tile, TILE.SPLIT_K, GROUP):
            total = tl.zeros_like(acc)  # always in the same order
            for other in tl.static_range(TILE.SPLIT_K):  # unrolled: fewer registers than a loop
                total += tl.load(
                    memory.partials_ptr + other * plane + offsets, mask=mask, other=0.0
                )
            if TILE.SCALES != "none":
                total = tiles.scaled_tile(total, scales, TILE)
            _store(output.ptr + offsets, total, mask, output.bias_ptr, cols, cols < n, HAS_BIAS)


@triton.jit
def _store(out, acc, mask, bias_ptr, cols, col_mask, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=mask)


class FusedGatherVariant(Variant):
    """A variant that computes tiles with ``gathered_tile``."""

    illegal_reason = staticmethod(spaces.illegal_reason)

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        return spaces.unsupported_reason(problem)

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        return {**spaces.tile_space(problem, hardware), **spaces.send_space(problem, hardware)}

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.seed_configs(problem, hardware, self.space(problem, hardware))


class FusedGatherPlan(Plan):
    """One launch whose last programs compute tiles.

    Args:
        function: the kernel; its arguments are those of ``_push``, except the weight's.
        senders: number of programs before the tiles', if it is the same for all sizes.
    """

    def __init__(
        self,
        problem: AllGatherMatmul,
        fabric: Fabric,
        config: Config,
        function: Any,
        senders: int = 0,
    ) -> None:
        self._problem, self._config, self._rank = problem, config, fabric.rank
        self._senders, split_k = senders, config["SPLIT_K"]
        partials = split_k * problem.m * problem.n if split_k > 1 else 1
        self._partials = fabric.workspace.scratch(((partials,), torch.float32))
        counters = self._tiles(problem) + config.get("XCD_SIGNALS", 0)
        self._counters = fabric.workspace.counters(counters)
        dtype = getattr(torch, problem.factor_dtype(fabric.hardware.architecture))
        slots = fabric.pool.slots(problem.inbox_elements, dtype)
        self._memory = Memory(*slots, fabric.pool.control, None, None, fabric.heap_bases)
        self._kernel = Kernel(
            function,
            grid=0,
            constants={
                "GROUP": Group(problem.world_size, fabric.backend),
                "TILE": tiles.Tile.of(config, problem, problem.shard_columns),
            },
            options=compile_options(fabric.backend, config) | pdl_options(config),
        )
        self._sized = fabric.workspace.by_size(self._of_size)

    def _gather(self, problem: AllGatherMatmul) -> Gather:
        """The kernel's GATHER constants for a size."""
        return Gather.of(problem, self._config, SENDERS=self._senders)

    def _tiles(self, problem: AllGatherMatmul) -> int:
        block_m, block_n = self._config["BLOCK_M"], self._config["BLOCK_N"]
        return int(-(-problem.m // block_m) * -(-problem.n // block_n))

    def _of_size(self, m: int) -> tuple[Kernel, int, Any]:
        """The kernel for m rows, this rank's number of rows, and :meth:`_layout`."""
        problem = resized(self._problem, m=m)
        gather, (partials,) = self._gather(problem), self._partials()
        memory = self._memory._replace(partials_ptr=partials, counters_ptr=self._counters())
        shape = (m, problem.n, problem.k, problem.shard_rows, problem.shard_columns)
        grid = gather.SENDERS + self._tiles(problem) * self._config["SPLIT_K"]
        kernel = self._kernel.resized(grid, (memory, self._rank, *shape), GATHER=gather)
        return kernel, problem.rows_of(self._rank), self._layout(problem)

    def _layout(self, problem: AllGatherMatmul) -> Any:
        """Values for :meth:`_operands` that depend on the size."""

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size][0],)

    def run(self, *tensors: Any) -> torch.Tensor:
        a, weight, bias, *scales, out = tensors
        kernel, own_rows, layout = self._sized[out.shape[0]]
        output = (out if bias is None else bias, out)
        kernel(a, own_rows, *self._operands(a, weight, output, layout, *scales))
        return out

    def _operands(
        self,
        a: torch.Tensor,
        weight: torch.Tensor,
        output: tuple[torch.Tensor, ...],
        layout: Any,
        *scales: torch.Tensor,
    ) -> tuple[Any, ...]:
        """The kernel's arguments for the operands, with their scales, and the output of tiles."""
        strides = weight.stride()
        return weight, tiles.ScaledStrides(*strides, *scales) if scales else strides, *output
