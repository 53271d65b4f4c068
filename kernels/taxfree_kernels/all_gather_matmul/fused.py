"""What the fused variants share on the host: a plan of one launch, and the knobs of its tiles."""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options, early_options
from taxfree_kernels.variant import Config, Plan, Space, Variant

_KNOBS = (
    "CHUNKS", "SEND_BLOCK", "SOURCES_PER_WAIT", "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M",
    "SPLIT_K", "SWAP_AB",
)  # fmt: skip


class FusedVariant(Variant):
    """A variant whose tiles are computed by ``gathered_tile``."""

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if problem.world_size == 1:
            return "one rank has no peers"
        if problem.gathered_elements > 1 << 30:
            return "its elements are counted in 32 bits"
        return None

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return {**spaces.tile_space(problem, hardware), **spaces.send_space(problem, hardware)}

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.first_configs(problem, hardware, self.space(problem, hardware))

    def refuses_config(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        return spaces.refuses(problem, hardware, config)


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
        dtype = getattr(torch, problem.dtype)
        split_k = config["SPLIT_K"]
        tiles = -(-problem.m // config["BLOCK_M"]) * -(-problem.n // config["BLOCK_N"])
        partials = split_k * problem.m * problem.n if split_k > 1 else 1
        self._inbox = fabric.pool.slots(problem.gathered_elements, dtype)
        self._own_rows = problem.rows_of(fabric.rank)
        last_args = (
            *self._inbox,
            fabric.pool.control,
            torch.empty(partials, dtype=torch.float32, device=fabric.device),
            torch.zeros(tiles, dtype=torch.int32, device=fabric.device),
            fabric.heap_bases,
            fabric.rank,
            problem.m,
            problem.n,
            problem.k,
            problem.shard_rows,
            problem.shard_columns,
        )
        self._kernel = Kernel(
            function,
            grid=first_programs + tiles * split_k,
            constants={knob: config[knob] for knob in _KNOBS}
            | {
                "WORLD": problem.world_size,
                "BACKEND": fabric.backend,
                "GATHER_DIM": problem.gather_dim,
                "HAS_BIAS": problem.bias,
            }
            | dict(constants),
            options=compile_options(fabric.backend, config) | early_options(config),
            last_args=last_args,
        )

    def __call__(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        self._kernel(
            a, self._own_rows, *self._operands(a, weight), out if bias is None else bias, out,
        )  # fmt: skip
        return out

    def _operands(self, a: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
        """How the kernel is given what tiles read."""
        return weight, *weight.stride()


def pointer_constants(problem: AllGatherMatmul, config: Config) -> dict[str, Any]:
    """Constants of tiles that are loaded through pointers, on any device."""
    even_k = problem.shard_columns % config["BLOCK_K"] == 0
    return {"XCDS": config.get("XCDS", 1), "EVEN_K": even_k}
