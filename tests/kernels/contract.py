"""Problems on which the variants of all operations are tried, and cases made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from taxfree_kernels.variant import operation_names
from tests.kernels.tasks import Case
from tests.ranks import Ranks, gather_dims, our_names, served_names

GATHER, ALL_REDUCE, SCATTER = "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"
DECODE, PROMPTS = "flash_decode", "attention"
EMBEDDING, STENCIL = "embedding_all_to_all", "stencil"
REPLICATED = (ALL_REDUCE, DECODE)  # all ranks have the same result
BY_ROWS = ("push", "push_two_shot_lamport")  # they normalise in their own kernel
BY_ANOTHER = ("overlap", "push_two_shot", "push_two_shot_lamport_specialized", "two_shot")
NORMALISING = ("baseline", *BY_ROWS, *BY_ANOTHER)

TASKS = "tests.kernels.tasks"

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Problems:
    """On which variants of an operation are tried; all but `small` say what differs from it.

    Args:
        small: odd and ragged in every dimension that may be.
        tiny: cheap to interpret many times.
        kinds: types, layouts, addends; the weight of every second one is padded.
        ragged: few and ragged rows, odd sizes.
        ends: for configs at the ends of the space.
        drawn: for configs drawn from the space.
        crowd: for eight ranks, of which some have or own nothing.
        repeated: for calls with the same inputs.
        alone: variants that serve a single rank.
    """

    small: Fields
    tiny: Fields
    kinds: Sequence[Fields]
    ragged: Sequence[Fields]
    ends: Fields
    drawn: Fields
    crowd: Fields
    repeated: Fields
    alone: Sequence[str] = ("baseline",)


def sized(m: int, n: int, k: int) -> dict[str, Any]:
    return {"m": m, "n": n, "k": k, "dtype": "bfloat16"}


PROBLEMS = {
    GATHER: Problems(
        small={"m": 17, "n": 37, "k": 66},
        tiny={"m": 5, "n": 16, "k": 12},
        kinds=[
            {"dtype": dtype, "weight_layout": layout, "bias": bias}
            for dtype, layout, bias in product(("float16", "bfloat16"), ("nk", "kn"), (False, True))
        ],
        ragged=[sized(1, 1, 3), sized(2, 33, 9), sized(4, 16, 387), sized(34, 5, 33)],
        ends={"m": 31},  # of 16 rows a shard is a whole tile, of 32 it shares one
        drawn=sized(35, 70, 60),
        crowd=sized(9, 16, 40),
        repeated={},
    ),
    ALL_REDUCE: Problems(
        small={"m": 17, "n": 37, "k": 33},
        tiny={"m": 3, "n": 20, "k": 12},
        kinds=[
            {"residual": True},
            {"dtype": "bfloat16", "bias": True},
            {"weight_layout": "kn"},
            {"dtype": "bfloat16", "weight_layout": "kn", "bias": True, "residual": True},
        ],
        ragged=[sized(1, 1, 1), sized(34, 5, 129)],
        ends={},
        drawn=sized(35, 70, 35) | {"bias": True, "residual": True},
        crowd=sized(1, 40, 5),
        repeated={"dtype": "bfloat16", "bias": True, "residual": True},
    ),
    SCATTER: Problems(
        small={"m": 17, "n": 36, "k": 33},
        tiny={"m": 4, "n": 18, "k": 12},  # with 3 ranks, the last has no rows
        kinds=[
            {},
            {"dtype": "bfloat16"},
            {"dtype": "bfloat16", "weight_layout": "kn"},
            {"weight_layout": "kn"},
        ],
        ragged=[sized(1, 3, 1), sized(49, 6, 129)],
        ends={},
        drawn=sized(70, 60, 35),
        crowd=sized(9, 128, 5),
        repeated={},
    ),
    DECODE: Problems(
        small={"batch": 2, "q_heads": 3, "kv_heads": 1, "head_dim": 16, "kv_len_per_rank": 20},
        tiny={"batch": 1},
        kinds=[{"dtype": "bfloat16", "q_heads": 6, "kv_heads": 2}],
        ragged=[{}],
        ends={"q_heads": 10, "kv_heads": 2, "batch": 1},
        drawn={"q_heads": 10, "kv_heads": 2, "dtype": "bfloat16"},
        crowd={"batch": 1},  # fewer rows than ranks
        repeated={},
        alone=("baseline", "splits"),
    ),
    PROMPTS: Problems(
        small={"batch": 2, "length": 37, "q_heads": 4, "kv_heads": 2, "head_dim": 16},
        tiny={"length": 20},
        kinds=[
            {},
            {"causal": False, "dtype": "bfloat16"},
            {"packed": True, "batch": 4, "dtype": "bfloat16"},
            {"packed": True, "batch": 3, "causal": False, "kv_heads": 1},
        ],
        ragged=[{"length": 1}, {"head_dim": 27}, {"head_dim": 64, "length": 70, "batch": 1}],
        ends={"q_heads": 3, "kv_heads": 1},
        drawn={"batch": 5, "packed": True, "length": 90},
        crowd={"batch": 1},
        repeated={},
        alone=("baseline", "flash"),
    ),
    EMBEDDING: Problems(
        small={"batch": 3, "bag": 3, "tables": 3, "rows": 7, "dim": 10},
        tiny={"batch": 2, "tables": 2},
        kinds=[
            {"dtype": "bfloat16", "mode": "mean"},
            {"weighted": True},
            {"dtype": "float32"},
        ],
        ragged=[{"batch": 1, "bag": 1, "dim": 2}, {"rows": 1, "bag": 9, "dim": 34}],
        ends={},
        drawn={"batch": 7, "tables": 5, "dtype": "bfloat16"},
        crowd={"batch": 1},  # fewer tables than ranks
        repeated={"weighted": True},
    ),
    STENCIL: Problems(
        small={"rows": 24, "columns": 7, "steps": 4, "norm_every": 2},
        tiny={"norm_every": 0, "steps": 3},
        kinds=[
            {},
            {"columns": 18, "depth": 5, "norm_every": 3},
        ],
        ragged=[
            {"rows": 3, "columns": 3, "steps": 5},
            {"rows": 51, "columns": 37, "steps": 2, "norm_every": 0},
            {"rows": 7, "columns": 24, "across": 3, "norm_every": 1},
            {"rows": 5, "columns": 9, "depth": 20, "across": 3},
        ],
        ends={"columns": 20, "rows": 36},
        drawn={"rows": 48, "columns": 35, "depth": 9},
        crowd={"columns": 8, "across": 4},
        repeated={"norm_every": 1},
        alone=("baseline", "persistent", "pushed"),
    ),
}
#: flash_decode's variants that push words which carry their flag, if told to
WORDS = [
    (name, {"LL": True, "PACKED": packed})
    for name in ("fused", "persistent")
    for packed in (False, True)
]

SERVED = [(op, name) for op in operation_names() for name in served_names(op)]
OURS = [(op, name) for op in operation_names() for name in our_names(op)]


def ways(op: str, variant: str) -> list[Fields]:
    """Fields of each way in which a variant can exchange."""
    if op == GATHER:
        return [{"gather_dim": dim} for dim in gather_dims(variant)]
    if op == EMBEDDING:
        return [{"shard_dim": dim} for dim in (0, 1)]
    return [{"scatter_dim": dim} for dim in (0, 1)] if op == SCATTER else [{}]


#: each way of what has a space of configs
SEARCHED = [(op, name, way) for op, name in [*OURS, (DECODE, "splits")] for way in ways(op, name)]


def case(
    op: str, variant: str, config: Fields | None = None, padded: bool = False, **fields: Any
) -> Case:
    """A case on the operation's small problem, but for `fields` and what the variant wants."""
    return Case(variant, _served(op, variant, PROBLEMS[op].small | fields), config, padded, op)


