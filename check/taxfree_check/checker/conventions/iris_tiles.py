"""Stand-ins for Iris' tiles and views, and for what its context does with them.

They exist in interpreted kernels alone. Names, signatures, and the order, semantics and scopes of
accesses are those of Iris at the commit that ``tests/kernels/iris_contract.json`` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import triton.language as tl

__all__ = [
    "AllReduceConfig", "TensorView", "Tile", "TileView", "make_tensor_view", "offset_ptr",
    "tile_layout", "tile_ptr",
]  # fmt: skip

Pointers: TypeAlias = tuple[Any, Any]  # of a tile's elements, and which of them exist


class TileView:
    """Where a tile is: its coordinates in tiles, and its sizes."""

    def __init__(self, pid_m: Any, pid_n: Any, block_m: Any, block_n: Any) -> None:
        self.pid_m, self.pid_n, self.block_m, self.block_n = pid_m, pid_n, block_m, block_n

    def indices(self) -> tuple[Any, Any]:
        """Rows and columns."""
        return (
            self.pid_m * self.block_m + tl.arange(0, self.block_m),
            self.pid_n * self.block_n + tl.arange(0, self.block_n),
        )

    def layout(self, M: Any, N: Any) -> tuple[Any, Any, Any]:
        """Rows, columns, and which elements are inside of M rows and N columns."""
        rows, columns = self.indices()
        return rows, columns, (rows[:, None] < M) & (columns[None, :] < N)


class Tile(TileView):
    """A tile with its values."""

    def __init__(self, pid_m: Any, pid_n: Any, block_m: Any, block_n: Any, data: Any) -> None:
        super().__init__(pid_m, pid_n, block_m, block_n)
        self.data = data


class TensorView:
    """A matrix in memory."""

    def __init__(self, ptr: Any, M: Any, N: Any, stride_m: Any, stride_n: Any) -> None:
        self.ptr, self.M, self.N, self.stride_m, self.stride_n = ptr, M, N, stride_m, stride_n

    def tile_ptr(self, tile: TileView) -> Pointers:
        """Addresses of a tile's elements."""
        return self.tile_ptr_from_indices(*tile.indices(), tile.block_m, tile.block_n)

    def tile_ptr_from_indices(self, rm: Any, rn: Any, block_m: Any, block_n: Any) -> Pointers:
        """Addresses of the elements at rows and columns."""
        inside = (rm[:, None] < self.M) & (rn[None, :] < self.N)
        return self.ptr + rm[:, None] * self.stride_m + rn[None, :] * self.stride_n, inside

    def offset_tile_ptr(
        self, tile: TileView, offset_m: Any = 0, offset_n: Any = 0, src_mask: Any = None
    ) -> Pointers:
        """Addresses of a tile that is moved by rows and columns."""
        rows, columns = tile.indices()
        addresses, inside = self.tile_ptr_from_indices(
            rows + offset_m, columns + offset_n, tile.block_m, tile.block_n
        )
        return addresses, inside if src_mask is None else inside & src_mask

    def offset(self, offset_m: Any = 0, offset_n: Any = 0) -> TensorView:
        """The matrix that begins at a row and a column."""
        begin = offset_ptr(self.ptr, self.stride_m, self.stride_n, offset_m, offset_n)
        return TensorView(begin, self.M, self.N, self.stride_m, self.stride_n)

    def number_of_tiles(self, block_m: Any, block_n: Any) -> Any:
        """How many tiles cover it."""
        return tl.cdiv(self.M, block_m) * tl.cdiv(self.N, block_n)


class AllReduceConfig:
    """The algorithm of an all-reduce by its number, and its locks."""

    def __init__(self, variant_code: Any, locks_ptr: Any) -> None:
        self.variant_code, self.locks_ptr = variant_code, locks_ptr


def make_tensor_view(ptr: Any, M: Any, N: Any, stride_m: Any, stride_n: Any) -> TensorView:
    """See :class:`TensorView`."""
    return TensorView(ptr, M, N, stride_m, stride_n)


def tile_layout(
    pid_m: Any, pid_n: Any, M: Any, N: Any, BLOCK_SIZE_M: Any, BLOCK_SIZE_N: Any
) -> tuple[Any, Any, Any]:
    """See :meth:`TileView.layout`."""
    return TileView(pid_m, pid_n, BLOCK_SIZE_M, BLOCK_SIZE_N).layout(M, N)


def tile_ptr(
    ptr: Any, M: Any, N: Any, stride_m: Any, stride_n: Any, pid_m: Any, pid_n: Any,
    BLOCK_SIZE_M: Any, BLOCK_SIZE_N: Any,
) -> Pointers:  # fmt: skip
    """See :meth:`TensorView.tile_ptr`."""
    tile = TileView(pid_m, pid_n, BLOCK_SIZE_M, BLOCK_SIZE_N)
    return TensorView(ptr, M, N, stride_m, stride_n).tile_ptr(tile)


def offset_ptr(ptr: Any, stride_m: Any, stride_n: Any, offset_m: Any, offset_n: Any) -> Any:
    """The address of a row and a column."""
    return ptr + offset_m * stride_m + offset_n * stride_n


