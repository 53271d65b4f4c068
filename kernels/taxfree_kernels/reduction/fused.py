"""Shared by the fused variants: a tile of this rank's partial sum, and sums of tiles; their plan.

A sum ends with bias and residual, and RMSNorm: a normalised row stays in its program's registers,
in float32, from the addition of the partial sums to the result. So nothing is read twice, and no
program waits for another's part of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import CHANNELS, Group, Memory, translate
from taxfree_kernels.device.sync import signal_everybody, wait_for_channels, wait_for_everybody
from taxfree_kernels.device.tiles import (
    ScaledStrides,
    Tile,
    accumulate,
    accumulate_tma,
    first_scales,
    quantised_groups,
    scaled_tile,
    scales_of_tile,
    select,
    stream_k,
    swizzle2d,
    tile_and_share,
    zero_tile,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware, fp8_of
from taxfree_kernels.launch import (
    Kernel,
    OperandDescriptors,
    RowDescriptors,
    compile_options,
    pdl_options,
    weight_descriptors,
)
from taxfree_kernels.reduction import spaces
from taxfree_kernels.variant import (
    BLOCK,
    Config,
    PartialSum,
    Plan,
    Space,
    Variant,
    groups_of,
    resized,
)

_BLOCK = tl.constexpr(BLOCK)
_ALIGNED = 8  # elements of 16 bits, so that each part begins at a multiple of 16 bytes


class Strides(NamedTuple):
    """Strides of an inbox, in elements or words: between sources, and between rows."""

    source: Any
    row: Any


class OutputShard(NamedTuple):
    """Sizes of a rank's shard and of its place in an inbox, in elements or words.

    Args:
        columns: of the shard, in elements.
        stride_source: from one source's shard to the next.
        stride_row: from row to row, if it is not the width of all tiles of the columns.
        scales: where the scales of rows of tiles in fp8 begin, if there are any: float32 [rows,
            tiles of the columns].
    """

    columns: Any
    stride_source: Any
    stride_row: Any = None
    scales: Any = None


class TileSchedule(NamedTuple):
    """The constants of a kernel in which some programs send tiles, and others add them.

    Args:
        TILES_PER_SIGNAL: tiles that share a signal.
        PIECES: number of programs that add one tile.
        STAGGERED: see :func:`tile_and_share`.
    """

    TILES_PER_SIGNAL: int
    PIECES: int = 1
    STAGGERED: int = 0


@triton.jit
def partial_tile(
    tile, split, tiles, row_begin, row_end, col_begin, col_end, x, w, stride_w, buffers, k,
    GROUP: tl.constexpr, TILE: tl.constexpr, STAGGERED: tl.constexpr = 0,
):  # fmt: skip
    """One tile of this rank's x @ weight at (row_begin, col_begin); undefined beyond the ends.

    Args:
        tile, tiles: number of this tile, and of all tiles.
        split: number of the SPLIT_K share of its K.
        x, w: pointers to x [.., k], contiguous, and to the weight [k, ..]; when TMA, descriptors
            of x [1, 1, .., k], and of the weight, [1, .., k] when W_NK, else [1, k, ..].
        stride_w: strides of the weight along k and along columns, in elements; where these are fp8,
            :class:`ScaledStrides`.
        buffers: used only if programs share K: partials [SPLIT_K, tiles, BLOCK_M, BLOCK_N] or, when
            STAGGERED, [2, STAGGERED, ..]; counters [tiles]. Each share must have at least one step
            of BLOCK_K.
        STAGGERED: see :func:`tile_and_share`.

    Returns:
        The tile, float32 [BLOCK_M, BLOCK_N], and whether this program holds the full sum: the last
        of the programs that share K adds all shares, always in the same order.
    """
    rows = row_begin + tl.arange(0, TILE.BLOCK_M)
    cols = col_begin + tl.arange(0, TILE.BLOCK_N)
    row_mask, col_mask = rows < row_end, cols < col_end
    steps = tl.cdiv(k, TILE.BLOCK_K)
    step_begin, step_end = stream_k(split, TILE.SPLIT_K, steps)
    if STAGGERED > 0:
        cut = min(max(steps * (2 * tile + 1) // (2 * STAGGERED), 1), steps - 1)
        step_begin = tl.where((tile < STAGGERED) & (split == 1), cut, 0)
        step_end = tl.where((tile < STAGGERED) & (split == 0), cut, steps)
    if TILE.BLOCK_M * TILE.BLOCK_N > 128 * 128:
        # If there could be no step, the initial zeros and the sum would merge after the loop, and
        # ptxas would serialise the loop's matrix instructions. For smaller tiles it does not, but
        # it does serialise some of those if they are assumed to have steps.
        tl.assume(step_end > step_begin)
    scales = None
    if TILE.SCALES != "none":
        x_scales = first_scales(stride_w.x_scale_ptr, rows, k, TILE)
        scales = scales_of_tile(
            x_scales, stride_w.w_scale_ptr, row_mask, col_begin, col_end, k, TILE
        )
    acc = zero_tile(TILE)
    if TILE.TMA:
        acc = accumulate_tma(
            acc, x, 0, row_begin, w, col_begin, 0, 1, step_begin, step_end, 1, 1, TILE, scales
        )
    else:
        x_rows = x + rows.to(tl.int64) * k
        w_cols = w + cols.to(tl.int64) * stride_w[1]
        acc = accumulate(
            acc, x_rows, 0, row_mask, w_cols, stride_w[0], col_mask, 0, 1, k, step_begin, step_end,
            1, TILE, scales,
        )  # fmt: skip
    if TILE.SWAP_AB:
        acc = tl.trans(acc)
    is_whole = split >= 0
    SHARES: tl.constexpr = 2 if STAGGERED > 0 else TILE.SPLIT_K
    if SHARES > 1:
        is_shared = True
        if STAGGERED > 0:
            is_shared = tile < STAGGERED
            tiles = STAGGERED
        if is_shared:
            acc, is_whole = _together(acc, tile, split, tiles, row_mask, buffers, GROUP, SHARES)
    if TILE.SCALES != "none":
        acc = scaled_tile(acc, scales, TILE)
    return acc, is_whole


@triton.jit
def _together(
    acc, tile, split, tiles, row_mask, buffers, GROUP: tl.constexpr, SHARES: tl.constexpr
):
    """Store a share of a tile; the last of SHARES programs returns the sum of all shares."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    stored = row_mask[:, None]
    share_ptr = buffers.partials_ptr + tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
    shares = tl.cast(tiles, tl.int64) * (BLOCK_M * BLOCK_N)
    tl.store(share_ptr + split * shares + within, acc, mask=stored)
    is_whole = sync.arrive(buffers.counters_ptr + tile, SHARES, GROUP)
    if is_whole:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for other in range(SHARES):
            acc += tl.load(share_ptr + other * shares + within, mask=stored, other=0.0)
    return acc, is_whole


