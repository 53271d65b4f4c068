"""Products and norms with several sequences in the persistent step.

Matrix instructions multiply 16 rows of a weight with N sequences. A chunk is 16 rows and 512 of K,
of which each of eight warps has 64; their sums meet in shared memory at the end of a unit. A unit
is two groups of 16 rows, so that inputs are read once for 32 KiB of weights: TMA brings them, in
pieces of 512, from the L2 cache to two places in shared memory.

The residual of all sequences does not fit a program, beside its ring. So each program owns columns
of it: it adds their sums, and publishes them times the weight of the norm, with the sums of their
squares. Products are multiplied by the reciprocal of the root of the mean square afterwards, as
with one sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taxfree_kernels.decode_step.chunks import GROUPS, WARPS, hand_back, sequences
from taxfree_kernels.decode_step.sums import receive
from taxfree_kernels.device.peers import EMPTY
from taxfree_kernels.device.specialized import load_box, reinterpreted


class Staging(NamedTuple):
    """Shared memory of products.

    Args:
        inputs: pieces of inputs, [2, 8, N, 64]: of [K / 64, sequence, 64].
        full: their barriers.
        sums: float32 [2, WARPS, 16, N], sums of each warp.
    """

    inputs: Any
    full: Any
    sums: Any


@gluon.jit
def make_row_staging(element: gl.constexpr, room, MODEL: gl.constexpr):
    """Allocate it, sums in room that attention has in its turn."""
    N: gl.constexpr = sequences(MODEL.BATCH)
    boxes: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, N, 64], element)
    sums: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    staging = Staging(
        gl.allocate_shared_memory(element, [2, 8, N, 64], boxes),
        gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        reinterpreted(room, [2, WARPS, 16, N], sums),
    )
    for place in gl.static_range(2):
        mbarrier.init(staging.full.index(place), count=1)
    return staging


# ---- products -------------------------------------------------------------------------------

#: of sums, [warps, rows of a weight, sequences]: each warp has some of K
ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS.value, 1, 1], [1, 16, 8]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, ACC, 2))
_INPUTS = gl.constexpr(gl.DotOperandLayout(1, ACC, 2))
_ALL_WARPS = gl.constexpr(
    gl.BlockedLayout([WARPS.value, 1, 1], [1, 16, 2], [1, 1, WARPS.value], [1, 2, 0])
)
PRODUCTS = gl.constexpr(gl.SliceLayout(0, _ALL_WARPS))
_ROWS = gl.constexpr(gl.SliceLayout(1, PRODUCTS))
OF_SEQUENCES = gl.constexpr(gl.SliceLayout(0, PRODUCTS))


@gluon.jit
def places_of_products(MODEL: gl.constexpr):
    """Rows [16, 1] of a group, and sequences [1, N], of products."""
    row = gl.arange(0, 16, _ROWS)
    sequence = gl.arange(0, sequences(MODEL.BATCH), OF_SEQUENCES)
    return row[:, None], sequence[None, :]


@gluon.jit
def _load_piece(inputs, slab, piece, staging, MODEL: gl.constexpr):
    """Let TMA bring a slab of the inputs, as the piece of this number."""
    full = staging.full.index(piece % 2)
    mbarrier.expect(full, sequences(MODEL.BATCH) * 1024)
    load_box(inputs, [slab * 8, 0, 0], full, staging.inputs.index(piece % 2))


@gluon.jit
def _add_chunk(sums, x, n, pipe, MODEL: gl.constexpr):
    """Add the products of a chunk; the fence covers what was loaded before, too."""
    stage = n % MODEL.STAGES
    mbarrier.wait(pipe.full.index(stage), n // MODEL.STAGES & 1)
    rows = pipe.tiles.index(stage).load(_WEIGHTS)
    hand_back(stage, pipe)
    return mma_v2(rows, x, sums), n + 1


@gluon.jit
def over_warps(sums, scratch):
    """float32 [16, N]: the sums of all warps."""
    scratch.store(sums)
    return gl.sum(scratch.load(_ALL_WARPS), 0)


@gluon.jit
def multiply_rows(inputs, first, end, n, pieces, staging, pipe, MODEL: gl.constexpr):
    """The products of a unit's rows with slabs of the inputs.

    Args:
        inputs: a descriptor, [K / 64, BATCH, 64]; rows behind the last sequence are read as 0.
        pieces: of inputs, read before.

    Returns:
        float32 [16, N] of each group of rows; the numbers of chunks and of pieces.
    """
    sums = ()
    for _ in gl.static_range(GROUPS):
        zeros = gl.zeros([WARPS, 16, sequences(MODEL.BATCH)], gl.float32, ACC)
        sums = sums + (zeros,)  # type: ignore[assignment]
    for ahead in gl.static_range(2):
        if first + ahead < end:
            _load_piece(inputs, first + ahead, pieces + ahead, staging, MODEL)
    for slab in range(first, end):
        mbarrier.wait(staging.full.index(pieces % 2), pieces // 2 & 1)
        x = staging.inputs.index(pieces % 2).permute((0, 2, 1)).load(_INPUTS)
        new = ()
        for group in gl.static_range(GROUPS):
            added, n = _add_chunk(sums[group], x, n, pipe, MODEL)
            new = new + (added,)  # type: ignore[assignment]
            if group == 0:
                if slab + 2 < end:  # all warps have loaded the last piece here, and fenced
                    _load_piece(inputs, slab + 2, pieces + 2, staging, MODEL)
        sums = new
        pieces += 1
    products = ()
    for group in gl.static_range(GROUPS):
        total = over_warps(sums[group], staging.sums.index(group))
        products = products + (total,)  # type: ignore[assignment]
    return products, n, pieces


# ---- the residual, by its owners --------------------------------------------------------------


@gluon.constexpr_function
def _owned(columns, sources):
    """The layout of what an owner polls, [sources, sequences, columns]."""
    across = columns // 4
    return gl.BlockedLayout(
        [sources, 1, 4], [1, 32 // across, across], [1, WARPS.value, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def owners(model):
    """Programs that own columns."""
    return triton.cdiv(model.HIDDEN, model.OWNED)


@gluon.jit
def _places(SOURCES: gl.constexpr, MODEL: gl.constexpr):
    """Sequences [N, 1] and columns [1, OWNED] of this program, and which it owns, [N, OWNED].

    The others are sequences and columns of somebody, so that they have addresses; columns may be
    up to OWNED behind the last.
    """
    L: gl.constexpr = gl.SliceLayout(0, _owned(MODEL.OWNED, SOURCES))
    owner = gl.minimum(gl.program_id(0), owners(MODEL) - 1)
    column = owner * MODEL.OWNED + gl.arange(0, MODEL.OWNED, gl.SliceLayout(0, L))[None, :]
    sequence = gl.arange(0, sequences(MODEL.BATCH), gl.SliceLayout(1, L))[:, None]
    is_owned = (sequence < MODEL.BATCH) & (column < MODEL.HIDDEN) & (owner == gl.program_id(0))
    return gl.minimum(sequence, MODEL.BATCH - 1), column, is_owned


@gluon.jit
def owned_embedding(embedding, tokens, SOURCES: gl.constexpr, MODEL: gl.constexpr):
    """The residual of this program's columns before the first layer, [N, OWNED]."""
    sequence, column, is_owned = _places(SOURCES, MODEL)
    row = gl.maximum(gl.load(tokens + sequence), 0).to(gl.int64) * MODEL.HIDDEN
    return gl.load(embedding + row + column, mask=is_owned, other=0.0)


