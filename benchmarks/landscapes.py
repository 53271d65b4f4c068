"""Landscapes: the time of every config of a grid, on one GPU, to replay searches without it.

flash_decode is measured on a single rank. Of the other operations one GPU emulates one of eight
ranks; see :mod:`benchmarks.emulate`. The grids are products of values, few enough that all of their
configs can be measured; the first configs of a search are among them where those of one grid can
be. The two problems of an operation have the same kernels. The second one is held out: a search is
improved on the first ones, and judged on the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taxfree.measuring.trial import Candidate, key
from taxfree.shapes import ShapeRequest, expand
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.spaces import within
from taxfree_kernels.variant import (
    Config,
    Plan,
    Problem,
    Space,
    Variant,
    problem_class,
    variants,
)

if TYPE_CHECKING:
    from taxfree_kernels.fabric.base import Fabric

FOLDER = Path(__file__).parent / "results" / "landscapes"

#: Meta-parameter -> values of a landscape; those not named have all values of the variant's space.
Grid = Mapping[str, tuple[Any, ...]]

_TILES: Grid = {
    "BLOCK_M": (64, 128, 256),
    "BLOCK_N": (64, 128, 256),
    "BLOCK_K": (64, 128),
    "SWAP_AB": (False,),
    "num_stages": (3, 4, 6),
    "launch_pdl": (True,),
}
_GATHER: Grid = {
    **_TILES,
    "BLOCK_M": (64, 128),
    "GROUP_M": (1, 8),
    "SPLIT_K": (1, 2),
    "SOURCES_PER_WAIT": (8, 1),
    "num_stages": (3, 4),
    "CHUNKS": (64,),
    "SEND_BLOCK": (8192,),
}
_SUM: Grid = {**_TILES, "GROUP_M": (8,), "SPLIT_K": (1, 2), "WIRE": ("bfloat16",)}

#: Operation -> variant -> grid.
GRIDS: Mapping[str, Mapping[str, Grid]] = {
    "flash_decode": {"library": {"OUT_ROWS": (1, 2, 4)}},
    "all_gather_matmul": {
        "push": {**_GATHER, "BLOCK_K": (32, 64), "SEND_BLOCK": (4096, 8192)},
        "pull": {
            **_GATHER, "BLOCK_K": (64,), "SOURCES_PER_WAIT": (1,), "CHUNKS": (16, 64),
        },
        "push_tma": {
            **_GATHER, "BLOCK_M": (64, 128, 256), "BLOCK_N": (128, 256), "GROUP_M": (8,),
            "CHUNKS": (1, 2, 8), "SEND_BLOCK": (16384,), "K_PARTS": (1, 2, 4),
            "SEND_STAGES": (4,), "SENDERS": (16,),
        },
    },
    "matmul_all_reduce": {
        "push": {**_SUM, "SIGNALS": (64,)},
        "push_in_place": {**_SUM, "GROUP_M": (1, 8)},
        "push_two_shot": {
            **_SUM, "SPLIT_K": (1,), "SIGNALS": (128,), "PIECES": (1, 4), "AHEAD": (1, 2, 64),
        },
        "push_two_shot_lamport": _SUM,
    },
    "matmul_reduce_scatter": {
        "push": {
            **_SUM, "BLOCK_M": (64, 128), "GROUP_M": (1, 8), "SIGNALS": (64,),
            "WIRE": ("bfloat16", "float32"), "PIECES": (2, 4),
        },
    },
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What a landscape is of.

    Args:
        name: of its file.
        op: the operation's name.
        shape: as users write it.
        held_out: whether no search is improved on it.
    """

    name: str
    op: str
    shape: str
    held_out: bool = False

    @property
    def problem(self) -> Problem:
        ranks = 1 if self.op == "flash_decode" else 8
        request = ShapeRequest([self.shape], world_sizes=(ranks,), dtype="bfloat16")
        found: Problem = expand(self.op, request)[0]
        return found


