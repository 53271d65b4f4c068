"""What people call the shapes of each operation: a shorthand, named sets, a model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from taxfree.shapes.fields import require_operation
from taxfree.shapes.models import Model, column_parallel, row_parallel, sequence_parallel

_LISTED_WORLD_SIZES = (1, 2, 4, 8)
_MODEL_ROWS = "1,16,64,256,1024,4096"


@dataclass(frozen=True)
class Conventions:
    """What people call the shapes of one operation.

    Args:
        shorthand: the fields of `1x2x3`, in order.
        sets: named sets, each a list of shapes.
        scaling: named sets that depend on the number of ranks: world size -> shapes.
        of_model: (model, tp) -> shapes, without `model_axes`.
        model_axes: fields that a model's config does not determine.
    """

    shorthand: tuple[str, ...] = ()
    sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scaling: Mapping[str, Callable[[int], list[str]]] = field(default_factory=dict)
    of_model: Callable[[Model, int], list[str]] | None = None
    model_axes: str = f"m={_MODEL_ROWS}"


_PAPER_HEADS = "q_heads=96 kv_heads=12 head_dim=128"


def _strong(ranks: int) -> list[str]:
    """As many keys in all, however many ranks they are spread over."""
    lengths = ",".join(str(-(-total // ranks)) for total in (1 << 17, 1 << 20))
    return [f"batch=1 kv_len_per_rank={lengths} {_PAPER_HEADS}"]


_CONVENTIONS: Mapping[str, Conventions] = {
    "all_gather_matmul": Conventions(
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
        of_model=column_parallel,
    ),
    "matmul_all_reduce": Conventions(
        shorthand=("m", "n", "k"),
        sets={
            "paper": ["m=1,16,64,128,256,512,1024 n=8192 k=1024,3584"],
            "decode": ["m=1,16,64 n=8192 k=1024,3584"],
            "large": ["m=2048,4096,8192 n=8192 k=1024,3584"],
            # small enough for the interpreter; the last is ragged
            "demo": ["m=16 n=64 k=32", "m=32 n=64 k=64", "m=13 n=40 k=24 bias=1 residual=1"],
        },
        of_model=row_parallel,
    ),
    "matmul_reduce_scatter": Conventions(
        shorthand=("m", "n", "k"),
        sets={
            # down projections of 70B, 72B and 8B models over 8 ranks
            "paper": [
                "m=64,256,1024,4096 n=8192 k=3584,3696",
                "m=64,256,1024,4096 n=4096 k=1792",
            ],
            "large": ["m=8192,16384 n=8192 k=3584"],
            "demo": ["m=16 n=64 k=32", "m=32 n=64 k=64 scatter_dim=1", "m=13 n=40 k=24"],
        },
        of_model=row_parallel,
    ),
    "flash_decode": Conventions(
        shorthand=("batch", "kv_len_per_rank", "q_heads", "kv_heads", "head_dim"),
        sets={
            "paper": [
                "batch=1 kv_len_per_rank=8192,16384,32768,65536,131072,262144,524288 "
                + _PAPER_HEADS
            ],
            "batches": [f"batch=4,8,16 kv_len_per_rank=8192,32768 {_PAPER_HEADS}"],
            "paged": [f"batch=1,8 kv_len_per_rank=8192 page_size=1,16,64 {_PAPER_HEADS}"],
            # small enough for the interpreter
            "demo": [
                "batch=1 kv_len_per_rank=128 q_heads=8 kv_heads=2 head_dim=64",
                "batch=2 kv_len_per_rank=70 q_heads=4 kv_heads=1 head_dim=64 page_size=16",
            ],
        },
        scaling={"strong": _strong},
        of_model=sequence_parallel,
        model_axes="batch=1,4,16 kv_len_per_rank=8192,32768,131072",
    ),
}


def conventions(op: str) -> Conventions:
    """What people call the shapes of an operation.

    Raises:
        UsageError: there is no such operation.
    """
    require_operation(op)
    return _CONVENTIONS.get(op, Conventions())


def named_sets(op: str) -> dict[str, list[str]]:
    """Return the named sets of an operation, each as the shapes it stands for.

    Raises:
        UsageError: there is no such operation.
    """
    fixed = {name: list(shapes) for name, shapes in conventions(op).sets.items()}
    return fixed | scaling_sets(op, _LISTED_WORLD_SIZES)


def scaling_sets(op: str, world_sizes: Sequence[int]) -> dict[str, list[str]]:
    """The named sets that depend on the number of ranks, for each of `world_sizes`."""
    return {
        name: [f"{shape} world_size={ranks}" for ranks in world_sizes for shape in of_ranks(ranks)]
        for name, of_ranks in conventions(op).scaling.items()
    }
