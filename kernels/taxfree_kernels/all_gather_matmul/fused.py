"""Shared by the fused variants: a plan of one launch, and the meta-parameters of its tiles."""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.constants import Gather
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.tile import GatherMemory
from taxfree_kernels.device.peers import Group
from taxfree_kernels.device.tiles import Tile
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options, pdl_options
from taxfree_kernels.variant import Config, Plan, Space, Variant, resized


class FusedGatherVariant(Variant):
    """A variant that computes tiles with ``gathered_tile``."""

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        return spaces.unsupported_reason(problem)

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        return {**spaces.tile_space(problem, hardware), **spaces.send_space(problem, hardware)}

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.seed_configs(problem, hardware, self.space(problem, hardware))

    def illegal_reason(
        self, problem: AllGatherMatmul, hardware: Hardware, config: Config
    ) -> str | None:
        return spaces.illegal_reason(problem, hardware, config)


class FusedGatherPlan(Plan):
    """One launch whose last programs compute tiles.

    Args:
        function: the kernel; its arguments are those of ``_push``, except the weight's.
        senders: number of programs before the tiles', if it is the same for all sizes.
    """

    def __init__(
        self,
        problem: AllGatherMatmul,
        fabric: Fabric,
        config: Config,
        function: Any,
        senders: int = 0,
    ) -> None:
        self._problem, self._config, self._rank = problem, config, fabric.rank
        self._senders, split_k = senders, config["SPLIT_K"]
        partials = split_k * problem.m * problem.n if split_k > 1 else 1
        self._partials = fabric.workspace.scratch(((partials,), torch.float32))
        counters = self._tiles(problem) + config.get("XCD_SIGNALS", 0)
        self._counters = fabric.workspace.counters(counters)
        slots = fabric.pool.slots(problem.gathered_elements, getattr(torch, problem.dtype))
        self._memory = GatherMemory(*slots, fabric.pool.control, None, None, fabric.heap_bases)
        self._kernel = Kernel(
            function,
            grid=0,
            constants={
                "GROUP": Group(problem.world_size, fabric.backend),
                "TILE": Tile.of(config, problem.shard_columns, problem.weight_layout),
            },
            options=compile_options(fabric.backend, config) | pdl_options(config),
        )
        self._sized = fabric.workspace.by_size(self._of_size)

    def _gather(self, problem: AllGatherMatmul) -> Gather:
        """The kernel's GATHER constants for a size."""
        return Gather.of(problem, self._config, SENDERS=self._senders)

    def _tiles(self, problem: AllGatherMatmul) -> int:
        block_m, block_n = self._config["BLOCK_M"], self._config["BLOCK_N"]
        return int(-(-problem.m // block_m) * -(-problem.n // block_n))

    def _of_size(self, m: int) -> tuple[Kernel, int, Any]:
        """The kernel for m rows, this rank's number of rows, and :meth:`_layout`."""
        problem = resized(self._problem, m=m)
        gather, (partials,) = self._gather(problem), self._partials()
        memory = self._memory._replace(partials_ptr=partials, counters_ptr=self._counters())
        shape = (m, problem.n, problem.k, problem.shard_rows, problem.shard_columns)
        grid = gather.SENDERS + self._tiles(problem) * self._config["SPLIT_K"]
        kernel = self._kernel.resized(grid, (memory, self._rank, *shape), GATHER=gather)
        return kernel, problem.rows_of(self._rank), self._layout(problem)

    def _layout(self, problem: AllGatherMatmul) -> Any:
        """Values for :meth:`_operands` that depend on the size."""

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size][0],)

    def run(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        kernel, own_rows, layout = self._sized[out.shape[0]]
        output = (out if bias is None else bias, out)
        kernel(a, own_rows, *self._operands(a, weight, output, layout))
        return out

    def _operands(
        self, a: torch.Tensor, weight: torch.Tensor, output: tuple[torch.Tensor, ...], layout: Any
    ) -> tuple[Any, ...]:
        """The kernel's arguments for the operands and the output of tiles."""
        return weight, weight.stride(), *output
