"""Two launches: tiles of this rank's partial sum, and beside them the sums of all ranks' tiles.

A kernel that also adds has as much shared memory for each of its programs as a tile needs, so its
adders start when tiles have ended. Here they are programs of a kernel of their own, with registers
and no shared memory, for which a compute unit has room beside the programs of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.fused import FusedReductionPlan, FusedReductionVariant, Layout
from taxfree_kernels.variant import Config, PartialSum, Space, resized

_TILE_WARPS, _SUM_WARPS = 8, 4  # of a compute unit
#: registers of a thread that leave room for a sum's program beside those warps of tiles
_TILE_REGISTERS, _SUM_REGISTERS = 216, 80


class TwoKernelPlan(FusedReductionPlan):
    """A kernel whose programs compute tiles one after another, and one whose programs add.

    On NVIDIA the second is launched once all programs of the first have begun: they are as many as
    fit at once. It waits for tiles by their signals, and its last program for the end of the first.

    Args:
        tiles: the first kernel. It takes x, the weight and its strides, then what a fused kernel
            takes behind the output; see :class:`FusedReductionPlan`.
        sums: the second kernel, which takes the addends and the output first.
        constants: of both; `sum_constants` of the second alone.
    """

    launches = 2

    def __init__(
        self,
        problem: PartialSum,
        fabric: Fabric,
        config: Config,
        tiles: Any,
        sums: Any,
        layout: Callable[[Any], Layout],
        constants: Mapping[str, Any],
        sum_constants: Mapping[str, Any],
    ) -> None:
        super().__init__(problem, fabric, config, tiles, layout, constants)
        hardware = fabric.hardware
        self._at_once = _programs_at_once(hardware, config) * hardware.compute_units
        common, constants = self._kernel.options, {**self._kernel.constants, **sum_constants}
        few_warps = {"num_warps": _SUM_WARPS} if "num_warps" in common else {}
        of_tiles, of_sums = (
            {"maxnreg": registers} if fabric.backend == "cuda" else {}
            for registers in (_TILE_REGISTERS, _SUM_REGISTERS)
        )
        self._kernel = replace(self._kernel, options={**common, **of_tiles})
        self._sums = Kernel(sums, 0, constants, {**common, **few_warps, **of_sums}, beside=True)

    def _of_size(self, m: int) -> tuple[Kernel, ...]:
        problem = resized(self._problem, m=m)
        layout = self._layout(problem)
        last_args = (self._buffers(), self._rank, m, problem.n, problem.k, *layout.sizes)
        tiles = self._kernel.resized(min(layout.tiles, self._at_once), last_args)
        return tiles, self._sums.resized(layout.others, last_args)

    def run(self, *tensors: Any) -> torch.Tensor:
        x, weight, *others, out = tensors
        tiles, sums = self._sized[x.shape[0]]
        tiles(*self._operands(x, weight), weight.stride())
        sums(*self._epilogue(others, out), out)
        return out


class TwoKernelVariant(FusedReductionVariant):
    """A variant of two kernels, in place of one with a single kernel; to be mixed in."""

    searched = False  # until it is measured on several GPUs

    def unsupported_reason(self, problem: PartialSum, hardware: Hardware) -> str | None:
        if problem.is_fp8:
            return "its tiles multiply 16-bit factors"
        if hardware.backend == "cuda" and True not in spaces.ways_to_load(problem, hardware):
            return "tiles without TMA leave no registers for the second kernel"
        return super().unsupported_reason(problem, hardware)

    def space(self, problem: PartialSum, hardware: Hardware) -> Space:
        return spaces.two_kernel_space(super().space(problem, hardware))

    def seed_configs(self, problem: PartialSum, hardware: Hardware) -> list[dict[str, Any]]:
        configs = spaces.two_kernel_seeds(problem, hardware, self.space(problem, hardware))
        return [
            config for config in configs if self.illegal_reason(problem, hardware, config) is None
        ]

    def illegal_reason(self, problem: PartialSum, hardware: Hardware, config: Config) -> str | None:
        reason = spaces.piece_illegal_reason(problem, hardware, config)
        return reason or super().illegal_reason(problem, hardware, config)


def _programs_at_once(hardware: Hardware, config: Config) -> int:
    """Tile programs that fit on a compute unit, by their warps and their shared memory."""
    if hardware.backend != "cuda":
        return 1
    box = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * 2
    by_shared = hardware.shared_memory // (config["num_stages"] * box)
    return max(1, min(_TILE_WARPS // config["num_warps"], by_shared))