@triton.jit
def numbered_tile(
    number, m, n, k, x, w, stride_w, buffers, GROUP: tl.constexpr,
    TILE: tl.constexpr, STAGGERED: tl.constexpr = 0,
):  # fmt: skip
    """:func:`partial_tile` of all of x [m, k] @ weight [k, n], by number, shares of K fastest.

    Returns:
        The tile's number, its first row and column; the tile, and whether this program has it.
    """
    tiles_m, tiles_n = tl.cdiv(m, TILE.BLOCK_M), tl.cdiv(n, TILE.BLOCK_N)
    tile, split = tile_and_share(number, TILE.SPLIT_K, STAGGERED)
    tile_m, tile_n = swizzle2d(tile, tiles_m, tiles_n, TILE.GROUP_M)
    row_begin, col_begin = tile_m * TILE.BLOCK_M, tile_n * TILE.BLOCK_N
    acc, is_whole = partial_tile(
        tile, split, tiles_m * tiles_n, row_begin, m, col_begin, n, x, w, stride_w, buffers, k,
        GROUP, TILE, STAGGERED,
    )  # fmt: skip
    return tile, row_begin, col_begin, acc, is_whole


@triton.jit
def announce_tile(
    tile, tiles, channel, counters_ptr, peers, GROUP: tl.constexpr, TILES_PER_SIGNAL: tl.constexpr
):
    """Signal all ranks if this tile is the last of its group to be stored.

    Args:
        channel: the first group's channel; each group has one.
        counters_ptr: int32 [groups].
    """
    group = tile // TILES_PER_SIGNAL
    is_complete = tile >= 0
    if TILES_PER_SIGNAL > 1:
        members = min(TILES_PER_SIGNAL, tiles - group * TILES_PER_SIGNAL)
        is_complete = sync.arrive(counters_ptr + group, members, GROUP)
    if is_complete:
        signal_everybody(peers, channel + group, GROUP)