@gluon.jit
def owned_norm(norm, SOURCES: gl.constexpr, MODEL: gl.constexpr):
    """The weight of a norm at this program's columns, [1, OWNED]."""
    _, column, _ = _places(SOURCES, MODEL)
    return gl.load(norm + column, mask=column < MODEL.HIDDEN, other=0.0)


@gluon.jit
def add_owned(
    residual, area, COUNT: gl.constexpr, SOURCES: gl.constexpr, inbox,
    MODEL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Wait for this program's columns of a sum, add them, and empty their words.

    Args:
        residual: [N, OWNED], NaN afterwards where words are missing.
        COUNT: of sources.
        SOURCES: as many, or more, a power of two.
    """
    POLLED: gl.constexpr = _owned(MODEL.OWNED, SOURCES)
    sequence, column, is_owned = _places(SOURCES, MODEL)
    number = gl.arange(0, SOURCES, gl.SliceLayout(1, gl.SliceLayout(2, POLLED)))[:, None, None]
    source = gl.minimum(number, COUNT - 1)
    inside = (sequence * MODEL.HIDDEN + column)[None, :, :]
    mask = is_owned[None, :, :] & (number < COUNT)
    words = area + source * (MODEL.BATCH * MODEL.HIDDEN) + inside
    seen = receive(words, source % GROUP.WORLD, mask, inbox, 4, GROUP)
    values = gl.where(mask, seen.to(gl.float32, bitcast=True), 0.0)
    new = (residual.to(gl.float32) + gl.sum(values, 0)).to(residual.dtype)
    tl.debug_barrier()  # threads of several warps may poll the same word
    empty = gl.full(seen.shape, EMPTY, gl.int32, POLLED)
    gl.store(words, empty, mask=mask, cache_modifier=".wt")
    return new


@gluon.jit
def publish(residual, weight, x, squares, tops, SOURCES: gl.constexpr, MODEL: gl.constexpr):
    """Store this program's columns of the residual times the weight of a norm, and their squares.

    Args:
        weight: see :func:`owned_norm`.
        x: [BATCH, HIDDEN].
        squares, tops: float32 [BATCH, owners]; the largest magnitudes, where weights have scales
            of channels.
    """
    sequence, column, is_owned = _places(SOURCES, MODEL)
    value = gl.where(is_owned, residual.to(gl.float32), 0.0)
    scaled = (value * weight.to(gl.float32)).to(residual.dtype)
    gl.store(x + sequence * MODEL.HIDDEN + column, scaled, mask=is_owned)
    total = gl.sum(value * value, 1)
    number = gl.arange(0, sequences(MODEL.BATCH), total.type.layout)
    owner = gl.program_id(0)
    mask = (number < MODEL.BATCH) & (owner < owners(MODEL))
    gl.store(squares + number * owners(MODEL) + owner, total, mask=mask)
    if MODEL.SCALES == "channel":
        rounded = scaled.to(gl.float32)
        largest = gl.max(gl.maximum(rounded, -rounded), 1)
        gl.store(tops + number * owners(MODEL) + owner, largest, mask=mask)


@gluon.jit
def factors(squares, MODEL: gl.constexpr):
    """float32 [N], OF_SEQUENCES: the norm's factor of each sequence."""
    ACROSS: gl.constexpr = triton.next_power_of_2(owners(MODEL))
    # a warp has all of a sequence
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    sequence = gl.arange(0, sequences(MODEL.BATCH), gl.SliceLayout(1, L))[:, None]
    owner = gl.arange(0, ACROSS, gl.SliceLayout(0, L))[None, :]
    there = (sequence < MODEL.BATCH) & (owner < owners(MODEL))
    at = squares + sequence * owners(MODEL) + owner
    each = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
    mean = gl.convert_layout(gl.sum(each, 1), OF_SEQUENCES) * (1.0 / MODEL.HIDDEN)
    return gl.rsqrt(mean + MODEL.EPS)
