"""The vendor's matmul in parts, which copy engines scatter to their owners while it continues.

Every rank owns a shard of the sum. A rank first computes what its peers own, beginning with the
next rank's shard, and copy engines move each part while the next is computed; its own shard comes
last, so that little is left then but adding up what all ranks have sent.

Protocol. That of :mod:`taxfree_kernels.copies`: each chunk of a peer's shard is signalled to that
peer. The kernel that adds waits for all chunks of all peers, and comes after all copies of this
rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl

from taxfree_kernels.copies import PeerCopies, parts_of, rows_of_chunk
from taxfree_kernels.device import sync
from taxfree_kernels.device.exchange import wait_for_channels
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.partial_sums.addends import with_addends
from taxfree_kernels.partial_sums.chunks import with_sources
from taxfree_kernels.partial_sums.sizes import padded_elements
from taxfree_kernels.variant import Config
from taxfree_kernels.vendor import matmul_into

_BLOCK, _INTERPRETED_BLOCK = 2048, 64  # elements that a program adds at a time
_PROGRAMS = 4  # that add, for each compute unit


@triton.jit(do_not_specialize=["channel", "rank", "first", "count", "size"])
def _add(
    partial_ptr, bias_ptr, residual_ptr, out_ptr, result_ptr,
    inbox_ptr, stride_source, control_ptr, channel, heap_bases, rank, first, count, size, columns,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_WHOLE: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add all ranks' partial sums of this rank's shard, in rank order.

    Args:
        partial_ptr: this rank's partial sum; inbox_ptr: [WORLD, stride_source].
        channel: the first of CHUNKS on which peers announce theirs.
        first: start of the shard in the output; `first`, `count`, `size` in units of 16 elements.
        count: how much of the shard lies in rows of the sum; the rest, up to `size`, is zero.
        result_ptr: gets the shard, too, if IS_WHOLE.
    """
    generation = sync.running_generation(control_ptr)
    wait_for_channels(
        control_ptr, channel, channel + CHUNKS, generation, heap_bases, rank, WORLD, BACKEND,
        CHUNKS, BUT_SELF=True,
    )  # fmt: skip
    for start in range(tl.program_id(0) * BLOCK, size * 16, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask, place = at < count * 16, first * 16 + at
        total = tl.zeros((BLOCK,), tl.float32)
        total = with_sources(total, at, mask, partial_ptr, inbox_ptr, stride_source, rank, WORLD)
        total = with_addends(
            total, at % columns, mask, place, mask, bias_ptr, residual_ptr, HAS_BIAS, HAS_RESIDUAL
        )
        total = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, total, mask=at < size * 16)
        if IS_WHOLE:
            tl.store(result_ptr + at, total, mask=mask)


@dataclass(frozen=True)
class _Message:
    """A chunk of a peer's shard on its way there.

    Args:
        rows: of all ranks' shards, one below the other.
        source, target: those rows, here and in the peer's memory.
    """

    peer: int
    chunk: int
    rows: slice
    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class _Part:
    """What is multiplied at once, and what is sent then.

    Args:
        rows, columns: of x, and of the weight.
        product: where they go.
    """

    rows: slice
    columns: slice
    product: torch.Tensor
    messages: list[_Message]


