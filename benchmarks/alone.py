"""Times what a rank does by itself, beside the vendor's matmul: one GPU acts as one rank.

    python -m benchmarks.alone --ranks 8

As with ``benchmarks.emulate --alone``: nothing crosses a link, and no kernel waits. Each fused
variant runs at its first seed configs, or those of --try, in one process with the vendor's matmul
of the same local shape, over rotated weights that together exceed L2, so all are timed by the same
chains of calls. The file holds, for each, the time, the vendor's, and the floor: the problem's
bytes at the measured memory bandwidth, or its flops at the measured matmul rate, whichever takes
longer.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import emulate, emulate_ranks
from benchmarks.commands import exit_code, parser, positive
from benchmarks.emulate_ranks import VENDOR, Emulated
from taxfree import devices
from taxfree.errors import UsageError
from taxfree.measuring import environment
from taxfree.measuring.bounds import Peaks, bounds, peaks
from taxfree.measuring.groups import deadline_s
from taxfree.measuring.results import machine_name, write
from taxfree.measuring.trial import Candidate
from taxfree.shapes import ShapeRequest, expand, format_problem
from taxfree.workers.group import WorkerGroup
from taxfree_kernels.fabric.layout import arena_bytes
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import op_of, variants

FOLDER = Path(__file__).parent / "results" / "alone"
#: operation -> shapes: layers of a Llama 70B over eight ranks
SHAPES = {
    "matmul_all_reduce": "m=16,64,256,512,1024,4096 n=8192 k=3584",
    "matmul_reduce_scatter": "m=64,256,1024,4096 n=8192 k=3584",
    "all_gather_matmul": "m=1,16,64,128,256,512,1024 n=3584 k=8192 gather_dim=1",
}
_SEEDS = 2  # configs of each variant


def seed_candidates(problem: Any, hardware: Hardware) -> list[Candidate]:
    """The first seed configs of each fused variant that is searched and serves a problem."""
    return [
        Candidate(name, config)
        for name, variant in variants(op_of(problem)).items()
        if variant.fused and variant.searched
        if variant.unsupported_reason(problem, hardware) is None
        for config in variant.seed_configs(problem, hardware)[:_SEEDS]
    ]


def measure(
    problems: Sequence[Any], fabric: str, repetitions: int, attempts: Sequence[str] = ()
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Time all candidates of problems, each with the vendor's matmul, on one rank.

    Args:
        attempts: see :func:`benchmarks.emulate.candidates`; without any, seed configs are timed.

    Yields:
        After each problem, the environment's record and the problem's rows.
    """
    arenas = [arena_bytes(problem.slot_bytes) for problem in problems]
    ranks = max(problem.world_size for problem in problems)
    heap = arena_bytes(ranks * max(arenas))
    with WorkerGroup(1, fabric, heap, emulate_ranks.TIMEOUT_S) as group:
        deadline = deadline_s(group.hardware)
        rates = group.call(peaks, deadline, dtype=problems[0].dtype)[0]
        machine = environment.record(fabric, group.hardware)
        machine["peaks"] = [dataclasses.asdict(rates) | {"link_bytes_per_s": None}]
        for problem, arena in zip(problems, arenas, strict=True):
            op, tried = op_of(problem), seed_candidates(problem, group.hardware)
            if attempts:
                tried = emulate.candidates(op, problem, group.hardware, attempts)
            found = group.call(
                emulate_ranks.emulate, deadline, op=op, problem=dataclasses.asdict(problem),
                candidates=tried, arena_bytes=arena, repetitions=repetitions, beside_vendor=True,
            )[0]  # fmt: skip
            yield machine, _rows(problem, found, rates)


def _rows(problem: Any, found: Sequence[Emulated], rates: Peaks) -> list[dict[str, Any]]:
    """The rows of a problem, the fastest first."""
    op, floor = op_of(problem), bounds(problem.cost, rates, None).t_floor_us
    vendor = next(each for each in found if each.candidate.variant == VENDOR).timing
    assert vendor is not None
    rows = [
        {
            "op": op,
            "problem": dataclasses.asdict(problem),
            "variant": each.candidate.variant,
            "config": dict(each.candidate.config),
            "median_us": each.timing.median_us,
            "iqr_us": each.timing.iqr_us,
            "vendor_us": vendor.median_us,
            "floor_us": floor,
        }
        for each in found
        if each.timing is not None and each.candidate.variant != VENDOR
    ]
    return sorted(rows, key=lambda row: float(row["median_us"]))


def main() -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=positive, default=8, help="ranks, of which one is played")
    made.add_argument("--repetitions", type=positive, default=12, help="of a chain of calls")
    made.add_argument("--op", choices=SHAPES, help="one operation; all by default")
    made.add_argument("--shapes", action="append", help="with --op, instead of its usual shapes")
    made.add_argument(
        "--try", dest="attempts", action="append", default=[], metavar="VARIANT",
        help="with --op, instead of seed configs: as of benchmarks.emulate",
    )  # fmt: skip
    options = made.parse_args()
    return exit_code(lambda: _write(options))


def _write(options: Any) -> None:
    fabric = devices.fabric_for(options.fabric)
    devices.require(fabric, 1)
    if (options.shapes or options.attempts) and options.op is None:
        raise UsageError("--shapes and --try are of one operation", "name it with --op")
    problems = [
        problem
        for op in ([options.op] if options.op else SHAPES)
        for problem in expand(
            op,
            ShapeRequest(
                options.shapes or [SHAPES[op]], world_sizes=(options.ranks,), dtype="bf16"
            ),
        )
    ]
    rows: list[dict[str, Any]] = []
    for machine, found in measure(problems, fabric, options.repetitions, options.attempts):
        _print(found)
        rows += found
        if options.out or fabric != "host":
            gpu = machine_name(machine["hardware"]["gpu"])
            document = {"schema": 1, "environment": machine, "rows": rows}
            write(options.out or FOLDER / f"{gpu}.json", json.dumps(document, indent=1) + "\n")


def _print(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    limits = f"vendor {first['vendor_us']:.1f}, floor {first['floor_us']:.1f}"
    print(f"{format_problem(first['op'], first['problem'])}: {limits}")
    for row in rows:
        config = " ".join(f"{name}={value}" for name, value in row["config"].items())
        print(f"  {row['median_us']:9.1f} us alone  {row['variant']} {config}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
