"""The vendor's library: what the library paths of all operations compute with."""

from __future__ import annotations

import torch


def matmul_into(
    out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """out [m, n] = a [m, k] @ weight [k, n] (+ bias [n]); returns it."""
    if bias is None:
        return torch.mm(a, weight, out=out)
    return torch.addmm(bias, a, weight, out=out)
