"""Steps as launches: in each, inner tiles while halos travel, then tiles at sides that are shared.

The library's path and the copies differ in how halos travel. Both run the tiles of ``persistent``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.stencil import step
from taxfree_kernels.stencil.norms import sum_of_tiles
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Config, Plan, resized


@triton.jit(do_not_specialize=["rank", "rows"])
def _first_edges(u_ptr, edges_ptr, rank, rows, BOX: tl.constexpr):
    """Copy what other ranks need for the first step."""
    tile = step.tile_at(tl.program_id(0), False, rows, BOX)
    for number in range(step.blocks_of(tile, rows, BOX)):
        block = step.block_of(tile, number, rows, BOX)
        values = step.loaded(u_ptr, block, rows, BOX)
        _store_edges(values, edges_ptr, block, rank, rows, BOX)


@triton.jit(do_not_specialize=["norm", "tiles", "first", "rank", "rows"])
def _step(
    source_ptr, target_ptr, halo_ptr, edges_ptr, squares_ptr, norm,  # of a step
    tiles, first, pool, rank, rows,  # of the size and the fabric
    GROUP: tl.constexpr, BOX: tl.constexpr, HAS_NORM: tl.constexpr, BESIDE: tl.constexpr,
    AWAITS: tl.constexpr,
):  # fmt: skip
    """A step of the tiles from place `first` on, a program for each.

    Args:
        pool: pointers to its control words and to the bases of heaps; None if no kernel awaits.
        BESIDE: the tiles are at shared sides.
        AWAITS: wait for the neighbours' signals, and leave the generation.
    """
    program = tl.program_id(0)
    tile = step.tile_at(first + program, False, rows, BOX)
    arrived = program >= 0
    if AWAITS:
        peers = Peers(pool[0], pool[1], rank, sync.running_generation(pool[0]))
        for SIDE in tl.static_range(step.SIDES):
            if step.is_shared(SIDE, BOX):
                other = step.rank_at(rank, SIDE, BOX)
                if other >= 0:
                    arrived = sync.wait(peers, 0, other, GROUP) & arrived
    squares = tl.zeros((1,), tl.float64)
    for number in range(step.blocks_of(tile, rows, BOX)):
        block = step.block_of(tile, number, rows, BOX)
        faces = None
        if BESIDE:
            faces = [
                _received(halo_ptr, block, rank, rows, SIDE, BOX)
                for SIDE in (step.ABOVE, step.BELOW, step.BEFORE, step.AFTER)
            ]
        last, values = step.relaxed(source_ptr, block, rows, rank, faces, BOX)
        values = tl.where(arrived, values, float("nan"))
        tl.store(target_ptr + step.offsets(block, BOX), values, mask=step.inside(block, rows, BOX))
        if BESIDE:
            _store_edges(values, edges_ptr, block, rank, rows, BOX)
        if HAS_NORM:
            squares += step.squared_change(last, values, step.inside(block, rows, BOX))
    if HAS_NORM:
        tl.store(squares_ptr + norm * tiles + tile + tl.arange(0, 1), squares)
    if AWAITS:
        sync.leave(pool[0])


@triton.jit
def _received(halo_ptr, block, rank, rows, SIDE: tl.constexpr, BOX: tl.constexpr):
    """A block's neighbours at a side that another rank has."""
    at, has = step.halo_offsets(block, rows, SIDE, BOX)
    values = tl.zeros(at.shape, tl.float32)
    if step.is_shared(SIDE, BOX):
        if (step.rank_at(rank, SIDE, BOX) >= 0) & step.reaches(block, rows, SIDE, BOX):
            values = tl.load(halo_ptr + at, mask=has, other=0.0)
    return values


@triton.jit
def _store_edges(values, edges_ptr, block, rank, rows, BOX: tl.constexpr):
    """Store the points of a block that other ranks need, each side where a halo has it."""
    for SIDE in tl.static_range(step.SIDES):
        if step.is_shared(SIDE, BOX):
            if (step.rank_at(rank, SIDE, BOX) >= 0) & step.reaches(block, rows, SIDE, BOX):
                at, has = step.halo_offsets(block, rows, SIDE, BOX)
                at += tl.zeros(values.shape, tl.int32)
                tl.store(edges_ptr + at, values, mask=step.at_side(block, rows, SIDE, BOX) & has)


@triton.jit(do_not_specialize=["tiles"])
def add_squares(squares_ptr, sums_ptr, tiles):
    """Add the squares of this rank's tiles, a program for each norm."""
    norm = tl.program_id(0)
    tl.store(sums_ptr + norm, sum_of_tiles(squares_ptr + norm * tiles, tiles))


@dataclass(frozen=True)
class Side:
    """A side that a rank shares: the rank there, and where halos have it and its opposite."""

    rank: int
    points: slice
    opposite: slice


