"""Shared by the fused variants of the reductions: meta-parameters, and the layout of a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from taxfree_kernels.device.peers import Group
from taxfree_kernels.device.tiles import Tile
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import Pool
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import (
    Kernel,
    OperandDescriptors,
    RowDescriptors,
    compile_options,
    pdl_options,
    weight_descriptors,
)
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.tile import EpilogueTensors, ReductionMemory
from taxfree_kernels.variant import Config, PartialSum, Plan, Space, Variant, resized


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
        function: the kernel. It takes x and the weight (see ``tile.partial_tile``), the strides of
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
        self._counters = fabric.workspace.counters(top.tiles + Pool.CHANNELS)
        self._heap_bases, self._rank = fabric.heap_bases, fabric.rank
        self._kernel = Kernel(
            function,
            grid=0,
            constants={
                "TILE": Tile.of(config, problem.k, problem.weight_layout),
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
        return fabric.pool.slots(elements, getattr(torch, config["WIRE"]))

    def _of_size(self, m: int) -> tuple[Kernel, ...]:
        problem = resized(self._problem, m=m)
        layout = self._layout(problem)
        sizes = (m, problem.n, problem.k, *layout.sizes)
        grid = layout.tiles * self._split_k + self._staggered + layout.others
        return (self._kernel.resized(grid, (self._buffers(), self._rank, *sizes)),)

    def _buffers(self) -> ReductionMemory:
        return ReductionMemory(
            *self._inbox, self._control, self._partials()[0], self._counters(), self._heap_bases
        )

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return self._sized[size]

    def run(self, *tensors: Any) -> torch.Tensor:
        x, weight, *others, out = tensors
        (kernel,) = self._sized[x.shape[0]]
        kernel(*self._operands(x, weight), weight.stride(), *self._epilogue(others, out), out)
        return out

    def _operands(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, Any]:
        """The kernel's arguments for x and the weight."""
        if self._tma:
            return self._x_descriptors(x), self._w_descriptors(weight)
        return x, weight

    def _epilogue(
        self, given: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The kernel's argument for the addends of the sum, if the operation has any."""
        tensors = [out if each is None else each for each in given]
        return (EpilogueTensors(*tensors),) if tensors else ()


class FusedReductionVariant(Variant):
    """A variant that sends each tile of a partial sum as soon as it is finished."""

    def unsupported_reason(self, problem: PartialSum, hardware: Hardware) -> str | None:
        if problem.world_size == 1:
            return "one rank has no peers"
        if problem.elements > 1 << 30:
            return "its elements are counted in 32 bits"
        return None

    def space(self, problem: PartialSum, hardware: Hardware) -> Space:
        return {
            **spaces.tile_space(problem, hardware),
            "SIGNALS": spaces.signal_counts(hardware, spaces.MOST_SIGNALS),
            "WIRE": problem.wires,
        }

    def seed_configs(self, problem: PartialSum, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.seed_configs(problem, hardware, self.space(problem, hardware))

    def illegal_reason(self, problem: PartialSum, hardware: Hardware, config: Config) -> str | None:
        return spaces.illegal_reason(problem, hardware, config)
