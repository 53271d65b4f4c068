"""How users call a stencil."""

from __future__ import annotations

import torch

from taxfree_kernels.arguments import aligned, by_row, require
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.signature import Signature
from taxfree_kernels.stencil.problem import Stencil


def _problem(fabric: Fabric, u: torch.Tensor, steps: int, norm_every: int, across: int) -> Stencil:
    """See :meth:`taxfree.Runtime.stencil`."""
    require(u.dim() in (2, 3), f"u is {list(u.shape)}, must be [rows, columns] or with a depth")
    require(u.dim() == 2 or u.shape[2] > 1, "u has a depth of 1: call it without that dimension")
    require(u.dtype == torch.float32, f"u is {u.dtype}, not float32")
    require(u.device == fabric.device, f"u is on {u.device}, the fabric on {fabric.device}")
    require(across > 0, f"across is {across}, must be at least 1")
    return Stencil(
        rows=_rows(fabric.world_size, u, across),
        columns=u.shape[1] * across,
        depth=u.shape[2] if u.dim() == 3 else 1,
        steps=steps,
        norm_every=norm_every,
        across=across,
        world_size=fabric.world_size,
    )


def _rows(world_size: int, u: torch.Tensor, across: int) -> int:
    """Rows of the whole domain; negative if there are none."""
    return u.shape[0] * max(1, world_size // across) if u.dim() and across > 0 else -1


def _shape(
    _: int, rows: int, u: torch.Tensor, steps: int, norm_every: int, across: int
) -> tuple[int, ...]:
    return tuple(u.shape) if norm_every <= 0 else (u.numel() + steps // norm_every,)


STENCIL = Signature(
    "stencil",
    "Tensor u, int steps, int norm_every, int across",
    by_size={"u": by_row},
    sizes=lambda world_size, u, across, **others: (_rows(world_size, u, across),),
    fits=lambda fabric, rows, **others: rows > 0,
    problem=_problem,
    inputs=lambda _, u, *numbers: (aligned(u),),
    shape=_shape,
)

SIGNATURES = (STENCIL,)