def shared_sides(problem: Stencil, rank: int) -> list[Side]:
    """The sides of a rank's part that it shares, as :func:`.step.rank_at` and halos have them."""
    row, column = divmod(rank, problem.across)
    of_row, of_column = problem.halo
    exists = (row > 0, row < problem.down - 1, column > 0, column < problem.across - 1)
    ranks = (rank - problem.across, rank + problem.across, rank - 1, rank + 1)
    ends = accumulate((of_row, of_row, of_column, of_column), initial=0)
    points = [slice(*pair) for pair in pairwise(ends)]
    return [Side(ranks[side], points[side], points[side ^ 1]) for side in range(4) if exists[side]]


@dataclass(frozen=True)
class Launches:
    """What calls of a size launch; each by whether a step has a norm.

    Args:
        sides: that are shared.
        tiles: of the part.
        first_edges, of_sides, of_inner: kernels; of no tiles where they have nothing to do.
        other: the part of every second step.
        edges: float32 [2, ..], this rank's, as a halo.
        halo: float32 [..], where the library receives.
        squares: float64 [norms * tiles].
        sums: float64 [norms].
    """

    sides: list[Side]
    tiles: int
    first_edges: Kernel
    of_sides: dict[bool, Kernel]
    of_inner: dict[bool, Kernel]
    other: torch.Tensor
    edges: torch.Tensor
    halo: torch.Tensor
    squares: torch.Tensor
    sums: torch.Tensor


class LaunchesPlan(Plan):
    """Two launches for each step, and what lets halos travel.

    Args:
        pool: control words and bases of heaps, by which kernels of the sides wait for signals. None
            if they do not; several nodes have no heap.
    """

    def __init__(
        self, problem: Stencil, fabric: Fabric, config: Config, pool: tuple[Any, Any] | None
    ) -> None:
        self._problem, self._fabric, self._pool = problem, fabric, pool
        self._box = step.box(problem, config)
        points = max(1, 2 * sum(problem.halo))
        self._scratch = fabric.workspace.scratch(
            ((problem.elements,), torch.float32),
            ((2, points), torch.float32),
            ((points,), torch.float32),
            ((problem.norms * step.counts(problem, self._box)[1],), torch.float64),
            ((problem.norms,), torch.float64),
        )
        constants: dict[str, Any] = {"BOX": self._box}
        options = compile_options(fabric.backend, config)
        self._first_edges = Kernel(_first_edges, 0, constants, options)
        constants |= {"GROUP": Group(problem.world_size, fabric.backend)}
        self._step = Kernel(_step, 0, constants, options)
        self._sized = fabric.workspace.by_size(self._of_size)

    def _of_size(self, rows: int) -> Launches:
        """Of so many rows of the whole domain."""
        problem, fabric = resized(self._problem, rows=rows), self._fabric
        shared, tiles = step.counts(problem, self._box)
        ends = (self._pool, fabric.rank, problem.own_rows)

        def steps_of(first: int, count: int, **constants: bool) -> dict[bool, Kernel]:
            last = (tiles, first, *ends)
            return {
                norm: self._step.resized(count, last, HAS_NORM=norm, **constants)
                for norm in (False, True)
            }

        return Launches(
            shared_sides(problem, fabric.rank),
            tiles,
            self._first_edges.resized(shared, ends[1:]),
            steps_of(0, shared, BESIDE=True, AWAITS=self._pool is not None),
            steps_of(shared, tiles - shared, BESIDE=False, AWAITS=False),
            *self._scratch(),
        )

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        calls = self._sized[size]
        norms = (False, True) if self._problem.norms else (False,)
        found = [calls.first_edges]
        found += [kernels[norm] for kernels in (calls.of_sides, calls.of_inner) for norm in norms]
        return tuple(kernel for kernel in found if kernel.grid)

    def run(self, u: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        problem = self._problem
        calls = self._sized[u.shape[0] * problem.down]
        self._begin()
        if calls.first_edges.grid:
            calls.first_edges(u, calls.edges[0])
        for number, (source, target) in step.steps_of(problem, u, out, calls.other):
            has_norm = problem.norms > 0 and number % problem.norm_every == 0
            norm = number // problem.norm_every - 1 if has_norm else 0
            halo = self._exchange(calls, (number - 1) % 2)
            rest = (source, target, halo, calls.edges[number % 2], calls.squares, norm)
            if calls.of_inner[has_norm].grid:
                calls.of_inner[has_norm](*rest)
            self._join()
            if calls.of_sides[has_norm].grid:
                calls.of_sides[has_norm](*rest)
        self._finish(calls, out)
        return out

    def _begin(self) -> None:
        """Before the first step."""

    @abstractmethod
    def _exchange(self, calls: Launches, parity: int) -> torch.Tensor:
        """Let edges of steps of a parity travel, and return the halo that they will have made."""

    @abstractmethod
    def _join(self) -> None:
        """Let what follows wait for the halo."""

    @abstractmethod
    def _finish(self, calls: Launches, out: torch.Tensor) -> None:
        """Behind the last step: the norms."""
