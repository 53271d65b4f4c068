"""Calls every variant with kernels of ours very often, and compares every output.

    python -m benchmarks.soak --gpus 4 --calls 1000000

All variants take turns on one pool, and each also runs alone; in captured graphs and eagerly; with
pauses between calls and between the kernels of a call; without pauses, in chains with nothing
between calls; then with pauses also inside kernels. Each case runs with generations that cross the
31-bit and 32-bit limits halfway, and with generations that end just below the limit of the
generation word. The soak stops at the first mismatch (exit code 4) or lost peer (5). The record is
written to ``benchmarks/results/soak``.

Variants that load early what a caller promises to be static run with the promise and without.
``--shapes "all_gather_matmul m=16,128 n=256 k=2048"`` soaks such problems instead of tiny ones.

With ``--share``, more ranks than GPUs share the GPUs, which tests the protocols on the GPU's own
memory, but neither links nor speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import soak_ranks
from benchmarks.commands import exit_code, keep, parser, positive
from benchmarks.soak_ranks import Member, Stretch
from taxfree.errors import TaxfreeError, WrongResult, one_line
from taxfree_kernels.device import peers
from taxfree_kernels.fabric.gpu import SHARING
from taxfree_kernels.variant import operation_names, operation_shapes
from taxfree_tune import devices
from taxfree_tune.shapes import ShapeRequest, expand
from taxfree_tune.workers.group import WorkerGroup

FOLDER = Path(__file__).parent / "results" / "soak"
PAUSES = ("between", "none", "inside")
SHARES = {"graph": 0.85, "eager": 0.15}  # of the calls
TIMEOUT_S = 20.0
DEADLINE_S = 300.0

_END = 2**63 // peers.ONE_CALL.value  # the first generation that overflows its word


@dataclass(frozen=True)
class SoakRow:
    """Calls of one variant alone, or of all in turns, in one mode.

    Args:
        op, variant: of the calls; "all" and "mixed" where they take turns.
        mode: "graph" or "eager".
        pauses: "between" calls and between a call's kernels, or "inside" kernels as well; "none":
            nothing lies between calls.
        calls, mismatches: on each rank, and over all ranks.
        seconds: of the slowest rank; pauses and comparisons included.
        calls_by_variant: "op variant" -> calls; of calls with a promise that their kernel uses,
            "op variant promised".
    """

    op: str
    variant: str
    mode: str
    pauses: str
    calls: int
    mismatches: int
    seconds: float
    calls_by_variant: dict[str, int]

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.pauses:8}{self.mode:6}{self.op} {self.variant}: {self.calls:,} calls, "
            f"{self.mismatches} mismatches, {self.calls_per_s:,.0f} calls/s"
        )


def soak(
    group: WorkerGroup,
    pauses: Sequence[str],
    modes: Sequence[str],
    calls: int,
    seed: int,
    names: Sequence[str] = (),
    problems: Sequence[Any] = (),
    configs: int = 2,
) -> Iterator[SoakRow]:
    """Soak one group of ranks that has run no kernels yet, about `calls` times.

    Args:
        pauses: of :data:`PAUSES`; "inside" alone, because it changes kernels.
        names: of variants; all if there are none.
        problems: tiny ones of all operations if there are none.
        configs: number per variant and problem, see :class:`benchmarks.soak_ranks.Soak`.

    Raises:
        WrongResult: an output differs.
        TaskFailed: a peer was lost.
        TaxfreeError: a variant could not be made ready.
    """
    ready = {"seed": seed, "configs": configs, "names": names, "problems": problems}
    members = _members(group, inside="inside" in pauses, **ready)
    alone: dict[tuple[str, str], list[int]] = {}
    for index, member in enumerate(members):
        alone.setdefault((member.op, member.variant), []).append(index)
    everything = {("all", "mixed"): list(range(len(members)))}
    for kind, mode in itertools.product(pauses, modes):
        share = SHARES[mode] / sum(SHARES[mode] for mode in modes)
        most = calls * share / len(pauses) / 2
        for choices, of_each in ((everything, most), (alone, most / len(alone))):
            for (op, variant), chosen in choices.items():
                yield _row(group, op, variant, mode, kind, members, chosen, of_each)


def _members(group: WorkerGroup, **arguments: Any) -> list[Member]:
    """Prepare the members of a soak on all ranks, with arguments of its `make_ready`.

    Raises:
        TaxfreeError: no config of a variant can be compiled.
    """
    members: list[Member]
    left_out: list[tuple[Member, str]]
    members, left_out = group.call(soak_ranks.make_ready, DEADLINE_S, **arguments)[0]
    there = {(member.op, member.variant) for member in members}
    for member, reason in left_out:
        print(f"left out: {member}: {reason}", file=sys.stderr)
        if (member.op, member.variant) not in there:
            raise TaxfreeError(f"{member.op} {member.variant} cannot be compiled: {reason}")
    return members


def _row(
    group: WorkerGroup,
    op: str,
    variant: str,
    mode: str,
    pauses: str,
    members: Sequence[Member],
    chosen: Sequence[int],
    calls: float,
) -> SoakRow:
    made: Counter[str] = Counter()
    seconds = 0.0
    for first, count in _stretches(calls, mode):
        run = {"members": chosen, "mode": mode, "chained": pauses == "none"}
        run |= {"first_generation": first, "calls": count}
        stretches: list[Stretch] = group.call(soak_ranks.run, DEADLINE_S, **run)
        for rank, stretch in enumerate(stretches):
            _require_right(rank, stretch, members, f"{mode}, pauses {pauses}, from {first} on")
        for member, times in zip(members, stretches[0].calls, strict=True):
            made[f"{member.op} {member.variant}{' promised' * member.promised}"] += times
        seconds += max(stretch.seconds for stretch in stretches)
    by_variant = {name: times for name, times in made.items() if times}
    return SoakRow(op, variant, mode, pauses, made.total(), 0, seconds, by_variant)


def _stretches(calls: float, mode: str) -> list[tuple[int, int]]:
    """First generation and number of calls of each stretch."""
    whole = soak_ranks.GRAPH_CALLS if mode == "graph" else 1
    length = int(-(-calls // (4 * whole))) * whole
    # A call takes one generation, or a few, as copies of a stencil one for each step; the captured
    # ones' first calls take some, too.
    firsts = (0, 2**31 - length // 2, 2**32 - length // 2, _END - 16 * length)
    return [(first, length) for first in firsts]


def _require_right(rank: int, stretch: Stretch, members: Sequence[Member], where: str) -> None:
    wrong = {index: count for index, count in enumerate(stretch.mismatches) if count}
    if not wrong:
        return
    first = min(wrong, key=lambda index: stretch.first_mismatch[index])
    member = members[first]
    raise WrongResult(
        f"{member.op} {member.variant}: {sum(wrong.values())} mismatches on rank {rank} ({where}), "
        f"first in call {stretch.first_mismatch[first]}: {member.problem}, {member.config}"
        f"{', with the promise of static inputs' * member.promised}",
        "the same --seed makes the same calls in the same order",
    )


def record(
    rows: Sequence[SoakRow], seed: int, us_per_load: float, stopped_by: str | None
) -> dict[str, Any]:
    """The content of a record, as JSON.

    Args:
        us_per_load: duration of a pause for each of its loads.
        stopped_by: the error that ended the soak, such as a mismatch; it is in no row.
    """
    calls, seconds = sum(row.calls for row in rows), sum(row.seconds for row in rows)
    longest = soak_ranks.MOST_LOADS * us_per_load
    longest_inside = soak_ranks.MOST_LOADS_INSIDE * us_per_load
    return {
        "seed": seed,
        "pauses": {
            "between": f"half of them; up to {longest:.1f} us before the copies of inputs to a "
            "call, and before its later kernels",
            "inside": f"as between; up to {longest_inside:.1f} us before signals, behind waits",
        },
        "calls": calls,
        "mismatches": sum(row.mismatches for row in rows),
        "stopped_by": stopped_by,
        "seconds": round(seconds, 3),
        "calls_per_s": round(calls / seconds, 1),
        "rows": [dataclasses.asdict(r) | {"calls_per_s": round(r.calls_per_s, 1)} for r in rows],
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--gpus", type=positive, help="ranks; all GPUs by default")
    made.add_argument("--share", action="store_true", help="ranks share the GPUs that are there")
    made.add_argument("--calls", type=positive, default=1_000_000, help="at least, in total")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--variant", dest="names", action="append", default=[], help="only these")
    made.add_argument(
        "--shapes", action="append", default=[], metavar="OP SHAPE",
        help="problems, instead of tiny ones of all operations",
    )  # fmt: skip
    made.add_argument("--configs", type=positive, default=2, help="of each variant and problem")
    made.add_argument("--pauses", choices=PAUSES, nargs="+", default=PAUSES)
    options = made.parse_args()
    return exit_code(lambda: _soak_all(options))


def _soak_all(options: argparse.Namespace) -> None:
    fabric = devices.fabric_for(options.fabric)
    world_size = options.gpus or devices.world_sizes(fabric)[0]
    gpus = devices.available_gpus()
    shared_gpus = gpus if options.share and 0 < gpus < world_size else None
    if shared_gpus is None:
        devices.require(fabric, world_size)
    variables = {} if shared_gpus is None else {SHARING: "1"}
    problems = [problem for text in options.shapes for problem in _problems(text, world_size)]
    tiny = [
        problem for op in operation_names() for problem in operation_shapes(op).tiny(world_size)
    ]
    heap_bytes = devices.heap_bytes(problems or tiny)
    modes = ["eager"] if fabric == "host" else ["graph", "eager"]
    rows: list[SoakRow] = []
    us_per_load, stopped_by = 0.0, None
    try:
        # pauses inside kernels are compiled into them, in new processes
        for inside in (False, True):
            pauses = [pause for pause in options.pauses if (pause == "inside") == inside]
            if not pauses:
                continue
            with WorkerGroup(world_size, fabric, heap_bytes, TIMEOUT_S, variables) as group:
                calls = options.calls * len(pauses) // len(options.pauses)
                for row in soak(
                    group, pauses, modes, calls, options.seed, options.names, problems,
                    options.configs,
                ):  # fmt: skip
                    print(row, flush=True)
                    # not before the first row: a soak needs ranks that have run no kernels
                    us_per_load = us_per_load or max(group.call(soak_ranks.us_per_load, DEADLINE_S))
                    rows.append(row)
    except BaseException as error:
        stopped_by = one_line(error)
        raise
    finally:  # finished rows are kept if a later one fails
        if rows:
            result = record(rows, options.seed, us_per_load, stopped_by)
            longest_us = us_per_load * soak_ranks.MOST_LOADS
            print(
                f"{result['calls']:,} calls, {result['mismatches']} mismatches, "
                f"{result['seconds']:.1f} s, {result['calls_per_s']:,.0f} calls/s; "
                f"the longest pause was {longest_us:.0f} us"
            )
            keep(result, group, fabric, FOLDER, options.out, shared_gpus)


def _problems(text: str, world_size: int) -> list[Any]:
    """The problems of "OP SHAPE", for ranks that the shape does not name."""
    op, _, shape = text.partition(" ")
    return expand(op, ShapeRequest([shape], world_sizes=(world_size,), dtype="bf16"))


if __name__ == "__main__":
    sys.exit(main())
