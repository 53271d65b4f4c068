"""Named shapes of matmul_reduce_scatter, and the problems that checks run on."""

from __future__ import annotations

from typing import Any

from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import Shapes

_FP8: dict[str, Any] = {"dtype": "bfloat16", "world_size": 2, "x_dtype": "fp8"}


def tiny(world_size: int) -> list[MatmulReduceScatter]:
    """See :class:`Shapes`."""
    smallest = [
        # with 3 ranks, the last has no rows
        MatmulReduceScatter(4, 48, 40, dtype="bfloat16", world_size=world_size),
        MatmulReduceScatter(33, 16 * world_size, 16, scatter_dim=1, world_size=world_size),
    ]
    if world_size > 2:  # each has rows
        return [*smallest, MatmulReduceScatter(3 * world_size - 1, 24, 16, world_size=world_size)]
    # a tile of rows that two shards share
    shared = MatmulReduceScatter(39, 24, 32, world_size=world_size, weight_layout="kn")
    return [*smallest, shared]


SHAPES = Shapes(
    tiny=tiny,
    aligned=(
        MatmulReduceScatter(64, 8192, 3584, world_size=8),
        MatmulReduceScatter(4096, 4096, 3584, dtype="bfloat16", world_size=8),
        MatmulReduceScatter(1024, 4096, 2048, scatter_dim=1, world_size=4),
        MatmulReduceScatter(64, 8192, 14336, **_FP8, scales="block"),
        MatmulReduceScatter(1024, 8192, 14336, **_FP8, scales="channel"),
    ),
    ragged=(MatmulReduceScatter(77, 1001, 129, world_size=8),),
    smallest=(MatmulReduceScatter(2, 16, 32, world_size=2),),
    shorthand=("m", "n", "k"),
    sets={
        # down projections of 70B, 72B and 8B models over 8 ranks
        "paper": ["m=64,256,1024,4096 n=8192 k=3584,3696", "m=64,256,1024,4096 n=4096 k=1792"],
        "large": ["m=8192,16384 n=8192 k=3584"],
        # small enough for the interpreter
        "demo": ["m=16 n=64 k=32", "m=32 n=64 k=64 scatter_dim=1", "m=13 n=40 k=24"],
    },
    model_role="scatter_rows",
    model_axes="m=16,64,256,1024,4096,16384",
)
