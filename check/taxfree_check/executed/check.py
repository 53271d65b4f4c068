"""Variants of operations executed: on problems whose loops have several lengths, and in vain."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from taxfree_check.checker.check import selection
from taxfree_check.executed.coverage import Hits, InstructionCoverage, coverage
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.program import Program
from taxfree_check.executed.run import DEVICES, ExecutedCall, run
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import (
    Config,
    Problem,
    operation_shapes,
    problem_class,
    variants,
)

SEEDS = _LENGTHS = 3

#: What the inner dimension grows by, seed by seed: a loop over it has one step, then enough for
#: what the compiler peels off it. Senders of the gather need more to use all lanes. Room in a bag
#: is a constant of kernels: each length would be another kernel. So would be an output of 16 n
#: elements, which those of a stencil with the norms of these steps are not.
_LONGER = {
    "all_gather_matmul": (0, 64, 576), "embedding_all_to_all": (0, 0, 0), "stencil": (0, 2, 12)
}  # fmt: skip
_BY_DEFAULT = (0, 64, 192)
_OF_FP8 = (0, 128, 512)  # a step of it is twice as long
_WIDER, _HIGHER = 192, 12  # a window, a stencil
#: operation -> small problems in fp8, on two ranks: of tokens and channels, of blocks, ...
_IN_FP8: dict[str, tuple[dict[str, Any], ...]] = {
    "all_gather_matmul": (
        {"m": 5, "n": 40, "k": 48, "gather_dim": 0, "scales": "channel"},
        {"m": 17, "n": 136, "k": 136, "gather_dim": 0, "scales": "block"},
    ),
    "matmul_all_reduce": (
        {"m": 5, "n": 144, "k": 72, "residual": True, "scales": "block"},
        {"m": 3, "n": 144, "k": 72, "rms_norm": True, "scales": "channel", "out_scales": "block"},
    ),
    "matmul_reduce_scatter": ({"m": 5, "n": 136, "k": 72, "scales": "block"},),
}
_KEYS_IN_FP8 = {"attention": "tensor", "flash_decode": "head"}
_INNER = ("k", "kv_len_per_rank", "length", "bag", "steps")


@dataclass(frozen=True)
class ExecutedCheck:
    """What executing one config of a variant on one problem showed.

    Args:
        op, variant, problem, config: what ran.
        architecture: it was compiled for.
        runs: one for each seed, then two with a silent rank.
        hits: which instructions of its kernels were executed.
    """

    op: str
    variant: str
    problem: Problem
    config: Config
    architecture: str
    runs: list[ExecutedCall]
    hits: list[Hits]

    @property
    def wrong(self) -> list[ExecutedCall]:
        return [run for run in self.runs if run.verdict != "right"]

    def replay(self, shown: ExecutedCall) -> str:
        """The command that repeats one of the runs, and those with a silent rank."""
        return (
            f"taxfree check --executed {selection(self.op, self.variant, self.problem)} "
            f"--arch {self.architecture} --first-seed {shown.seed} --seeds 1"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "variant": self.variant,
            "problem": asdict(self.problem),
            "config": dict(self.config),
            "architecture": self.architecture,
            "runs": [run.as_json() | {"replay": self.replay(run)} for run in self.runs],
            "kernels": [asdict(kernel) for *_, kernel in kernels([self])],
        }


def check(
    problems: Mapping[str, Iterable[Problem]],
    names: Collection[str] | None = None,
    seeds: Sequence[int] = range(SEEDS),
    architecture: str = "gfx942",
) -> Iterator[ExecutedCheck]:
    """Execute the default config of variants that have kernels of their own.

    Args:
        problems: operation -> its problems.
        names: of variants; None for all.
        seeds: see :func:`check_config`.
    """
    hardware = KNOWN[DEVICES[architecture]]
    for op, tiny in problems.items():
        for problem in tiny:
            for name, variant in variants(op).items():
                is_asked = not names or name in names
                if not is_asked or variant.unsupported_reason(problem, hardware):
                    continue
                config = default_config(op, name, problem, architecture)
                checked = check_config(op, name, problem, config, seeds, architecture)
                if checked.runs:
                    yield checked


def tiny_problems(op: str, world_size: int) -> list[Problem]:
    """Problems to execute by default: a window shows some blocks of keys, so that a loop runs.

    A rank has three tiles of a stencil, one of them at no side.
    """
    tiny = list(operation_shapes(op).tiny(world_size))
    higher = -(-_HIGHER // world_size) * world_size if op == "stencil" else 0
    for name, by in (("window", _WIDER), ("rows", higher)):
        tiny = [
            _grown(problem, name, by) if by and getattr(problem, name, 0) else problem
            for problem in tiny
        ]
    if op in _KEYS_IN_FP8:
        return [*tiny, replace(tiny[0], kv_scales=_KEYS_IN_FP8[op])]
    made, common = problem_class(op), {"dtype": "bfloat16", "x_dtype": "fp8"}
    of_fp8 = (fields | common for fields in _IN_FP8.get(op, ()))
    return tiny + [made(world_size=world_size, **fields) for fields in of_fp8]


def default_config(op: str, variant: str, problem: Problem, architecture: str) -> Config:
    """The first seed config, which fits all lengths: a cache is split as the longest one."""
    if op == "flash_decode":
        problem = _lengthened(op, problem, _LENGTHS - 1)
    return variants(op)[variant].seed_configs(problem, KNOWN[DEVICES[architecture]])[0]


def check_config(
    op: str,
    variant: str,
    problem: Problem,
    config: Config,
    seeds: Sequence[int] = range(SEEDS),
    architecture: str = "gfx942",
) -> ExecutedCheck:
    """Execute one config of a variant.

    Args:
        problem: its inner dimension grows with the seed, modulo 3.
        seeds: one run each; the first one also draws those in which the first or last rank is
            silent.

    Returns:
        What the runs showed. It has none if the library serves the problem.
    """
    programs: dict[str, Program] = {}

    def tried(problem: Problem, seed: int, silent: int | None = None) -> ExecutedCall:
        case = op, variant, problem, config, seed, architecture
        try:
            return run(*case, silent=silent, programs=programs)
        except UnknownInstruction as error:
            return ExecutedCall(
                op, variant, problem, config, architecture, seed, "error", error.message
            )

    runs = []
    for seed in seeds:
        shown = tried(_lengthened(op, problem, seed), seed)
        if shown.verdict == "nothing to run":
            return ExecutedCheck(op, variant, problem, config, architecture, [], [])
        runs.append(shown)
    by_all = _hits(programs)
    for rank in (0, problem.world_size - 1):  # a neighbour at one side, and at the other
        runs.append(tried(problem, seeds[0], silent=rank))
    hits = [
        Hits(key, programs[key].listing, by_all.get(key, frozenset()), every)
        for key, every in _hits(programs).items()
    ]
    return ExecutedCheck(op, variant, problem, config, architecture, runs, hits)


def _lengthened(op: str, problem: Problem, seed: int) -> Problem:
    """A problem with a longer inner dimension."""
    by_default = _OF_FP8 if getattr(problem, "x_dtype", "same") == "fp8" else _BY_DEFAULT
    return _grown(problem, _inner(problem), _LONGER.get(op, by_default)[seed % _LENGTHS])


def _inner(problem: Problem) -> str:
    return next(name for name in _INNER if hasattr(problem, name))


def _grown(problem: Problem, name: str, by: int) -> Problem:
    return replace(problem, **{name: getattr(problem, name) + by})


def _hits(programs: Mapping[str, Program]) -> dict[str, frozenset[int]]:
    return {
        key: frozenset(index for index, was_hit in enumerate(program.hits) if was_hit)
        for key, program in programs.items()
    }


def rows(checks: Sequence[ExecutedCheck]) -> list[tuple[Any, ...]]:
    """A row for each variant: verdict, runs, runs in which ranks gave up, instructions, seconds."""
    by_variant: dict[tuple[str, str], list[ExecutedCall]] = {}
    for checked in checks:
        by_variant.setdefault((checked.op, checked.variant), []).extend(checked.runs)
    result = []
    for (op, variant), runs in by_variant.items():
        wrong = [shown.verdict for shown in runs if shown.verdict != "right"]
        gave_up = sum(bool(shown.gave_up) for shown in runs)
        instructions = sum(shown.instructions for shown in runs)
        seconds = round(sum(shown.seconds for shown in runs), 1)
        verdict = wrong[0] if wrong else "right"
        result.append((op, variant, verdict, len(runs), gave_up, instructions, seconds))
    return result


def kernels(checks: Sequence[ExecutedCheck]) -> list[tuple[str, str, InstructionCoverage]]:
    """The coverage of each kernel of each variant."""
    by_kernel: dict[tuple[str, str, str], list[Hits]] = {}
    for checked in checks:
        for hit in checked.hits:
            key = checked.op, checked.variant, hit.listing.name
            by_kernel.setdefault(key, []).append(hit)
    return [(op, variant, coverage(every)) for (op, variant, _), every in by_kernel.items()]
