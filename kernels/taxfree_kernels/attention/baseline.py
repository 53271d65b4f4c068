"""torch's own attention: flash attention, of packed sequences in its form for variable lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from taxfree_kernels.attention.plans import split
from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import dequantised_cache
from taxfree_kernels.launch import is_compiling
from taxfree_kernels.variant import Config, Plan, Variant


def library(
    problem: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """[batch, length, q_heads, head_dim], by whatever kernel torch prefers."""
    q, k, v = (operand.transpose(1, 2) for operand in (q, k, v))
    shares = problem.q_heads != problem.kv_heads
    output: torch.Tensor = scaled_dot_product_attention(
        q, k, v, is_causal=problem.causal, scale=scale, enable_gqa=shares
    )
    return output.transpose(1, 2)


class BaselinePlan(Plan):
    """A call of torch, and a copy of its result into the output; of fp8, first in 16 bits."""

    def __init__(self, problem: Attention, fabric: Fabric, config: Config) -> None:
        self._problem, self._on_host = problem, fabric.device.type == "cpu"
        self.launches = 2 + 2 * (problem.kv_scales != "none")

    def run(self, *tensors: Any) -> torch.Tensor:
        q, k, v, starts, scale, *scales, flat = tensors
        if is_compiling():
            return flat
        if scales:  # torch has no attention to fp8
            k, v = (dequantised_cache(*each, q.dtype) for each in zip((k, v), scales, strict=True))
        out, lse = split(flat, q)
        factor = None if scale is None else float(scale)
        if starts is None:
            if lse is None:
                out.copy_(library(self._problem, q, k, v, factor))
                return flat
            result = self._with_lse(q, k, v, scale=factor)
            out.copy_(result[0].transpose(1, 2))
            lse.copy_(result[1])
        elif self._on_host:
            self._one_by_one((q, k, v), starts.tolist(), factor, out, lse)
        else:
            result = self._packed(q, k, v, starts, scale=factor)
            out.copy_(result[0])
            if lse is not None:
                lse.copy_(result[1])
        return flat

    def _with_lse(self, *qkv: torch.Tensor, scale: float | None) -> Any:
        """Output [batch, q_heads, length, head_dim], log-sum-exps [batch, q_heads, length]."""
        operands = [operand.transpose(1, 2) for operand in qkv]
        aten, causal = torch.ops.aten, self._problem.causal
        if self._on_host:
            flash = aten._scaled_dot_product_flash_attention_for_cpu
        else:
            flash = aten._scaled_dot_product_flash_attention
        return flash(*operands, 0.0, causal, scale=scale)

    def _packed(self, *operands: torch.Tensor, scale: float | None) -> Any:
        """Output [length, q_heads, head_dim], log-sum-exps [q_heads, length]."""
        *qkv, starts = operands
        most = len(qkv[0])  # a sequence cannot be longer; lengths are not known on the host
        return torch.ops.aten._flash_attention_forward(
            *qkv, starts, starts, most, most, 0.0, self._problem.causal, False, scale=scale
        )

    def _one_by_one(
        self,
        qkv: tuple[torch.Tensor, ...],
        starts: list[int],
        scale: float | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        for begin, end in pairwise(starts):
            if begin < end:
                result = self._with_lse(*(operand[None, begin:end] for operand in qkv), scale=scale)
                out[begin:end] = result[0][0].transpose(0, 1)
                if lse is not None:
                    lse[:, begin:end] = result[1][0]


class Baseline(Variant):
    """The library."""

    plan_class = BaselinePlan
    fused = False
    is_library = True


VARIANT = Baseline()