def tiny(op: str, variant: str, way: Fields, world_size: int) -> Case:
    """A case for many calls; the last rank has nothing to send where that is possible."""
    empty = {"m": world_size - 1} if way.get("gather_dim") == 0 else {}
    return case(op, variant, **PROBLEMS[op].tiny | empty | way)


def _served(op: str, variant: str, fields: Fields) -> Fields:
    """Fields of the most similar problem that the variant serves."""
    match op, variant:
        case (
            "all_gather_matmul",
            "push_tma" | "push_specialized",
        ):  # rows start at multiples of 16 bytes
            return fields | {"n": -(-fields["n"] // 8) * 8, "k": 8 * fields["k"]}
        case "all_gather_matmul", "overlap" if fields["m"] < 16:  # each rank has rows
            return fields | {"m": 8 * fields["m"]}
        case "matmul_reduce_scatter" | "matmul_all_reduce", "overlap":
            return fields | {
                "n": max(96, -(-fields["n"] // 16) * 16),
                "m": fields["m"] + 32 * fields.get("scatter_dim", 0),
            }
        case "matmul_reduce_scatter", "push_lamport":  # each rank has rows
            return fields | {"m": max(5, fields["m"])}
        case _, "push_lamport_specialized" | "push_two_shot_lamport_specialized":
            in_16_bytes = 16 if fields.get("x_dtype") == "fp8" else 8
            aligned = {"k": in_16_bytes * fields["k"], "weight_layout": "nk"}
            return fields | aligned | {"m": max(5, fields["m"])}
    return fields


def unsupported_reasons(
    ranks: Ranks, world_size: int, op: str, fields: Fields
) -> dict[str, str | None]:
    """Why each variant cannot serve a problem, or None."""
    return ranks.run(world_size, f"{TASKS}:unsupported_reasons", fields=fields, op=op)[0]


def complaints(ranks: Ranks, world_size: int, cases: Sequence[Case], **options: Any) -> list[str]:
    """What is wrong with the results of cases, on any rank."""
    return _found(ranks, world_size, "complaints", cases=cases, **options)


def back_to_back(ranks: Ranks, world_size: int, cases: Sequence[Case], **options: Any) -> list[str]:
    """What is wrong with calls that take turns without a barrier, on any rank."""
    return _found(ranks, world_size, "back_to_back", cases=cases, **options)


def _found(ranks: Ranks, world_size: int, task: str, **arguments: Any) -> list[str]:
    found = ranks.run(world_size, f"{TASKS}:{task}", **arguments)
    return [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
