"""Measures the cost of the program trace of fused kernels, over a sweep.

    python -m benchmarks.timeline_cost --gpus 4 --dtype bfloat16 --picture "m=64 n=3584 k=8192"

Every fused variant is timed in its plain and in its instrumented build, in turns, on separate
ranks. The record in ``benchmarks/results/timeline`` also has a call of each ``--picture``;
``benchmarks/taxes.py`` makes the table of docs/lab/taxes.md and the pictures from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import exit_code, keep, parser
from taxfree.benching.bench import candidates
from taxfree.errors import UsageError
from taxfree.measuring.groups import deadline_s, group_for
from taxfree.measuring.trial import try_candidates
from taxfree.profiling import explain, program_trace
from taxfree.profiling.timeline import timelines
from taxfree.shapes import ShapeRequest, choose, format_problem
from taxfree.workers.group import WorkerGroup
from taxfree_cli.asked import Asked, what_is_asked
from taxfree_cli.options import ShapeOptions
from taxfree_kernels.variant import op_of, variants

FOLDER = Path(__file__).parent / "results" / "timeline"
ROUNDS = 3
_GPU_REPETITIONS, _HOST_REPETITIONS = 15, 3  # of a round


@dataclasses.dataclass(frozen=True)
class Row:
    """The cost of the trace of one variant on one problem.

    Args:
        plain_us, noted_us: time per call of the slowest rank without and with the trace, the median
            of each round.
    """

    op: str
    problem: dict[str, Any]
    variant: str
    config: dict[str, Any]
    plain_us: list[float]
    noted_us: list[float]

    @property
    def cost(self) -> float:
        """As a fraction of the plain time."""
        return statistics.median(self.noted_us) / statistics.median(self.plain_us) - 1

    def __str__(self) -> str:
        return (
            f"{format_problem(self.op, self.problem)} {self.variant}: "
            f"{statistics.median(self.plain_us):.2f} us, {self.cost:+.1%} with the trace"
        )


def costs(asked: Asked, plain: WorkerGroup, tracing: WorkerGroup, rounds: int) -> Iterator[Row]:
    """Time every fused variant of each problem.

    Args:
        asked: problems of one world size.
        plain, tracing: ranks of the usual build, and of the instrumented one.
        rounds: number of turns of the two.
    """
    on_host = asked.fabric == "host"
    mode = "eager" if on_host else "graph"
    for problem in asked.problems:
        op = op_of(problem)
        known, _ = candidates(op, problem, plain.hardware, asked.history, asked.only or None)
        taken = [each for each in known if variants(op)[each.variant].fused]
        rows = [
            Row(op, dataclasses.asdict(problem), each.variant, dict(each.config), [], [])
            for each in taken
        ]
        arguments: dict[str, Any] = {
            "deadline_s": deadline_s(plain.hardware),
            "op": op,
            "problem": dataclasses.asdict(problem),
            "candidates": taken,
            "repetitions": _HOST_REPETITIONS if on_host else _GPU_REPETITIONS,
        }
        for _ in range(rounds):
            outcomes = plain.call(try_candidates, modes=(mode,), **arguments)[0]
            traces = tracing.call(program_trace.trace_programs, **arguments)[0]
            for row, outcome, trace in zip(rows, outcomes, traces, strict=True):
                if outcome.state == "measured":
                    row.plain_us.append(outcome.timings[mode].median_us)
                    row.noted_us.append(statistics.median(trace.call_us.max(axis=0).tolist()))
        yield from (row for row in rows if row.plain_us)


def pictures(asked: Asked, shapes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Timelines of shapes: of the library's pipeline, and of the chosen or dispatched variants."""
    first = asked.problems[0]
    request = ShapeRequest(shapes, world_sizes=(first.world_size,), dtype=first.dtype)
    problems = choose(op_of(first), request, lambda: ()).problems if shapes else []
    found = explain.run(problems, asked.fabric, asked.history, asked.only or ())
    for _, explanation in found:
        yield {
            "op": explanation.op,
            "problem": explanation.problem,
            "hardware": explanation.hardware,
            "timelines": [each.to_json() for each in timelines(explanation)],
        }


def main() -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--op", default="all_gather_matmul")
    made.add_argument("--shapes", action="append", help="as of taxfree; the paper's by default")
    made.add_argument("--gpus", help="ranks; all GPUs by default")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--variant", action="append", default=[], help="all fused by default")
    made.add_argument("--picture", action="append", default=[], metavar="SHAPE")
    made.add_argument("--db", type=Path)
    options = made.parse_args()
    return exit_code(lambda: _measure(options))


def _measure(options: argparse.Namespace) -> None:
    given = ShapeOptions(options.op, options.shapes or ["paper"], options.gpus, options.dtype)
    asked = what_is_asked(given, options.fabric, options.db, options.variant)
    world_sizes = {problem.world_size for problem in asked.problems}
    if len(world_sizes) > 1:
        raise UsageError("--gpus must be one number here", "--gpus 4, for example")
    variables = program_trace.variables(asked.fabric)
    rows: list[Row] = []
    drawn: list[dict[str, Any]] = []
    try:
        with (
            group_for(asked.problems, asked.fabric) as plain,
            group_for(asked.problems, asked.fabric, variables) as tracing,
        ):
            for row in costs(asked, plain, tracing, ROUNDS):
                print(row, flush=True)
                rows.append(row)
        for picture in pictures(asked, options.picture):
            drawn.append(picture)
    finally:  # finished rows are kept if a later one fails
        if rows:
            found = {
                "rows": [dataclasses.asdict(row) | {"cost": row.cost} for row in rows],
                "pictures": drawn,
            }
            keep(found, plain, asked.fabric, FOLDER, options.out)


if __name__ == "__main__":
    sys.exit(main())
