"""Times what a rank does by itself, beside the vendor's matmul: one GPU acts as one rank.

    python -m benchmarks.alone --ranks 8

As with ``benchmarks.emulate --alone`` nothing crosses a link. With absent peers no kernel waits;
with alike ones programs wait for those of their own rank, see :mod:`benchmarks.emulate_ranks`. Each
fused variant runs at its first seed configs, or those of --try, in one process with the vendor's
kernel of the same local shape, over rotated inputs that together exceed L2, so all are timed by the
same chains of calls. Decode attention is that of one rank, whose vendor is cuDNN. The file holds,
for each, the time, the vendor's, and the floor: the problem's bytes at the measured memory
bandwidth, or its flops at the measured matmul rate, whichever takes longer. `is_first` says whether
a search would begin with it: the first seed config of a variant that is searched. A config that can
use a promise of static weights, or of a static cache, is timed without it and with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks import emulate, emulate_ranks
from benchmarks.commands import exit_code, parser, positive
from benchmarks.documents import us
from benchmarks.emulate_ranks import VENDOR, Emulated, PeersAre
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
#: operation -> shapes: layers of a Llama 70B over eight ranks, and decode attention of one
SHAPES = {
    "matmul_all_reduce": "m=16,64,256,512,1024,4096 n=8192 k=3584",
    "matmul_reduce_scatter": "m=64,256,1024,4096 n=8192 k=3584",
    "all_gather_matmul": "m=1,16,64,128,256,512,1024 n=3584 k=8192 gather_dim=1",
    "flash_decode": "batch=1 kv_len_per_rank=8192,16384,32768 q_heads=96 kv_heads=12 head_dim=128 "
    "dtype=fp16 world_size=1",
}
SEEDS = 2  # configs of each variant

#: the candidates of a problem on some hardware
Choose = Callable[[Any, Hardware], list[Candidate]]


def seed_candidates(problem: Any, hardware: Hardware, seeds: int = SEEDS) -> list[Candidate]:
    """The first seed configs of each variant that is searched, and fused for several ranks."""
    return [
        Candidate(name, config)
        for name, variant in variants(op_of(problem)).items()
        if variant.fused or problem.world_size == 1
        if variant.searched
        if variant.unsupported_reason(problem, hardware) is None
        for config in variant.seed_configs(problem, hardware)[:seeds]
    ]


def usual_problems(op: str, ranks: int, shapes: Sequence[str] = ()) -> list[Any]:
    """Problems of an operation: its usual ones, or those of `shapes`."""
    request = ShapeRequest(shapes or [SHAPES[op]], world_sizes=(ranks,), dtype="bf16")
    return expand(op, request)


def measure(
    problems: Sequence[Any],
    fabric: str,
    repetitions: int,
    choose: Choose = seed_candidates,
    peers: PeersAre = "absent",
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Time all candidates of problems, each with the vendor's kernel, on one rank.

    Yields:
        After each problem with candidates, the environment's record and the problem's rows.
    """
    arenas = [arena_bytes(problem.slot_bytes) for problem in problems]
    ranks = max(problem.world_size for problem in problems)
    heap = arena_bytes(ranks * max(arenas))
    with WorkerGroup(1, fabric, heap, emulate_ranks.TIMEOUT_S) as group:
        deadline = deadline_s(group.hardware)
        machine = environment.record(fabric, group.hardware)
        rates: dict[str, Peaks] = {}
        for problem, arena in zip(problems, arenas, strict=True):
            tried = choose(problem, group.hardware)
            if not tried:
                continue
            found = group.call(
                emulate_ranks.emulate, deadline, op=op_of(problem),
                problem=dataclasses.asdict(problem), candidates=tried,
                arena_bytes=arena, repetitions=repetitions, beside_vendor=True, peers=peers,
            )[0]  # fmt: skip
            # after an emulation, which must come before any other kernel of the process
            dtype = problem.dtype
            if dtype not in rates:
                rates[dtype] = group.call(peaks, deadline, dtype=dtype)[0]
            machine["peaks"] = [dataclasses.asdict(rates[dtype]) | {"link_bytes_per_s": None}]
            first = seed_candidates(problem, group.hardware, 1)
            yield machine, _rows(problem, found, rates[dtype], first, peers)


