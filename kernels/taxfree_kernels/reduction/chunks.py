"""Device functions of our collectives: a flat partial sum is sent and summed in chunks.

Flat tensors have a multiple of 16 elements here, and chunks begin and end at such multiples, so
that accesses can be 16 bytes wide whatever the dimensions are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device.tiles import select


@triton.jit
def bounds_of_chunk(chunk, begin, end, CHUNKS: tl.constexpr):
    """Where one of CHUNKS parts of [begin, end) begins and ends, all in units of 16 elements."""
    per_chunk = tl.cdiv(end - begin, CHUNKS)
    chunk_begin = min(begin + chunk * per_chunk, end)
    return chunk_begin, min(chunk_begin + per_chunk, end)


@triton.jit
def with_sources(total, at, mask, own_ptr, inbox_ptr, stride_source, rank, GROUP: tl.constexpr):
    """`total`, float32, plus elements `at` of all ranks' partial sums, in the ranks' order.

    Args:
        own_ptr: this rank's; inbox_ptr: rank 0's, the others `stride_source` elements apart.
    """
    for source in tl.static_range(GROUP.WORLD):
        source_ptr = select(rank == source, own_ptr, inbox_ptr + source * stride_source, 16)
        total += tl.load(source_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return total
