"""Shapes of a stencil that have names, and problems that checks run on."""

from __future__ import annotations

from dataclasses import replace

from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Shapes

_PLANE = Stencil(1024, 1024, steps=3, world_size=2)
_CUBE = Stencil(128, 128, 128, steps=3, world_size=2)


def tiny(world_size: int) -> list[Stencil]:
    """See :class:`Shapes`."""
    side = 3 * world_size
    plane = Stencil(side, 7, steps=4, norm_every=2, world_size=world_size)
    return [
        plane,
        replace(plane, rows=7, columns=side, steps=3, norm_every=1, across=world_size),
        replace(plane, columns=6, depth=5, steps=3, norm_every=0),
    ]


SHAPES = Shapes(
    tiny=tiny,
    aligned=(),  # neighbours in a row never are
    ragged=(
        _PLANE,
        replace(_PLANE, rows=8192, columns=8192, norm_every=2),
        replace(_PLANE, world_size=4, across=2),
        _CUBE,
        replace(_CUBE, world_size=4, across=2, norm_every=2),
        replace(_PLANE, rows=998, columns=999),
        replace(_CUBE, rows=66, columns=67, depth=35, norm_every=1),
    ),
    smallest=(Stencil(3, 3, steps=1), Stencil(3, 3, 3, steps=1)),
    shorthand=("rows", "columns", "depth"),
    sets={
        "plane": [f"rows={side} columns={side}" for side in (1024, 2048, 4096, 8192)],
        "cube": [f"rows={side} columns={side} depth={side}" for side in (128, 256, 512)],
        # small enough for the interpreter
        "demo": [
            "rows=24 columns=20 steps=6 norm_every=3",
            "rows=12 columns=10 depth=9 steps=4",
        ],
    },
)
