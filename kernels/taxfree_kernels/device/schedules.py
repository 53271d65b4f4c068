"""Schedules: which tile a program computes, as integer arithmetic on its program id.

Devices with several chiplets (XCDs) assign programs to them round-robin: program p runs on chiplet
p % num_xcds, which has its own L2 cache. A schedule decides which tiles share an L2. It is a
bijection from program ids to tiles; num_xcds is 1 on devices with one L2.

The same functions run in kernels and, through :func:`~taxfree_kernels.device.on_host.on_host`, on
NumPy arrays of program ids: the cache model (:mod:`taxfree_kernels.cost.l2`) sees kernels' order.

Schedules of a matmul are :func:`~taxfree_kernels.device.tiles.xcd_swizzle` followed by
:func:`~taxfree_kernels.device.tiles.swizzle2d`, which have a parameter each:

| schedule | XCDS | GROUP_M |
| --- | --- | --- |
| row-major | 1 | 1 |
| grouped | 1 | rows of tiles in a group |
| M-split: each chiplet has its own rows of tiles | chiplets | 1 |
| M-tile: each chiplet has its own columns of tiles, and walks down them | chiplets | all rows |

:func:`stream_k` shares K among programs: in kernels that of one tile, among SPLIT_K of them.
:func:`rank_rotated` lets each rank begin with its own rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device.tiles import xcd_swizzle


@triton.jit
def stream_k(program, programs, iterations):
    """The iterations [begin, end) of a program; all programs together have each of them once.

    Numbers of iterations differ by at most one. For tiles of `steps` steps of K each, iteration i
    is step i % steps of tile i // steps.
    """
    return iterations * program // programs, iterations * (program + 1) // programs


@triton.jit
def rank_rotated(tile_m, first, tiles_m):
    """The row of tiles that a rank computes in place of row `tile_m`, if it begins with `first`."""
    return (tile_m + first) % tiles_m


#: the orders of attention's programs, see :func:`attention_tile`
ATTENTION_MAPPINGS = (
    "naive_block_first",
    "swizzled_block_first",
    "naive_head_first",
    "swizzled_head_first",
    "balanced_head_first",
)


@triton.jit
def attention_tile(
    program, blocks, heads, batch, XCDS: tl.constexpr, MAPPING: tl.constexpr
):  # fmt: skip
    """Program id -> (sequence, head, block of query rows), for blocks * heads * batch programs.

    The head is a query head; consecutive heads share keys and values in grouped-query attention.

    Args:
        blocks: blocks of query rows of the longest sequence.
        MAPPING: one of ``ATTENTION_MAPPINGS``. The first four are those of arXiv 2511.02132.
            "naive_block_first": all heads of a block, then the next block.
            "swizzled_block_first": the same; each chiplet has a run of consecutive heads. It keeps
            a head on its chiplet only if XCDS divides heads.
            "naive_head_first": all blocks of a head, then the next head.
            "swizzled_head_first": the same; each chiplet has a run of heads, and splits at most
            its first and last with a neighbour. Programs per chiplet differ by at most one.
            "balanced_head_first": the same; also with a causal mask, where later blocks have more
            keys, chiplets get equal work: see :func:`_balanced_head_first`.
    """
    if MAPPING == "naive_block_first" or MAPPING == "swizzled_block_first":
        head = program % heads
        if MAPPING == "swizzled_block_first":
            head = xcd_swizzle(head, heads, XCDS)
        block = program // heads % blocks
        sequence = program // (heads * blocks)
    elif MAPPING == "balanced_head_first":
        pair, block = _balanced_head_first(program, blocks, heads * batch, XCDS)
        head, sequence = pair % heads, pair // heads
    else:
        index = program
        if MAPPING == "swizzled_head_first":
            index = xcd_swizzle(program, blocks * heads * batch, XCDS)
        block = index % blocks
        head = index // blocks % heads
        sequence = index // (blocks * heads)
    return sequence, head, block


@triton.jit
def _balanced_head_first(program, blocks, pairs, XCDS: tl.constexpr):
    """Program id -> (pair of sequence and head, block), with equal work for all chiplets.

    Each chiplet has the same number of whole pairs. The rest, fewer pairs than chiplets, is cut
    into equal runs of blocks that alternate between the last and the first that is left, so that
    any run has the average work of its blocks. It comes first; then whole pairs, last block first,
    so that a chiplet's last programs are its shortest.
    """
    chiplet, turn = program % XCDS, program // XCDS
    whole = pairs // XCDS
    rest = pairs % XCDS * blocks
    longer = rest % XCDS  # chiplets that get one program more of the rest
    mine = rest // XCDS + tl.where(chiplet < longer, 1, 0)
    first = chiplet * (rest // XCDS) + tl.where(chiplet < longer, chiplet, longer)
    is_rest = turn < mine
    index = tl.where(is_rest, first + turn, turn - mine)
    pair = tl.where(is_rest, whole * XCDS, chiplet * whole) + index // blocks
    place = index % blocks
    alternating = tl.where(place % 2 == 0, blocks - 1 - place // 2, place // 2)
    return pair, tl.where(is_rest, alternating, blocks - 1 - place)
