"""Named shapes of matmul_all_reduce, and the problems that checks run on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.variant import SCALES, Shapes

_FP8: dict[str, Any] = {"dtype": "bfloat16", "world_size": 2, "x_dtype": "fp8"}


def tiny(world_size: int) -> list[MatmulAllReduce]:
    """See :class:`Shapes`."""
    few = MatmulAllReduce(3, 48, 40, world_size=world_size, residual=True)
    smallest = replace(few, bias=True)
    # rows that share a tile; one row is in two chunks
    normalised = replace(few, rms_norm=True)
    if world_size > 2:
        # as many as copy engines fetch, and not more than Lamport words in one shot are for
        return [replace(smallest, m=min(4 * world_size + 1, 32), n=16), normalised]
    return [
        smallest,
        normalised,
        # too few elements for two chunks
        MatmulAllReduce(1, 16, 16, dtype="bfloat16", world_size=world_size),
        MatmulAllReduce(17, 96, 32, world_size=world_size, weight_layout="kn"),
    ]


SHAPES = Shapes(
    tiny=tiny,
    aligned=(
        MatmulAllReduce(16, 8192, 1024, world_size=8, residual=True),
        MatmulAllReduce(1024, 8192, 3584, dtype="bfloat16", world_size=4, residual=True),
        MatmulAllReduce(16, 8192, 1024, world_size=8, residual=True, rms_norm=True),
        MatmulAllReduce(4096, 8192, 3584, dtype="bfloat16", world_size=8),
        MatmulAllReduce(128, 4096, 2048, world_size=8, weight_layout="kn"),
        MatmulAllReduce(16, 8192, 14336, rms_norm=True, **_FP8, scales="channel"),
        *(
            MatmulAllReduce(
                16, 8192, 14336, residual=True, rms_norm=True, **_FP8, scales=each, out_scales=each
            )
            for each in SCALES
        ),
        MatmulAllReduce(16, 8192, 3584, world_size=2, rms_norm=True, out_scales="block"),
        *(MatmulAllReduce(m, 8192, 14336, **_FP8, scales="block") for m in (16, 1024)),
        MatmulAllReduce(1024, 8192, 14336, **_FP8, scales="tensor"),
    ),
    ragged=(MatmulAllReduce(77, 1001, 129, world_size=8, bias=True),),
    smallest=(
        MatmulAllReduce(1, 16, 32, world_size=2),
        MatmulAllReduce(1, 16, 32, world_size=2, x_dtype="fp8", scales="block"),
        MatmulAllReduce(1, 16, 32, world_size=2, rms_norm=True),
    ),
    shorthand=("m", "n", "k"),
    sets={
        "paper": ["m=1,16,64,128,256,512,1024 n=8192 k=1024,3584"],
        "decode": ["m=1,16,64 n=8192 k=1024,3584"],
        "large": ["m=2048,4096,8192 n=8192 k=1024,3584"],
        # small enough for the interpreter; the last is ragged
        "demo": ["m=16 n=64 k=32", "m=32 n=64 k=64", "m=13 n=40 k=24 bias=1 residual=1"],
    },
    model_role="sum",
    model_axes="m=1,4,16,64,256,1024,4096,16384",
)
