"""Named shapes of flash_decode, and the problems that checks run on."""

from __future__ import annotations

from dataclasses import replace

from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.variant import Shapes

_PAPER_HEADS = "q_heads=96 kv_heads=12 head_dim=128"
_PAPER = FlashDecode(1, 96, 12, 128, 1 << 15, world_size=8)


def tiny(world_size: int) -> list[FlashDecode]:
    """See :class:`Shapes`."""
    small = FlashDecode(1, 2, 1, 16, 20, world_size=world_size)
    if world_size > 2:
        return [small]
    # chunks of 3 rows share tiles of the output; splits are assigned to sequences by their lengths
    dense = replace(small, q_heads=3)
    return [dense, replace(dense, batch=2, page_size=3, window=25, dtype="bfloat16")]


def strong(ranks: int) -> list[str]:
    """The same total number of keys for any number of ranks."""
    lengths = ",".join(str(-(-total // ranks)) for total in (1 << 17, 1 << 20))
    return [f"batch=1 kv_len_per_rank={lengths} {_PAPER_HEADS}"]


SHAPES = Shapes(
    tiny=tiny,
    aligned=(
        _PAPER,
        replace(_PAPER, batch=8, kv_len_per_rank=1 << 13, page_size=1),
        replace(_PAPER, batch=2, kv_len_per_rank=1 << 13, page_size=64),
        FlashDecode(
            4, 16, 16, 256, 5000, soft_cap=True, window=4096, dtype="bfloat16", world_size=4
        ),
        FlashDecode(2, 64, 1, 192, 1 << 14, v_head_dim=128, world_size=8),
    ),
    ragged=(
        FlashDecode(3, 10, 2, 70, 999, page_size=5, world_size=2),
        FlashDecode(3, 10, 2, 70, 999, page_size=5, world_size=2, kv_scales="head"),
    ),
    smallest=(FlashDecode(1, 1, 1, 16, 1, world_size=2),),
    shorthand=("batch", "kv_len_per_rank", "q_heads", "kv_heads", "head_dim"),
    sets={
        "paper": [
            f"batch=1 kv_len_per_rank=8192,16384,32768,65536,131072,262144,524288 {_PAPER_HEADS}"
        ],
        "batches": [f"batch=4,8,16 kv_len_per_rank=8192,32768 {_PAPER_HEADS}"],
        "paged": [f"batch=1,8 kv_len_per_rank=8192 page_size=1,16,64 {_PAPER_HEADS}"],
        # small enough for the interpreter
        "demo": [
            "batch=1 kv_len_per_rank=128 q_heads=8 kv_heads=2 head_dim=64",
            "batch=2 kv_len_per_rank=70 q_heads=4 kv_heads=1 head_dim=64 page_size=16",
        ],
    },
    scaling={"strong": strong},
    model_role="decode",
    model_axes="batch=1,4,16 kv_len_per_rank=8192,32768,131072 page_size=0,16",
)
