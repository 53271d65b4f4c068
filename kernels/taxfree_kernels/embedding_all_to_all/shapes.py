"""Named shapes of embedding_all_to_all, and the problems that checks run on."""

from __future__ import annotations

from dataclasses import replace

from taxfree_kernels.embedding_all_to_all.problem import EmbeddingAllToAll
from taxfree_kernels.variant import Shapes

#: 26 categories of a click, as in the Criteo data sets
_CLICKS = "tables=26 rows=1000000 dim=128 dtype=bfloat16"
_LARGE = EmbeddingAllToAll(2560, 20, 26, 1 << 20, 128, dtype="bfloat16", world_size=2)


def tiny(world_size: int) -> list[EmbeddingAllToAll]:
    """See :class:`Shapes`."""
    # more tables than one, none where there are more ranks; the last sample of a chunk is ragged
    by_table = EmbeddingAllToAll(3, 3, 2, 5, 6, dtype="bfloat16", world_size=world_size)
    by_rows = replace(by_table, batch=2, shard_dim=1, weighted=True, dtype="float32")
    return [by_table, by_rows]


SHAPES = Shapes(
    tiny=tiny,
    aligned=(
        _LARGE,
        replace(_LARGE, batch=10, bag=1),
        replace(_LARGE, shard_dim=1, weighted=True, dtype="float16", world_size=8),
        replace(_LARGE, batch=160, dim=64, mode="mean", dtype="float32"),
    ),
    ragged=(EmbeddingAllToAll(77, 3, 5, 1001, 50, mode="mean", shard_dim=1, world_size=8),),
    smallest=(EmbeddingAllToAll(1, 1, 1, 1, 2, world_size=2),),
    shorthand=("batch", "bag", "tables", "rows", "dim"),
    sets={
        # 64 KB to 17 MB of pooled rows a rank
        "paper": [f"batch=10,40,160,640,2560 bag=1,20 {_CLICKS}"],
        "rows": [f"batch=10,160,2560 bag=1,20 shard_dim=1 {_CLICKS.replace('1000000', '500000')}"],
        # small enough for the interpreter
        "demo": [
            "batch=8 bag=2 tables=3 rows=16 dim=32",
            "batch=5 bag=3 tables=2 rows=9 dim=16 shard_dim=1 mode=mean",
        ],
    },
)