@triton.jit
def send_tile(part, own_ptr, offsets, mask, peers, GROUP: tl.constexpr, TO_SELF: tl.constexpr):
    """Store a tile at `offsets` of this rank's part of all inboxes; of its own if TO_SELF."""
    for step in tl.static_range(0 if TO_SELF else 1, GROUP.WORLD):
        target_ptr = translate(own_ptr, peers, (peers.rank + step) % GROUP.WORLD)
        tl.store(target_ptr + offsets, part, mask=mask)


@triton.jit
def total_of_tile(
    rows, cols, row_mask, n, epilogue, source_ptr, stride_source, offsets, at_mask,
    channel, peers, GROUP: tl.constexpr, EPILOGUE: tl.constexpr, scale_ptrs=None,
):  # fmt: skip
    """Wait for all ranks' partial sums of a tile, and add them, the bias and the residual.

    Args:
        rows, cols, row_mask: the tile's, in a sum of n columns.
        offsets, at_mask, scale_ptrs: see :func:`sum_of_sources`.
        channel: the channel that announces them.

    Returns:
        The total, float32; NaN if they have not arrived.
    """
    added = bias_residual_of_tile(rows, cols, row_mask, n, epilogue, EPILOGUE)
    arrived = wait_for_everybody(peers, channel, GROUP)
    total = sum_of_sources(
        source_ptr, stride_source, offsets, at_mask, GROUP, None, 0, scale_ptrs, at_mask
    )
    total += added
    return tl.where(arrived, total, float("nan"))


@triton.jit
def bias_residual_of_tile(rows, cols, row_mask, n, epilogue, EPILOGUE: tl.constexpr):
    """float32 [rows, cols]: bias and residual for a tile of a sum of n columns."""
    none = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    col_mask = (cols < n)[None, :]
    offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
    return add_bias_residual(
        none, cols[None, :], col_mask, offsets, row_mask[:, None] & col_mask, epilogue, EPILOGUE
    )