# Layers of Llama 70B on eight GPUs; for flash_decode, attention with many heads for a key.
SUBJECTS = (
    Subject(
        "flash_decode-48-heads", "flash_decode",
        "batch=32 q_heads=48 kv_heads=1 head_dim=128 kv_len_per_rank=8192",
    ),
    Subject(
        "flash_decode-64-heads", "flash_decode",
        "batch=8 q_heads=64 kv_heads=2 head_dim=128 kv_len_per_rank=16384", held_out=True,
    ),
    Subject("all_gather_matmul-up", "all_gather_matmul", "m=1024 n=3584 k=8192 gather_dim=0"),
    Subject(
        "all_gather_matmul-qkv", "all_gather_matmul", "m=1024 n=1280 k=8192 gather_dim=0",
        held_out=True,
    ),
    Subject("matmul_all_reduce-down", "matmul_all_reduce", "m=256 n=8192 k=3584"),
    Subject("matmul_all_reduce-out", "matmul_all_reduce", "m=256 n=8192 k=1024", held_out=True),
    Subject("matmul_reduce_scatter-down", "matmul_reduce_scatter", "m=1024 n=8192 k=3584"),
    Subject(
        "matmul_reduce_scatter-out", "matmul_reduce_scatter", "m=1024 n=8192 k=1024",
        held_out=True,
    ),
)  # fmt: skip


class OnGrid(Variant):
    """A variant whose space is a grid: what a search sees of it in a landscape.

    Args:
        variant: the whole one.
        grid: values of some of its meta-parameters.
    """

    def __init__(self, variant: Variant, grid: Grid) -> None:
        self.name, self.fused = variant.name, variant.fused  # type: ignore[misc]
        self._variant, self._grid = variant, grid

    def unsupported_reason(self, problem: Problem, hardware: Hardware) -> str | None:
        return self._variant.unsupported_reason(problem, hardware)

    def space(self, problem: Problem, hardware: Hardware) -> Space:
        whole = self._variant.space(problem, hardware)
        found = {}
        for name, values in whole.items():  # the interpreter's space has other ones
            asked = self._grid.get(name, values)
            found[name] = tuple(value for value in asked if value in values) or values
        return found

    def seed_configs(self, problem: Problem, hardware: Hardware) -> list[dict[str, Any]]:
        """The whole variant's, moved onto the grid; those that are then refused are left out."""
        space = self.space(problem, hardware)
        found: list[dict[str, Any]] = []
        for config in self._variant.seed_configs(problem, hardware):
            moved = within(space, config)
            if moved not in found and self.prune_reason(problem, hardware, moved) is None:
                found.append(moved)
        return found

    def prune_reason(self, problem: Problem, hardware: Hardware, config: Config) -> str | None:
        return self._variant.prune_reason(problem, hardware, config)

    def plan(self, problem: Problem, fabric: Fabric, config: Config) -> Plan:
        return self._variant.plan(problem, fabric, config)


@dataclass(frozen=True)
class Landscape:
    """A recorded landscape.

    Args:
        name: of its file.
        problem: the problem.
        held_out: whether no search is improved on it.
        hardware: of the machine that it was recorded on.
        variants: name -> variant, whose space is the recorded grid.
        times: candidates -> microseconds, or why there are none.
    """

    name: str
    problem: Problem
    held_out: bool
    hardware: Hardware
    variants: Mapping[str, Variant]
    times: Mapping[str, float | str]

    @property
    def best_us(self) -> float:
        return min(time for time in self.times.values() if not isinstance(time, str))


def load(path: Path) -> Landscape:
    """Read a landscape."""
    content = json.loads(path.read_text(encoding="utf-8"))
    op, gpu = content["op"], content["environment"]["hardware"]["gpu"]
    spaces = {
        name: {parameter: tuple(values) for parameter, values in space.items()}
        for name, space in content["spaces"].items()
    }
    times = {
        key(Candidate(name, dict(zip(spaces[name], values, strict=True)))): time
        for name, trials in content["trials"].items()
        for *values, time in trials
    }
    return Landscape(
        path.stem,
        problem_class(op)(**content["problem"]),
        content["held_out"],
        next(each for each in KNOWN.values() if gpu.startswith(each.name)),
        {name: OnGrid(variants(op)[name], space) for name, space in spaces.items()},
        times,
    )


def on_grids(problem: Problem, hardware: Hardware, op: str) -> dict[str, Variant]:
    """The variants of a landscape that can serve a problem."""
    found = {name: OnGrid(variants(op)[name], grid) for name, grid in GRIDS[op].items()}
    return {
        name: variant
        for name, variant in found.items()
        if variant.unsupported_reason(problem, hardware) is None
    }
