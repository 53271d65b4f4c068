"""Shapes of an attention that have names, and problems that checks run on."""

from __future__ import annotations

from dataclasses import replace

from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.variant import Shapes

_LENGTHS = "8192,16384,32768,65536,131072"
_PAPER = Attention(1, 1 << 13, 64, 64, 128, dtype="bfloat16")


def tiny(world_size: int) -> list[Attention]:
    """See :class:`Shapes`."""
    small = Attention(2, 20, 2, 1, 16, world_size=world_size)
    return [small, replace(small, batch=3, length=37, packed=True, dtype="bfloat16")]


SHAPES = Shapes(
    tiny=tiny,
    aligned=(
        _PAPER,
        replace(_PAPER, causal=False, head_dim=64, dtype="float16"),
        replace(_PAPER, batch=5, kv_heads=8, packed=True),
        replace(_PAPER, batch=2, length=5000, q_heads=12, kv_heads=1, head_dim=256),
    ),
    ragged=(Attention(2, 999, 6, 2, 70), Attention(2, 999, 6, 2, 70, kv_scales="head")),
    smallest=(Attention(1, 1, 1, 1, 16),),
    shorthand=("batch", "length", "q_heads", "kv_heads", "head_dim"),
    sets={
        # arXiv 2511.02132: lengths by heads, and batches; then models' grouped heads
        "paper": [
            f"batch=1 length={_LENGTHS} q_heads={heads} kv_heads={heads} head_dim=128 causal=0"
            for heads in (8, 16, 32, 64, 128)
        ],
        "batches": [
            f"batch=2,4,8 length=8192,32768 q_heads=64 kv_heads=64 head_dim={dim} causal=0"
            for dim in (64, 128)
        ],
        "models": [
            f"batch=1 length={_LENGTHS} q_heads={heads} kv_heads=8 head_dim=128"
            for heads in (32, 64, 128)
        ],
        # small enough for the interpreter
        "demo": [
            "batch=1 length=128 q_heads=4 kv_heads=2 head_dim=64",
            "batch=3 length=100 q_heads=2 kv_heads=1 head_dim=64 packed=1",
        ],
    },
    model_role="prompt",
    model_axes="batch=1,4 length=8192,32768,131072",
)
