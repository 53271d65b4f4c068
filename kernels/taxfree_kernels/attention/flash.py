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
from taxfree_kernels.attention.plans import AttentionPlan
from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import HeadDescriptors, Kernel, compile_options
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Variant

_NO_STRIDES = (0, 0, 0)  # descriptors have them


class FlashPlan(AttentionPlan):
    """One launch."""

    def __init__(self, problem: Attention, fabric: Fabric, config: Config) -> None:
        block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
        constants = {
            "HEADS": Heads(
                problem.q_heads,
                problem.kv_heads,
                problem.head_dim,
                problem.causal,
                power_of_2(problem.batch, 1) if problem.packed else 0,
                problem.kv_scales,
            ),
            "BLOCKS": Blocks(
                block_m, block_n, config["TMA"], config["MAPPING"], config.get("XCDS", 1)
            ),
        }
        options = compile_options(fabric.backend, config)
        super().__init__(problem, fabric, Kernel(attend, 0, constants, options), block_m)
        self._no_starts = torch.empty(1, dtype=torch.int32, device=fabric.device)
        box = power_of_2(problem.head_dim, 16)
        rows = (block_m, block_n, block_n) if config["TMA"] else ()
        self._descriptors = [HeadDescriptors([1, 1, row, box]) for row in rows]

    def _operands(self, *inputs: Any) -> tuple[Any, ...]:
        q, k, v, starts, *scales = inputs
        if starts is None:
            starts = self._no_starts
        else:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        last = (starts, *scales) if scales else starts
        if not self._descriptors:
            return (q, k, v, q.stride()[:3], k.stride()[:3], v.stride()[:3], last)
        pairs = zip(self._descriptors, (q, k, v), strict=True)
        return (*[describe(operand) for describe, operand in pairs], *[_NO_STRIDES] * 3, last)


class Flash(Variant):
    """FlashAttention-2 with a tuned order of programs."""

    plan_class = FlashPlan
    slots = 1
    space = staticmethod(spaces.space)
    seed_configs = staticmethod(spaces.seed_configs)
    illegal_reason = staticmethod(spaces.illegal_reason)


VARIANT = Flash()
