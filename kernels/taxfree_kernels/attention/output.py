"""The output of a call: attention's, or one tensor that holds log-sum-exps, too."""

from __future__ import annotations

import torch


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
