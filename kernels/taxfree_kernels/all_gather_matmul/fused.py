"""Shared by the fused variants: a plan of one launch, and the meta-parameters of its tiles."""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.device.peers import Group
from taxfree_kernels.device.tiles import Tile
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options, pdl_options
from taxfree_kernels.variant import Config, Plan, Space, Variant, resized

_META_PARAMETERS = ("CHUNKS", "SEND_BLOCK", "SOURCES_PER_WAIT")


class FusedVariant(Variant):
    """A variant whose tiles are computed by ``gathered_tile``."""

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        if problem.world_size == 1:
            return "one rank has no peers"
        if problem.gathered_elements > 1 << 30:
            return "its elements are counted in 32 bits"
        return None

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        return {**spaces.tile_space(problem, hardware), **spaces.send_space(problem, hardware)}

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.seed_configs(problem, hardware, self.space(problem, hardware))

    def prune_reason(
        self, problem: AllGatherMatmul, hardware: Hardware, config: Config
    ) -> str | None:
        return spaces.prune_reason(problem, hardware, config)


class FusedPlan(Plan):
    """One launch whose last programs compute tiles.

    Args:
        function: the kernel; takes the arguments of ``_push``, possibly with other first operands.
        first_programs: programs of the launch before those of tiles.
        constants: those of this kernel, besides those common to all.
    """

    def __init__(
        self,
        problem: AllGatherMatmul,
        fabric: Fabric,
        config: Config,
        function: Any,
        first_programs: int,
        constants: Config,
    ) -> None:
        self._problem, self._config, self._rank = problem, config, fabric.rank
        self._first_programs = first_programs
        split_k, tiles = config["SPLIT_K"], self._tiles(problem)
        partials = split_k * problem.m * problem.n if split_k > 1 else 1
        self._inbox = fabric.pool.slots(problem.gathered_elements, getattr(torch, problem.dtype))
        self._partials = fabric.workspace.scratch(((partials,), torch.float32))
        self._counters = fabric.workspace.counters(tiles)
        self._control, self._heap_bases = fabric.pool.control, fabric.heap_bases
        self._kernel = Kernel(
            function,
            grid=0,
            constants={knob: config[knob] for knob in _META_PARAMETERS}
            | {
                "GROUP": Group(problem.world_size, fabric.backend),
                "TILE": Tile.of(config, problem.shard_columns, problem.weight_layout),
                "GATHER_DIM": problem.gather_dim,
                "HAS_BIAS": problem.bias,
            }
            | dict(constants),
            options=compile_options(fabric.backend, config) | pdl_options(config),
        )
        self._sized = fabric.workspace.by_size(self._of_size)

    def _varying(self, problem: AllGatherMatmul) -> tuple[int, dict[str, Any]]:
        """Programs before those of tiles, and constants, where they depend on the size."""
        return self._first_programs, {}

    def _tiles(self, problem: AllGatherMatmul) -> int:
        block_m, block_n = self._config["BLOCK_M"], self._config["BLOCK_N"]
        return int(-(-problem.m // block_m) * -(-problem.n // block_n))

    def _of_size(self, m: int) -> tuple[Kernel, int, Any]:
        """The kernel for m rows, how many of them this rank has, and :meth:`_boxes`."""
        problem = resized(self._problem, m=m)
        first_programs, constants = self._varying(problem)
        grid = first_programs + self._tiles(problem) * self._config["SPLIT_K"]
        last_args = (
            *self._inbox, self._control, *self._partials(), self._counters(), self._heap_bases,
            self._rank, m, problem.n, problem.k, problem.shard_rows, problem.shard_columns,
        )  # fmt: skip
        kernel = self._kernel.resized(grid, last_args, **constants)
        return kernel, problem.rows_of(self._rank), self._boxes(problem)

    def _boxes(self, problem: AllGatherMatmul) -> Any:
        """What operands need to know of the size."""

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size][0],)

    def __call__(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        kernel, own_rows, boxes = self._sized[out.shape[0]]
        operands = self._operands(a, weight, boxes)
        kernel(a, own_rows, *operands, out if bias is None else bias, out)
        return out

    def _operands(self, a: torch.Tensor, weight: torch.Tensor, boxes: Any) -> tuple[Any, ...]:
        """How the kernel is given what tiles read."""
        return weight, *weight.stride()