def _rows(
    problem: Any,
    found: Sequence[Emulated],
    rates: Peaks,
    first: Sequence[Candidate],
    peers: PeersAre,
) -> list[dict[str, Any]]:
    """The rows of a problem, the fastest first."""
    op, floor = op_of(problem), bounds(problem.cost, rates, None).t_floor_us
    vendor = next((e.timing for e in found if e.candidate.variant == VENDOR), None)
    rows = [
        {
            "op": op,
            "problem": dataclasses.asdict(problem),
            "variant": each.candidate.variant,
            "config": dict(each.candidate.config),
            "is_first": each.candidate in first and not each.promised,
            "promised": each.promised,
            "peers": peers,
            "median_us": each.timing.median_us,
            "iqr_us": each.timing.iqr_us,
            "vendor_us": vendor and vendor.median_us,
            "floor_us": floor,
        }
        for each in found
        if each.timing is not None and each.candidate.variant != VENDOR
    ]
    for each in found:
        if each.reason:
            print(f"  not timed: {each.candidate.variant}: {each.reason}", flush=True)
    return sorted(rows, key=lambda row: float(row["median_us"]))


def main() -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=positive, default=8, help="ranks, of which one is played")
    made.add_argument("--repetitions", type=positive, default=12, help="of a chain of calls")
    made.add_argument("--op", choices=SHAPES, help="one operation; all by default")
    made.add_argument("--shapes", action="append", help="with --op, instead of its usual shapes")
    add_choices(made)
    options = made.parse_args()
    return exit_code(lambda: _write(options))


def add_choices(made: argparse.ArgumentParser) -> None:
    """Add the options of peers and of candidates."""
    made.add_argument(
        "--peers", choices=get_args(PeersAre), nargs="+", default=["absent"],
        help="waited for by nobody, or as fast as this rank; both may be given",
    )  # fmt: skip
    made.add_argument(
        "--try", dest="attempts", action="append", default=[], metavar="VARIANT",
        help='instead of seed configs, as of benchmarks.emulate: "m=64 push num_warps=4,8"',
    )  # fmt: skip
    made.add_argument(
        "--seeds", type=int, help=f"seed configs of each variant: {SEEDS}, or 0 with --try"
    )


def chooser(options: argparse.Namespace) -> Choose:
    """The candidates that the command line asks for, by options of :func:`add_choices`."""
    seeds = options.seeds
    if seeds is None:
        seeds = 0 if options.attempts else SEEDS

    def choose(problem: Any, hardware: Hardware) -> list[Candidate]:
        found = seed_candidates(problem, hardware, seeds)
        if options.attempts:
            tried = emulate.candidates(op_of(problem), problem, hardware, options.attempts)
            found += [each for each in tried if each not in found]
        return found

    return choose


def _write(options: argparse.Namespace) -> None:
    fabric = devices.fabric_for(options.fabric)
    devices.require(fabric, 1)
    if options.shapes and options.op is None:
        raise UsageError("--shapes are of one operation", "name it with --op")
    problems = [
        problem
        for op in ([options.op] if options.op else SHAPES)
        for problem in usual_problems(op, options.ranks, options.shapes)
    ]
    choose = chooser(options)
    rows: list[dict[str, Any]] = []
    for peers in options.peers:
        # one rank has no peers
        played = [each for each in problems if peers == "absent" or each.world_size > 1]
        for machine, found in measure(played, fabric, options.repetitions, choose, peers):
            _print(found)
            rows += found
            if options.out or fabric != "host":
                gpu = machine_name(machine["hardware"]["gpu"])
                document = {"schema": 1, "environment": machine, "rows": rows}
                write(options.out or FOLDER / f"{gpu}.json", json.dumps(document, indent=1) + "\n")


def _print(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    first = rows[0]
    limits = f"vendor {us(first['vendor_us'])}, floor {us(first['floor_us'])}"
    said = format_problem(first["op"], first["problem"])
    print(f"{first['op']} {said}, peers {first['peers']}: {limits}")
    for row in rows:
        config = " ".join(f"{name}={value}" for name, value in row["config"].items())
        promised = ", promised" * row["promised"]
        print(
            f"  {row['median_us']:9.1f} us alone  {row['variant']} {config}{promised}", flush=True
        )


if __name__ == "__main__":
    sys.exit(main())
