"""Named shapes of all_gather_matmul, and the problems that checks run on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.variant import Shapes

_FP8: dict[str, Any] = {"dtype": "bfloat16", "world_size": 2, "x_dtype": "fp8"}


def tiny(world_size: int) -> list[AllGatherMatmul]:
    """See :class:`Shapes`."""
    by_columns = AllGatherMatmul(5, 32, 16 * world_size, world_size=world_size, bias=True)
    by_rows = AllGatherMatmul(4, 32, 32, gather_dim=0, world_size=world_size)
    smallest = [by_columns, by_rows]  # by rows, with 3 ranks, the last has none
    if world_size > 2:
        return [*smallest, replace(by_rows, m=4 * world_size - 1, k=16)]  # every chunk has rows
    return [
        *smallest,
        replace(by_columns, m=17, k=24 * world_size, bias=False),
        # tiles of 16 rows that share exactly one row with the peer's shard, their last or first
        replace(by_rows, m=29),
        replace(by_rows, m=17, n=40, dtype="bfloat16", weight_layout="kn"),
        replace(by_rows, m=31),  # each rank's rows are whole tiles
    ]


SHAPES = Shapes(
    tiny=tiny,
    aligned=(
        AllGatherMatmul(16, 7168, 8192, world_size=8),
        AllGatherMatmul(4096, 4096, 8192, dtype="bfloat16", world_size=8),
        AllGatherMatmul(64, 4096, 4096, gather_dim=0, world_size=8, bias=True),
        AllGatherMatmul(1024, 4096, 4096, gather_dim=0, world_size=4, weight_layout="kn"),
        AllGatherMatmul(16, 28672, 8192, **_FP8, scales="block"),
        AllGatherMatmul(16, 28672, 8192, 0, **_FP8, scales="channel"),
        AllGatherMatmul(1024, 28672, 8192, 0, **_FP8, scales="block"),
        AllGatherMatmul(1024, 28672, 8192, **_FP8, scales="tensor"),
    ),
    ragged=(
        AllGatherMatmul(77, 1000, 8 * 129, world_size=8),
        AllGatherMatmul(50, 1001, 1033, gather_dim=0, world_size=2),
    ),
    smallest=(
        AllGatherMatmul(1, 16, 32, world_size=2),
        AllGatherMatmul(2, 16, 32, 0, world_size=2, x_dtype="fp8", scales="block"),
    ),
    shorthand=("m", "n", "k"),
    sets={
        "paper": ["m=1,2,4,8,16,32,64,128,256,512,1024 n=3584 k=8192 gather_dim=1"],
        "large": [
            "m=4096,8192,16384 n=3584 k=8192 gather_dim=0",
            "m=4096,8192,16384 n=11008 k=4096 gather_dim=0",
        ],
        # small enough for the interpreter; the last is ragged
        "demo": ["m=16 n=64 k=64", "m=32 n=64 k=128", "m=13 n=40 k=72"],
    },
    model_role="gather_rows",
    model_axes="m=16,64,256,1024,4096,16384",
)