@triton.jit
def store_tile(out_ptr, rows, cols, row_mask, n, tile):
    """Store a tile of a sum of n columns, in the type of `out_ptr`."""
    offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
    mask = row_mask[:, None] & (cols < n)[None, :]
    tl.store(out_ptr + offsets, tile.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_sources(
    source_ptr, stride_source, offsets, mask, GROUP: tl.constexpr, own_part=None, rank=0,
    scale_ptrs=None, scale_mask=None,
):  # fmt: skip
    """float32: the sum of all ranks' elements at `offsets`, a block, in rank order.

    Args:
        own_part: this rank's elements if they are not in the inbox; else None.
        scale_ptrs, scale_mask: to float32 scales of the rows of source 0 in fp8, whose others are
            as far away as their elements; else None.
    """
    total = tl.zeros(offsets.shape, tl.float32)
    if offsets.numel <= 4096:  # unrolled, so that the loads of all sources are in flight
        for source in tl.static_range(GROUP.WORLD):
            total += _part_of(
                source, source_ptr, stride_source, offsets, mask, own_part, rank, scale_ptrs,
                scale_mask,
            )  # fmt: skip
    else:  # one source's loads fill the registers
        for source in range(GROUP.WORLD):
            total += _part_of(
                source, source_ptr, stride_source, offsets, mask, own_part, rank, scale_ptrs,
                scale_mask,
            )  # fmt: skip
    return total


@triton.jit
def _part_of(
    source, source_ptr, stride_source, offsets, mask, own_part, rank, scale_ptrs, scale_mask
):
    """One rank's elements, float32."""
    ptrs = source_ptr + source * stride_source + offsets
    if own_part is None:
        part = tl.load(ptrs, mask=mask, other=0.0)
    else:
        others = tl.where(rank == source, False, mask)
        part = tl.where(rank == source, own_part, tl.load(ptrs, mask=others, other=0.0))
    part = part.to(tl.float32)
    if scale_ptrs is not None:
        part *= tl.load(scale_ptrs + source * (stride_source // 4), mask=scale_mask, other=0.0)
    return part


@triton.jit
def with_sources(
    total, offsets, mask, own_ptr, inbox_ptr, stride_source, rank, GROUP: tl.constexpr
):
    """`total`, float32, plus elements at `offsets` of all ranks' partial sums, in rank order.

    Args:
        own_ptr: this rank's sum; inbox_ptr: rank 0's; sums are `stride_source` elements apart.
    """
    for source in tl.static_range(GROUP.WORLD):
        source_ptr = select(rank == source, own_ptr, inbox_ptr + source * stride_source, 16)
        total += tl.load(source_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


class Epilogue(NamedTuple):
    """The constants of a kernel's epilogue: ``EPILOGUE: tl.constexpr``.

    Args:
        BLOCK_ROW: lanes for a normalised row, at least n; 0 without RMSNorm.
        OUT_SCALES: see :class:`PartialSum`.
    """

    HAS_BIAS: bool
    HAS_RESIDUAL: bool
    BLOCK_ROW: int = 0
    OUT_SCALES: str = "none"


class Addends(NamedTuple):
    """The tensors that are added to a sum [m, n]: a bias [n] and a residual [m, n]."""

    bias_ptr: Any
    residual_ptr: Any


class Quantised(NamedTuple):
    """A normalised sum in fp8 [m, n], and its scales; see :mod:`taxfree_kernels.fp8`."""

    values_ptr: Any
    scale_ptr: Any


class EpilogueTensors(NamedTuple):
    """:class:`Addends`, the weight [n] of RMSNorm, its epsilon, float32 [1]; :class:`Quantised`."""

    bias_ptr: Any
    residual_ptr: Any
    norm_weight_ptr: Any
    eps_ptr: Any
    quantised: Any = None


@triton.jit
def add_bias_residual(total, columns, column_mask, offsets, mask, epilogue, EPILOGUE: tl.constexpr):
    """`total`, float32, plus the bias and the residual, if given.

    Args:
        columns, column_mask: of the elements of `total`; they may broadcast.
        offsets, mask: theirs in the residual.
    """
    if EPILOGUE.HAS_BIAS:
        total += tl.load(epilogue.bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    if EPILOGUE.HAS_RESIDUAL:
        total += tl.load(epilogue.residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def sum_and_normalise(
    row, channel, channel_end, own_ptr, inbox_ptr, stride_source, stride_row, epilogue, out_ptr,
    count, n, peers, GROUP: tl.constexpr, EPILOGUE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add one row of all ranks' partial sums, in rank order; store it and its RMSNorm.

    Args:
        channel, channel_end: channels that announce parts of the row; at most CHANNELS.
        own_ptr, inbox_ptr, stride_source: see :func:`with_sources`; rows are `stride_row` apart.
        out_ptr: see :func:`store_normalised`.
        n: elements of a row, at most BLOCK_ROW.
    """
    column = tl.arange(0, EPILOGUE.BLOCK_ROW)
    mask = column < n
    offsets = row.to(tl.int64) * n + column
    total = add_bias_residual(
        tl.zeros((EPILOGUE.BLOCK_ROW,), tl.float32), column, mask, offsets, mask, epilogue, EPILOGUE
    )
    norm_weight = tl.load(epilogue.norm_weight_ptr + column, mask=mask, other=0.0)
    arrived = wait_for_channels(peers, channel, channel_end, GROUP, CHANNELS)
    total = with_sources(
        total, row * stride_row + column, mask, own_ptr, inbox_ptr, stride_source, peers.rank, GROUP
    )
    total = tl.where(arrived, total, float("nan"))
    store_normalised(
        total, row, offsets, mask, norm_weight, epilogue.eps_ptr, epilogue.quantised, out_ptr,
        count, n, EPILOGUE.OUT_SCALES,
    )  # fmt: skip


@triton.jit
def store_normalised(
    total, row, offsets, mask, norm_weight, eps_ptr, quantised, out_ptr, count, n,
    OUT_SCALES: tl.constexpr,
):  # fmt: skip
    """Store a row and its RMSNorm.

    Args:
        total: float32, the row; 0 where it is masked. offsets, mask: its place in a sum [m, n].
        norm_weight: of the row's columns. eps_ptr: float32 [1].
        quantised: see :class:`Quantised`; None without OUT_SCALES.
        out_ptr: [2, m, n]: the normalised sum, then the sum, `count` elements; with OUT_SCALES
            the sum alone.
    """
    total_square = tl.sum(total * total, 0)
    scale = tl.rsqrt(total_square / n + tl.load(eps_ptr))
    normalised = total * scale * norm_weight.to(tl.float32)
    if OUT_SCALES == "none":
        tl.store(out_ptr + offsets, normalised.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptr + count + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        rounded = normalised.to(out_ptr.dtype.element_ty).to(tl.float32)
        _store_quantised(rounded, row, offsets, mask, n, quantised, OUT_SCALES)
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_quantised(x, row, offsets, mask, n, quantised, OUT_SCALES: tl.constexpr):
    """Store a row of n elements in fp8, and its scales; arguments as of :func:`store_normalised`.

    What is quantised was rounded to 16 bits: so all variants find the bits of the library.
    """
    WIDTH: tl.constexpr = min(_BLOCK, x.numel) if OUT_SCALES == "block" else x.numel
    GROUPS: tl.constexpr = x.numel // WIDTH
    given = None
    if OUT_SCALES == "tensor":
        given = tl.load(quantised.scale_ptr)
    values, scale = quantised_groups(
        tl.reshape(x, (GROUPS, WIDTH)), given, quantised.values_ptr.dtype.element_ty
    )
    tl.store(quantised.values_ptr + offsets, tl.reshape(values, (x.numel,)), mask=mask)
    if OUT_SCALES != "tensor":
        group, groups = tl.arange(0, GROUPS), tl.cdiv(n, WIDTH)
        at_ptr = quantised.scale_ptr + row.to(tl.int64) * groups + group
        tl.store(at_ptr, scale, mask=group < groups)


class OutputParts(NamedTuple):
    """Views of an output that is quantised: an operation has one output, which holds them all.

    Args:
        values: the normalised sum in fp8, [m, n].
        scale: its scales, float32; see :mod:`taxfree_kernels.fp8`.
        total: the sum, [m, n].
    """

    values: torch.Tensor
    scale: torch.Tensor
    total: torch.Tensor


def columns_of(n: int, out_scales: str) -> int:
    """Columns of an output [m, columns] that has room for the parts of m rows."""
    return n + -(-n // 2) + 2 * groups_of(n, out_scales) + 2 * _ALIGNED


def parts_of(
    out: torch.Tensor, n: int, out_scales: str, kind: torch.dtype, scale: torch.Tensor | None = None
) -> OutputParts:
    """The parts of an output.

    Args:
        out: [m, :func:`columns_of`], contiguous, of 16 bits: the sum, the values, the scales.
        kind: the e4m3 of the values.
        scale: float32 [1], if it is given and not found.
    """
    m, flat = len(out), out.view(-1)
    values = _padded(m * n)
    if scale is None:
        begin, groups = values + _padded(-(-m * n // 2)), groups_of(n, out_scales)
        scale = flat[begin : begin + 2 * m * groups].view(torch.float32).view(m, groups)
    in_bytes = flat[values:].view(kind)
    return OutputParts(in_bytes[: m * n].view(m, n), scale, flat[: m * n].view(m, n))


def packed(
    values: torch.Tensor, scale: torch.Tensor, total: torch.Tensor, out_scales: str
) -> torch.Tensor:
    """The output that has these parts; see :class:`OutputParts`."""
    m, n = total.shape
    out = total.new_empty(m, columns_of(n, out_scales))
    given = (scale,) if out_scales == "tensor" else ()
    parts = parts_of(out, n, out_scales, values.dtype, *given)
    for part, own in zip(parts, (values, scale, total), strict=True):
        part.copy_(own)
    return out


def _padded(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class Layout:
    """The layout of a launch for a problem.

    Args:
        tiles: number of tiles of this rank's partial sum.
        others: number of programs that do not compute tiles.
        slot_elements: elements that the kernel uses in a slot of :meth:`FusedReductionPlan.inbox`.
        sizes: the kernel's size arguments besides m, n and k, or tuples of them.
    """

    tiles: int
    others: int
    slot_elements: int
    sizes: tuple[Any, ...]


class FusedReductionPlan(Plan):
    """One launch: programs that compute and send tiles, then programs that add.

    Args:
        problem: with m, n and k of a rank's own matmul.
        function: the kernel. It takes x and the weight (see :func:`partial_tile`), the strides of
            the weight, the addends of the sum, the output, the arguments of `_of_size`, and the
            layout's sizes.
        layout: of the problem, or of a smaller one.
        constants: further constants of this kernel.
    """

    def __init__(
        self,
        problem: PartialSum,
        fabric: Fabric,
        config: Config,
        function: Any,
        layout: Callable[[Any], Layout],
        constants: Mapping[str, Any],
    ) -> None:
        self._problem, self._layout, self._split_k = problem, layout, config["SPLIT_K"]
        self._kind = getattr(torch, fp8_of(fabric.hardware.architecture))
        top = layout(problem)
        self._tma = config["TMA"]
        self._x_descriptors, self._w_descriptors = self.descriptors(problem, config)
        self._staggered = constants["SCHEDULE"].STAGGERED if "SCHEDULE" in constants else 0
        shares = 2 * self._staggered + (self._split_k * top.tiles if self._split_k > 1 else 0)
        tile_elements = config["BLOCK_M"] * config["BLOCK_N"]
        partials = ((max(1, shares * tile_elements),), torch.float32)
        self._inbox = self.inbox(fabric, config, top.slot_elements)
        self._control = fabric.pool.control
        self._partials = fabric.workspace.scratch(partials)
        self._counters = fabric.workspace.counters(top.tiles + CHANNELS)
        self._heap_bases, self._rank = fabric.heap_bases, fabric.rank
        self._kernel = Kernel(
            function,
            grid=0,
            constants={
                "TILE": Tile.of(config, problem, problem.k),
                "GROUP": Group(problem.world_size, fabric.backend),
                **constants,
            },
            options=compile_options(fabric.backend, config) | pdl_options(config),
        )
        self._sized = fabric.workspace.by_size(self._of_size)

    def descriptors(
        self, problem: PartialSum, config: Config
    ) -> tuple[OperandDescriptors, OperandDescriptors]:
        """The TMA descriptors of x and of the weight."""
        block_m, block_n, block_k = (config[f"BLOCK_{side}"] for side in "MNK")
        is_nk = problem.weight_layout == "nk"
        w_box = [1, block_n, block_k] if is_nk else [1, block_k, block_n]
        return RowDescriptors([1, 1, block_m, block_k]), weight_descriptors(1, w_box, is_nk)

    def inbox(self, fabric: Fabric, config: Config, elements: int) -> tuple[torch.Tensor, int]:
        """The inbox of peers' tiles: its first slot, and the stride to the next one.

        It holds payload in the WIRE type or, with `LL` in the config, LL packets.
        """
        if config.get("LL"):
            return fabric.pool.ll_slots(elements)
        is_fp8 = config["WIRE"] == "fp8"
        return fabric.pool.slots(elements, self._kind if is_fp8 else getattr(torch, config["WIRE"]))

    def _of_size(self, m: int) -> tuple[Kernel, ...]:
        problem = resized(self._problem, m=m)
        layout = self._layout(problem)
        sizes = (m, problem.n, problem.k, *layout.sizes)
        grid = layout.tiles * self._split_k + self._staggered + layout.others
        return (self._kernel.resized(grid, (self._buffers(), self._rank, *sizes)),)

    def _buffers(self) -> Memory:
        return Memory(
            *self._inbox, self._control, self._partials()[0], self._counters(), self._heap_bases
        )

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return self._sized[size]

    def run(self, *tensors: Any) -> torch.Tensor:
        x, weight, *others, out = tensors
        strides = weight.stride()
        if self._problem.is_fp8:
            *others, x_scale, weight_scale = others
            strides = ScaledStrides(strides[0], strides[1], x_scale, weight_scale)
        (kernel,) = self._sized[x.shape[0]]
        kernel(*self._operands(x, weight), strides, *self._epilogue(others, out), out)
        return out

    def _operands(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, Any]:
        """The kernel's arguments for x and the weight."""
        if self._tma:
            return self._x_descriptors(x), self._w_descriptors(weight)
        return x, weight

    def _epilogue(
        self, addends: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The kernel's argument for the addends of the sum, if the operation has any."""
        tensors: list[Any] = [out if tensor is None else tensor for tensor in addends]
        if self._problem.out_scales != "none":
            problem = self._problem
            parts = parts_of(out, problem.n, problem.out_scales, self._kind, *tensors[4:])
            tensors[4:] = [Quantised(parts.values, parts.scale)]
        return (EpilogueTensors(*tensors),) if tensors else ()


class FusedReductionVariant(Variant):
    """A variant that sends each tile of a partial sum as soon as it is finished.

    Attributes:
        sends_fp8: whether tiles may travel in fp8, with scales of their rows.
    """

    sends_fp8 = False
    illegal_reason = staticmethod(spaces.illegal_reason)

    def unsupported_reason(self, problem: PartialSum, hardware: Hardware) -> str | None:
        owned = problem.n // problem.world_size if problem.scatter_dim else 0
        if problem.scales == "block" and owned % BLOCK:
            return f"columns of a shard begin within a block of {BLOCK}"
        return spaces.exchange_unsupported_reason(problem)

    def space(self, problem: PartialSum, hardware: Hardware) -> Space:
        return {
            **spaces.tile_space(problem, hardware),
            "SIGNALS": spaces.signal_counts(hardware, spaces.MOST_SIGNALS),
            "WIRE": ("fp8",) * (self.sends_fp8 and problem.fp8_wire) + problem.wires,
        }

    def seed_configs(self, problem: PartialSum, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.seed_configs(problem, hardware, self.space(problem, hardware))