class CopiedSum:
    """A matmul whose partial sums are scattered by copies, and their addition.

    Args:
        problem: defines which rank owns what.
        fabric: the ranks.
        config: CHUNKS per shard, copied one by one, of which CHUNKS_PER_WAIT are multiplied at
            once.
        copies: those of the call.
        slot: :func:`slot_elements` elements.
        shards: room for this rank's partial sum, a shard below the other.
        add: the kernel, see :func:`adding_kernel`.
        channel: the first of the channels that announce the chunks.
        is_whole: the output has all ranks' shards, and peers will fetch `result`.
    """

    def __init__(
        self,
        problem: MatmulReduceScatter,
        fabric: Fabric,
        config: Config,
        copies: PeerCopies,
        slot: torch.Tensor,
        shards: torch.Tensor,
        add: Kernel,
        channel: int = 0,
        is_whole: bool = False,
    ) -> None:
        world, rank, chunks = problem.world_size, fabric.rank, config["CHUNKS"]
        rows, columns = problem.shard_rows, problem.shard_columns
        stride, sixteens = padded_elements(rows, columns), columns // 16
        inbox, result = slot[: world * stride], slot[world * stride :][: rows * columns]
        #: this rank's shard of the sum, for peers.
        self.result = result.view(-1, columns)
        self._copies, self._first_channel = copies, channel
        shards = shards[: world * rows * columns].view(world * rows, columns)
        messages = list(_messages(problem, fabric, chunks, shards, inbox.view(world, stride)))
        #: chunks without rows, which are waited for as well.
        self._empty = [each for each in messages if each.rows.start == each.rows.stop]
        owners = [(rank + distance) % world for distance in range(1, world + 1)]
        self._parts = [
            _part(problem, part.rows, shards, messages)
            for part in parts_of(problem, owners, chunks, config["CHUNKS_PER_WAIT"])
        ]
        self.launches = len(self._parts) + 2 * len(messages) + 1
        own = rows_of_chunk(problem, rank, 0, 1)
        count = own.stop - own.start
        self._partial = shards[rank * rows :]
        last_args = (
            result if is_whole else inbox, inbox, stride,
            fabric.pool.control, channel, fabric.heap_bases, rank,
            is_whole * rank * rows * sixteens, count * sixteens,
            (count if is_whole else rows) * sixteens, columns,
        )  # fmt: skip
        most = _PROGRAMS * fabric.hardware.compute_units
        grid = min(-(-rows * columns // add.constants["BLOCK"]), most)
        self._add = add.resized(grid, last_args)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Launch the matmul on the current stream, and the copies."""
        self._send(self._empty)
        for part in self._parts:
            matmul_into(part.product, x[part.rows], weight[:, part.columns], None)
            self._copies.follow()
            self._send(part.messages)

    def _send(self, messages: list[_Message]) -> None:
        for each in messages:
            channel = self._first_channel + each.chunk
            self._copies.send(each.target, each.source, channel, each.peer)

    def add(
        self, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Launch the addition of this rank's shard on the current stream."""
        given = [out if other is None else other for other in (bias, residual)]
        self._add(self._partial, *given, out)


def adding_kernel(
    fabric: Fabric,
    config: Config,
    has_bias: bool = False,
    has_residual: bool = False,
    is_whole: bool = False,
) -> Kernel:
    """The kernel of a :class:`CopiedSum`, for any size.

    Args:
        has_bias, has_residual: whether they are added.
        is_whole: the output has all ranks' shards.
    """
    return Kernel(
        _add,
        grid=0,
        constants={
            "WORLD": fabric.world_size,
            "BACKEND": fabric.backend,
            "HAS_BIAS": has_bias,
            "HAS_RESIDUAL": has_residual,
            "IS_WHOLE": is_whole,
            "CHUNKS": config["CHUNKS"],
            "BLOCK": _INTERPRETED_BLOCK if fabric.backend == "interpreter" else _BLOCK,
        },
        options=compile_options(fabric.backend, {"num_warps": 4}),
    )


def slot_elements(problem: MatmulReduceScatter, is_whole: bool = False) -> int:
    """What a :class:`CopiedSum` needs of a slot: an inbox for each rank, and perhaps the result."""
    shard = problem.shard_rows * problem.shard_columns
    return problem.inbox_elements + (padded_elements(1, shard) if is_whole else 0)


def _messages(
    problem: MatmulReduceScatter,
    fabric: Fabric,
    chunks: int,
    shards: torch.Tensor,
    inbox: torch.Tensor,
) -> Iterator[_Message]:
    """In the order in which they are computed; each rank begins with another peer."""
    world, rank = problem.world_size, fabric.rank
    for distance, chunk in product(range(1, world), range(chunks)):
        peer = (rank + distance) % world
        rows = rows_of_chunk(problem, peer, chunk, chunks)
        source = shards[rows]
        begin = (rows.start - peer * problem.shard_rows) * problem.shard_columns
        place = fabric.peer_view(inbox, peer)[rank][begin : begin + source.numel()]
        yield _Message(peer, chunk, rows, source, place.view(source.shape))


def _part(
    problem: MatmulReduceScatter, part: slice, shards: torch.Tensor, messages: list[_Message]
) -> _Part:
    """The part of all ranks' shards in these rows."""
    rows, columns = part, slice(0, problem.n)
    if problem.scatter_dim == 1:  # a part of a single rank's shard; all shards have the same rows
        owner, width = part.start // problem.m, problem.shard_columns
        rows = slice(part.start - owner * problem.m, part.stop - owner * problem.m)
        columns = slice(owner * width, (owner + 1) * width)
    within = [
        each for each in messages if part.start <= each.rows.start < each.rows.stop <= part.stop
    ]
    return _Part(rows, columns, shards[part], within)
