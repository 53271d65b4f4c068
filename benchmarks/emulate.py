"""Emulates more ranks than there are GPUs, to time kernels: two GPUs act for all ranks.

    python -m benchmarks.emulate --ranks 8 --op matmul_all_reduce --dtype bf16 \\
        --shapes "m=1024 n=8192 k=3584" --try "push_two_shot STAGGERED=False,True" --try push

Each of two GPUs computes the work of one of `--ranks`, stores as many bytes for its peers, and
waits for as many; all of them go to, and come from, the other GPU. So its compute units, memory and
link have the load of one of `--ranks`. The emulation lacks the switch between many GPUs, the
slowest of many ranks, and right results: nothing is compared. Its times are not measurements of
`--ranks` GPUs; ``docs/lab/emulated-ranks.md`` has both side by side.

With `--alone` one GPU emulates one rank. Nothing crosses a link, and no kernel waits: the time is
that of the rank's own computing, storing and adding.

Variants that call a collective or a copy engine cannot be emulated, nor one whose channels depend
on the sender. On the host fabric the emulation tests protocols, not times.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import emulate_ranks
from benchmarks.commands import exit_code, positive
from benchmarks.emulate_ranks import Emulated
from taxfree import devices
from taxfree.errors import UsageError
from taxfree.measuring.groups import deadline_s
from taxfree.measuring.trial import Candidate
from taxfree.shapes import ShapeRequest, expand, format_problem
from taxfree.workers.group import WorkerGroup
from taxfree_cli import interpreting
from taxfree_kernels.fabric.layout import arena_bytes
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import variants


def candidates(
    op: str, problem: Any, hardware: Hardware, attempts: Sequence[str]
) -> list[Candidate]:
    """The default config of each fused variant, or the candidates of `attempts`.

    Args:
        attempts: each a variant and meta-parameters that differ from its default config, as in
            "push SIGNALS=64,16 num_warps=8"; all combinations of listed values are tried. Problems
            may come first, as in "op=matmul_all_reduce m=64,128 push"; for others it is skipped.

    Raises:
        UsageError: there is no such variant, meta-parameter or value.
    """
    if not attempts:
        attempts = [name for name, variant in variants(op).items() if variant.fused]
    found = []
    for attempt in attempts:
        words = attempt.split()
        where = list(itertools.takewhile(lambda word: "=" in word, words))
        if not all(_is_for(op, problem, condition) for condition in where):
            continue
        name, *settings = words[len(where) :]
        if name not in variants(op):
            raise UsageError(f"{op} has no variant {name!r}", f"one of: {', '.join(variants(op))}")
        variant = variants(op)[name]
        if variant.unsupported_reason(problem, hardware) is not None:
            continue
        default = variant.seed_configs(problem, hardware)[0]
        space = variant.space(problem, hardware)
        lists = dict(_values(each, space) for each in settings)
        for values in itertools.product(*lists.values()):
            config = default | dict(zip(lists, values, strict=True))
            if variant.prune_reason(problem, hardware, config) is None:
                found.append(Candidate(name, config))
    return found


def _is_for(op: str, problem: Any, condition: str) -> bool:
    """Whether a problem has one of the values of "FIELD=VALUE,VALUE"."""
    fields = {"op": op, **dataclasses.asdict(problem)}
    name, _, said = condition.partition("=")
    if name not in fields:
        raise UsageError(
            f"{condition!r}: {op} has no field {name!r}", f"one of: {', '.join(fields)}"
        )
    return str(fields[name]) in said.split(",")


def _values(setting: str, space: Any) -> tuple[str, list[Any]]:
    """The meta-parameter and values of "NAME=VALUE,VALUE"."""
    name, _, said = setting.partition("=")
    by_text = {str(value): value for value in space.get(name, ())}
    unknown = [each for each in said.split(",") if each not in by_text]
    if unknown:
        hint = f"one of: {', '.join(by_text) or 'none'}"
        raise UsageError(f"{setting!r}: {name} cannot be {unknown[0]!r}", hint)
    return name, [by_text[each] for each in said.split(",")]


def emulations(
    op: str,
    problems: Sequence[Any],
    fabric: str,
    attempts: Sequence[str],
    repetitions: int,
    here: int = 2,
) -> Iterator[tuple[Any, list[Emulated]]]:
    """Emulate problems one by one, each in new processes; the fastest candidate comes first.

    Args:
        attempts: see :func:`candidates`.
        repetitions: of a chain of calls.
        here: the number of real ranks, 2 or 1.
    """
    for problem in problems:
        arena = arena_bytes(problem.slot_bytes)
        heap = arena_bytes(problem.world_size * arena)
        with WorkerGroup(here, fabric, heap, emulate_ranks.TIMEOUT_S) as group:
            tried = candidates(op, problem, group.hardware, attempts)
            found: list[Emulated] = group.call(
                emulate_ranks.emulate, deadline_s(group.hardware), op=op,
                problem=dataclasses.asdict(problem), candidates=tried, arena_bytes=arena,
                repetitions=repetitions,
            )[0]  # fmt: skip
        found.sort(key=lambda each: each.timing.median_us if each.timing else math.inf)
        yield problem, found


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=positive, default=8, help="ranks that two GPUs emulate")
    parser.add_argument("--alone", action="store_true", help="one GPU emulates one of them")
    parser.add_argument("--op", default="all_gather_matmul")
    parser.add_argument("--shapes", action="append", required=True)
    parser.add_argument("--dtype", help="of shapes without one")
    parser.add_argument("--try", dest="attempts", action="append", default=[], metavar="VARIANT")
    parser.add_argument("--repetitions", type=int, default=12, help="of a chain of calls")
    parser.add_argument("--fabric", default="auto")
    options = parser.parse_args()
    return exit_code(lambda: _print_all(options))


def _print_all(options: argparse.Namespace) -> None:
    fabric = devices.fabric_for(options.fabric)
    here, word = (1, "alone") if options.alone else (2, "emulated")
    devices.require(fabric, here)
    request = ShapeRequest(options.shapes, world_sizes=(options.ranks,), dtype=options.dtype)
    problems = expand(options.op, request)
    if any(problem.world_size <= here for problem in problems):
        raise UsageError(
            f"--ranks {options.ranks} needs no emulation", "give more --ranks, or use taxfree bench"
        )
    if fabric == "host":
        interpreting.announce(problems)
    found = emulations(options.op, problems, fabric, options.attempts, options.repetitions, here)
    for problem, emulated in found:
        print(format_problem(options.op, dataclasses.asdict(problem)))
        for each in emulated:
            config = " ".join(f"{name}={value}" for name, value in each.candidate.config.items())
            config += ", promised" * each.promised
            us = "-" if each.timing is None else f"{each.timing.median_us:.1f} us {word}"
            print(f"  {us:>20}  {each.candidate.variant} {each.reason or config}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
