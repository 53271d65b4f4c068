"""The base class of both kernels' plans, and their output, which may hold log-sum-exps, too."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Plan

Size = tuple[int, int]  # sequences, and tokens of each or, packed, of all


class AttentionPlan(Plan):
    """One launch, of a program for each block of queries of each head.

    Args:
        kernel: takes operands, the output, log-sum-exps, whether these are wanted, the scale, and
            the size.
        block_m: queries of a program.
    """

    def __init__(self, problem: Attention, fabric: Fabric, kernel: Kernel, block_m: int) -> None:
        self._problem, self._kernel, self._block_m = problem, kernel, block_m
        self._scale = problem.head_dim**-0.5
        self._no_lse = torch.empty(1, dtype=torch.float32, device=fabric.device)
        self._sized = fabric.workspace.by_size(self._of_size)

    @abstractmethod
    def _operands(self, *inputs: Any) -> tuple[Any, ...]:
        """The kernel's first arguments, for q, k, v, where sequences begin, and scales of fp8."""

    def _of_size(self, size: Size) -> Kernel:
        batch, tokens = size
        if self._problem.packed:  # each sequence may end with a part of a block
            blocks = tokens // self._block_m + batch
        else:
            blocks = batch * -(-tokens // self._block_m)
        return self._kernel.resized(blocks * self._problem.q_heads, size)

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size, self._problem.length],)

    def run(self, *tensors: Any) -> torch.Tensor:
        q, k, v, starts, scale, *scales, flat = tensors
        out, lse = split(flat, q)
        size = (q.shape[0], q.shape[1]) if starts is None else (starts.shape[0] - 1, q.shape[0])
        self._sized[size](
            *self._operands(q, k, v, starts, *scales),
            out,
            self._no_lse if lse is None else lse,
            int(lse is not None),
            self._scale if scale is None else float(scale),
        )
        return flat


def elements_with_lse(q: torch.Tensor) -> int:
    """Elements of a flat output with log-sum-exps: q's, to a multiple of 16 bytes, then float32."""
    return _padded(q.numel()) + 2 * (q.numel() // q.shape[-1])


def split(out: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention's output, and the log-sum-exps if there is room for them.

    Args:
        out: of q's shape; or flat, with :func:`elements_with_lse`.

    Returns:
        A tensor of q's shape; float32 [batch, q_heads, length], of packed sequences
        [q_heads, tokens], or None.
    """
    if out.dim() == q.dim():
        return out, None
    *lead, length, heads, _ = q.shape
    lse = out[_padded(q.numel()) :].view(torch.float32).view(*lead, heads, length)
    return out[: q.numel()].view(q.shape), lse


def _padded(elements: int) -> int:
    return -(-elements // 8) * 8
