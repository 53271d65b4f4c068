"""One kernel: FlashAttention-2's forward pass, in the order of programs that caches like best.

The kernel is in :mod:`taxfree_kernels.attention.attend`. Each program computes a block of queries
of one head, and reads the keys and values of that head: what programs that run at the same time on
one L2 share depends on their order alone (`MAPPING`), which on devices of several chiplets is the
difference between reading keys once and reading them once for each chiplet.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.attention import spaces
from taxfree_kernels.attention.attend import Blocks, Heads, attend
from taxfree_kernels.attention.output import split
from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.descriptors import HeadDescriptors
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Plan, Space, Variant

_NO_STRIDES = (0, 0, 0)  # descriptors have them

Size = tuple[int, int]  # sequences, and tokens of each or, packed, of all


class FlashPlan(Plan):
    """One launch."""

    def __init__(self, problem: Attention, fabric: Fabric, config: Config) -> None:
        self._problem, self._block_m = problem, config["BLOCK_M"]
        self._scale = problem.head_dim**-0.5
        self._no_lse = torch.empty(1, dtype=torch.float32, device=fabric.device)
        self._no_starts = torch.empty(1, dtype=torch.int32, device=fabric.device)
        box = power_of_2(problem.head_dim, 16)
        self._descriptors = None
        if config["TMA"]:
            rows = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_N"]
            self._descriptors = [HeadDescriptors([1, 1, each, box]) for each in rows]
        self._kernel = Kernel(
            attend,
            grid=0,  # depends on the size
            constants={
                "HEADS": Heads(
                    problem.q_heads,
                    problem.kv_heads,
                    problem.head_dim,
                    problem.causal,
                    power_of_2(problem.batch, 1) if problem.packed else 0,
                ),
                "BLOCKS": Blocks(
                    config["BLOCK_M"],
                    config["BLOCK_N"],
                    config["TMA"],
                    config["MAPPING"],
                    config.get("XCDS", 1),
                ),
            },
            options=compile_options(fabric.backend, config),
        )
        self._sized = fabric.workspace.by_size(self._of_size)

    def _of_size(self, size: Size) -> Kernel:
        batch, tokens = size
        if self._problem.packed:  # each sequence may end with a part of a block
            blocks = tokens // self._block_m + batch
        else:
            blocks = batch * -(-tokens // self._block_m)
        return self._kernel.resized(blocks * self._problem.q_heads, size)

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size, self._problem.length],)

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        q, k, v, starts, scale, flat = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        assert flat is not None
        out, lse = split(flat, q)
        size = (q.shape[0], q.shape[1]) if starts is None else (starts.shape[0] - 1, q.shape[0])
        self._sized[size](
            *self._operands(q, k, v),
            out,
            self._no_lse if lse is None else lse,
            int(lse is not None),
            self._scale if scale is None else float(scale),
            self._no_starts if starts is None else starts,
        )
        return flat

    def _operands(self, *operands: torch.Tensor) -> tuple[Any, ...]:
        """q, k and v as the kernel takes them, then their strides."""
        if self._problem.packed:
            operands = tuple([each.unsqueeze(0) for each in operands])
        if self._descriptors is None:
            return (*operands, *[each.stride()[:3] for each in operands])
        pairs = zip(self._descriptors, operands, strict=True)
        return (*[describe(each) for describe, each in pairs], *[_NO_STRIDES] * 3)


class Flash(Variant):
    """FlashAttention-2 with a tuned order of programs."""

    name = "flash"
    slots = 1

    def space(self, problem: Attention, hardware: Hardware) -> Space:
        return spaces.space(problem, hardware)

    def seed_configs(self, problem: Attention, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.seed_configs(problem, hardware)

    def prune_reason(self, problem: Attention, hardware: Hardware, config: Config) -> str | None:
        return spaces.prune_reason(problem, hardware, config)

    def plan(self, problem: Attention, fabric: Fabric, config: Config) -> Plan:
        return FlashPlan(problem, fabric, config)


VARIANT = Flash()