class TileOperations:
    """What a context does with tiles; it has a rank, `world_size`, and accesses to peers."""

    rank: Any
    world_size: Any

    def gather(
        self: Any, tile: TileView, src_view: TensorView, source_rank: Any, hint: Any = None
    ) -> Any:
        """Load a tile of a rank."""
        source, inside = src_view.tile_ptr(tile)
        return self.load(source, source_rank, mask=inside, other=0.0)

    def all_gather(self: Any, tile: Tile, dst_view: TensorView, dim: Any) -> None:
        """Store a tile into all ranks, at this rank's rows (0) or columns (1)."""
        rows = self.rank * (dst_view.M // self.world_size) if dim == 0 else 0
        columns = 0 if dim == 0 else self.rank * (dst_view.N // self.world_size)
        target, inside = dst_view.offset_tile_ptr(tile, rows, columns)
        for peer in range(self.world_size):
            self.store(target, tile.data, peer, mask=inside)

    def all_reduce_atomic(self: Any, tile: Tile, dst_view: TensorView) -> None:
        """Add a tile to those of all ranks, by atomics of the default semantics and scope."""
        target, inside = dst_view.tile_ptr(tile)
        for peer in range(self.world_size):
            self.atomic_add(target, tile.data, peer, mask=inside)

    def all_reduce_spinlock(self: Any, tile: Tile, dst_view: TensorView, locks: Any) -> None:
        """Add a tile to those of all ranks, each under a lock."""
        target, inside = dst_view.tile_ptr(tile)
        lock = locks + _number(tile, dst_view)
        for peer in range(self.world_size):
            while self.atomic_cas(lock, 0, 1, peer, sem="acquire", scope="sys") != 0:
                pass
            total = _wide(self.load(target, peer, mask=inside)) + _wide(tile.data)
            self.store(target, total.to(tile.data.dtype), peer, mask=inside)
            self.atomic_xchg(lock, 0, peer, sem="release", scope="sys")

    def all_reduce_one_shot(
        self: Any, tile: Tile, src_view: TensorView, dst_view: TensorView, locks: Any,
        generation: Any = 1,
    ) -> None:  # fmt: skip
        """Add up a tile of all ranks, each after its flag."""
        target, inside = dst_view.tile_ptr(tile)
        flag = locks + _number(tile, dst_view)
        tl.store(target, self._sum(tile, src_view, inside, flag, generation), mask=inside)

    def all_reduce_two_shot(
        self: Any, tile: Tile, src_view: TensorView, dst_view: TensorView, locks: Any,
        generation: Any = 1,
    ) -> None:  # fmt: skip
        """The same for the tiles whose turn is this rank's, and store them into all ranks."""
        number = _number(tile, dst_view)
        if number % self.world_size != self.rank:
            return
        target, inside = dst_view.tile_ptr(tile)
        total = self._sum(tile, src_view, inside, locks + number, generation)
        tl.store(target, total, mask=inside)
        for peer in _others(self):
            self.store(target, total, peer, mask=inside)

    def all_reduce_ring(
        self: Any, tile: TileView, src_view: TensorView, dst_view: TensorView
    ) -> None:
        """Add up a tile of all ranks without flags, then copy each rank's sum over one's own."""
        source, inside = src_view.tile_ptr(tile)
        target, _ = dst_view.tile_ptr(tile)
        loaded = tl.load(source, mask=inside, other=0.0)
        total = _wide(loaded)
        for step in range(1, self.world_size):
            peer = (self.rank - step) % self.world_size
            total += _wide(self.load(source, peer, mask=inside))
        tl.store(target, total.to(loaded.dtype), mask=inside)
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            tl.store(target, self.load(target, peer, mask=inside), mask=inside)

    def all_to_all(
        self: Any, tile: TileView, src_view: TensorView, dst_view: TensorView, N_per_rank: Any
    ) -> None:
        """Load each rank's columns for this one, N_per_rank of them, into that rank's place."""
        rows, columns = tile.indices()
        for peer in range(self.world_size):
            of_peer = columns // N_per_rank == peer
            theirs = columns - (peer - self.rank) * N_per_rank
            source, inside = src_view.tile_ptr_from_indices(
                rows, theirs, tile.block_m, tile.block_n
            )
            target, wanted = dst_view.tile_ptr_from_indices(
                rows, columns, tile.block_m, tile.block_n
            )
            mask = inside & wanted & of_peer[None, :]
            tl.store(target, self.load(source, peer, mask=mask, other=0.0), mask=mask)

    def reduce_scatter(
        self: Any, tile: Tile, src_view: TensorView, dst_view: TensorView, locks: Any
    ) -> None:
        """Add up a tile of all ranks if it is one of this rank's; flags are read at gpu scope."""
        tiles = dst_view.number_of_tiles(tile.block_m, tile.block_n)
        of_rank = tiles // self.world_size
        number = _number(tile, dst_view)
        is_last = self.rank == self.world_size - 1
        if number < self.rank * of_rank or (number >= (self.rank + 1) * of_rank and not is_last):
            return
        target, inside = dst_view.tile_ptr(tile)
        total = _wide(tile.data)
        for peer in _others(self):
            while self.atomic_add(locks + number, 0, peer, sem="acquire", scope="gpu") != 1:
                pass
            total += _wide(self.load(src_view.tile_ptr(tile)[0], peer, mask=inside))
        tl.store(target, total.to(tile.data.dtype), mask=inside)

    def _sum(
        self: Any, tile: Tile, src_view: TensorView, inside: Any, flag: Any, generation: Any
    ) -> Any:
        total = _wide(tile.data)
        for peer in _others(self):
            wanted = (flag, generation, generation, peer)
            while self.atomic_cas(*wanted, sem="acquire", scope="sys") != generation:
                pass
            total += _wide(self.load(src_view.tile_ptr(tile)[0], peer, mask=inside))
        return total.to(tile.data.dtype)


def _others(context: TileOperations) -> Iterator[int]:
    return (peer for peer in range(context.world_size) if peer != context.rank)


def _number(tile: TileView, view: TensorView) -> Any:
    """The number of a tile, row by row."""
    return tile.pid_m * tl.cdiv(view.N, tile.block_n) + tile.pid_n


def _wide(values: Any) -> Any:
    """Values as they are added up: float16 as float32, others as they are."""
    return values.to(tl.float32) if values.dtype == tl.float16 else values
