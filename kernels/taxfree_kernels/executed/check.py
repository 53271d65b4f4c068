"""Variants of operations executed: on problems whose loops have several lengths, and in vain."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from taxfree_kernels.executed.coverage import Coverage, coverage, summed
from taxfree_kernels.executed.errors import UnknownInstruction
from taxfree_kernels.executed.program import Program
from taxfree_kernels.executed.run import DEVICES, Executed, run
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import Config, Problem, variants

SEEDS = 4  # as many as there are lengths
_STEP, _LENGTHS = 64, 4  # what the compiler unrolls or peels off runs at one of these
_INNER = ("k", "kv_len_per_rank", "length")


@dataclass(frozen=True)
class Checked:
    """What executing one config of a variant on one problem showed.

    Args:
        op, variant, problem, config: what ran.
        architecture: it was compiled for.
        runs: one for each seed, then one with a silent rank.
        kernels: which of their instructions were executed.
    """

    op: str
    variant: str
    problem: Problem
    config: Config
    architecture: str
    runs: list[Executed]
    kernels: list[Coverage]

    @property
    def wrong(self) -> list[Executed]:
        return [each for each in self.runs if each.verdict != "right"]

    def replay(self, shown: Executed) -> str:
        """The command that repeats one of the runs, and the one with a silent rank."""
        fields = asdict(self.problem)
        world_size = fields.pop("world_size")
        shape = " ".join(
            f"{name}={int(value) if isinstance(value, bool) else value}"
            for name, value in fields.items()
        )
        return (
            f'taxfree check --executed --op {self.op} --variant {self.variant} --shapes "{shape}" '
            f"--gpus {world_size} --arch {self.architecture} --first-seed {shown.seed} --seeds 1"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "variant": self.variant,
            "problem": asdict(self.problem),
            "config": dict(self.config),
            "architecture": self.architecture,
            "runs": [each.as_json() | {"replay": self.replay(each)} for each in self.runs],
            "kernels": [asdict(each) for each in self.kernels],
        }


def check(
    problems: Mapping[str, Iterable[Problem]],
    names: Collection[str] | None = None,
    seeds: Sequence[int] = range(SEEDS),
    architecture: str = "gfx942",
) -> Iterator[Checked]:
    """Execute the default config of variants that have kernels of their own.

    Args:
        problems: operation -> its problems.
        names: of variants; None for all.
        seeds: see :func:`check_config`.
    """
    hardware = KNOWN[DEVICES[architecture]]
    for op, each in problems.items():
        for problem in each:
            for name, variant in variants(op).items():
                is_asked = not names or name in names
                if not is_asked or variant.unsupported_reason(problem, hardware):
                    continue
                config = variant.seed_configs(problem, hardware)[0]
                checked = check_config(op, name, problem, config, seeds, architecture)
                if checked.runs:
                    yield checked


def check_config(
    op: str,
    variant: str,
    problem: Problem,
    config: Config,
    seeds: Sequence[int] = range(SEEDS),
    architecture: str = "gfx942",
) -> Checked:
    """Execute one config of a variant.

    Args:
        problem: its inner dimension and its window grow by 0, 64, 128 or 192, by seed.
        seeds: one run each; the first one also draws the run in which the last rank is silent.

    Returns:
        What the runs showed. It has none if the library serves the problem.
    """
    programs: dict[str, Program] = {}

    def tried(problem: Problem, seed: int, silent: int | None = None) -> Executed:
        given = op, variant, problem, config, seed, architecture
        try:
            return run(*given, silent=silent, programs=programs)
        except UnknownInstruction as error:
            return Executed(
                op, variant, problem, config, architecture, seed, "error", error.message
            )

    runs = []
    for seed in seeds:
        shown = tried(_lengthened(problem, _STEP * (seed % _LENGTHS)), seed)
        if shown.verdict == "nothing to run":
            return Checked(op, variant, problem, config, architecture, [], [])
        runs.append(shown)
    hits = {key: _hits(program) for key, program in programs.items()}
    runs.append(tried(problem, seeds[0], silent=problem.world_size - 1))
    kernels = [
        coverage(program.listing, hits.get(key, set()), _hits(program))
        for key, program in programs.items()
    ]
    return Checked(op, variant, problem, config, architecture, runs, kernels)


def _lengthened(problem: Problem, by: int) -> Problem:
    """A problem with a longer inner dimension, and a window, if any, that shows as much of it."""
    names = [next(name for name in _INNER if hasattr(problem, name))]
    names += ["window"] if getattr(problem, "window", 0) else []
    return replace(problem, **{name: getattr(problem, name) + by for name in names})


def _hits(program: Program) -> set[int]:
    return {at for at, was_hit in enumerate(program.hits) if was_hit}


def rows(found: Sequence[Checked]) -> list[tuple[Any, ...]]:
    """A row for each variant: verdict, runs, runs in which ranks gave up, instructions, seconds."""
    by_variant: dict[tuple[str, str], list[Executed]] = {}
    for checked in found:
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


def kernels(found: Sequence[Checked]) -> list[tuple[str, str, int, Coverage]]:
    """For each kernel of a variant: how often it was compiled, and all of these together."""
    by_kernel: dict[tuple[str, str, str], list[Coverage]] = {}
    for checked in found:
        for each in checked.kernels:
            by_kernel.setdefault((checked.op, checked.variant, each.kernel), []).append(each)
    return [
        (op, variant, len(every), summed(every)) for (op, variant, _), every in by_kernel.items()
    ]
