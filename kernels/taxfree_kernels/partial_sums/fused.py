"""What the fused variants of the reductions share: their knobs, and how a launch is laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from taxfree_kernels.boxes import rows_in_boxes, weight_in_boxes
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import Pool
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options, early_options
from taxfree_kernels.partial_sums import spaces
from taxfree_kernels.partial_sums.constants import tile_constants, tiles_per_signal
from taxfree_kernels.variant import Config, Plan, Space, Variant


class FusedPlan(Plan):
    """One launch: programs that compute tiles and send them, then programs that add.

    Args:
        problem: with m, n and k of a rank's own matmul.
        function: the kernel. It takes x and the weight (see ``tile.partial_tile``), the strides of
            the weight, the call's other tensors, what `__init__` lists, and `sizes`.
        tiles: of this rank's partial sum.
        others: programs besides those that compute tiles.
        slot_elements: elements that the kernel uses in a slot of :meth:`inbox`.
        sizes: sizes that the kernel takes besides m, n and k.
        constants: those that only this kernel has.
    """

    def __init__(
        self,
        problem: Any,
        fabric: Fabric,
        config: Config,
        function: Any,
        tiles: int,
        others: int,
        slot_elements: int,
        sizes: tuple[int, ...],
        constants: Mapping[str, Any],
    ) -> None:
        split_k = config["SPLIT_K"]
        block_m, block_n, block_k = (config[f"BLOCK_{side}"] for side in "MNK")
        is_nk, self._tma = problem.weight_layout == "nk", config["TMA"]
        w_box = [1, block_n, block_k] if is_nk else [1, block_k, block_n]
        self._x_boxes = rows_in_boxes([1, 1, block_m, block_k])
        self._w_boxes = weight_in_boxes(1, w_box, is_nk)
        inbox, stride_slot = self.inbox(fabric, config, slot_elements)
        staggered = constants.get("STAGGERED", 0)
        shares = 2 * staggered + (split_k * tiles if split_k > 1 else 0)
        last_args = (
            inbox,
            stride_slot,
            fabric.pool.control,
            torch.empty(
                max(1, shares * block_m * block_n), dtype=torch.float32, device=fabric.device
            ),
            torch.zeros(tiles + Pool.CHANNELS, dtype=torch.int32, device=fabric.device),
            fabric.heap_bases,
            fabric.rank,
            problem.m,
            problem.n,
            problem.k,
            *sizes,
        )
        signals = {}
        if "SIGNALS" in config:
            signals["TILES_PER_SIGNAL"] = tiles_per_signal(tiles, config)
        self._kernel = Kernel(
            function,
            grid=tiles * split_k + staggered + others,
            constants={
                **tile_constants(problem, config),
                "WORLD": problem.world_size,
                "BACKEND": fabric.backend,
                **signals,
                **constants,
            },
            options=compile_options(fabric.backend, config) | early_options(config),
            last_args=last_args,
        )

    def inbox(self, fabric: Fabric, config: Config, elements: int) -> tuple[torch.Tensor, int]:
        """Where peers' tiles arrive: the first slot, and how far the next one is.

        Payload in the type of the wire; with `IN_DATA` in the config, flag-in-data words.
        """
        if config.get("IN_DATA"):
            return fabric.pool.flag_slots(elements)
        return fabric.pool.slots(elements, getattr(torch, config["WIRE"]))

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        x, weight, *others, out = tensors
        assert x is not None
        assert weight is not None
        assert out is not None
        x_operand: Any = x
        w_operand: Any = weight
        if self._tma:
            x_operand = self._x_boxes(x)
            w_operand = self._w_boxes(weight)
        self._kernel(
            x_operand, w_operand, *weight.stride(),
            *(out if other is None else other for other in others), out,
        )  # fmt: skip
        return out


class FusedVariant(Variant):
    """Tiles of a partial sum that are sent as they are finished."""

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if problem.world_size == 1:
            return "one rank has no peers"
        if problem.elements > 1 << 30:
            return "its elements are counted in 32 bits"
        return None

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return {
            **spaces.tile_space(problem, hardware),
            "SIGNALS": spaces.signal_counts(hardware, spaces.MOST_SIGNALS),
            "WIRE": problem.wires,
        }

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.first_configs(problem, hardware, self.space(problem, hardware))

    def refuses_config(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        return spaces.refuses(problem, hardware, config)
