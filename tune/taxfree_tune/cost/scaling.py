"""Times of recorded problems on more ranks, in one node and across nodes: modelled.

A time grows from that of the nearest recorded number of ranks by measured constants alone; nothing
is fitted to times of calls. In microseconds, for W ranks::

    t(W)    = t(recorded) + grown(W) - grown(recorded)
    grown   = bytes / link rate + exchanges * signal(W) + skew(W)
    library = bytes / link rate + collective(W) + skew(W)

`signal` and `collective` grow by the same amount with each peer; `skew` as the expected range of W
equal, normally distributed ranks. A one-shot all-reduce receives W - 1 times the sum, a two-shot
one 2 (W - 1) / W times. Between nodes each rank has a link of its own, and the library's messages
pass a tree of nodes (docs/scaling.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean, linear_regression

from taxfree.problems import recorded_problem
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import Problem, is_library
from taxfree_tune.cost.machines import H200
from taxfree_tune.cost_model import bounds_of
from taxfree_tuning_db import Measurement, Record

GPU = KNOWN["h200"].name  # whose constants these are
PARTS = ("work", "launches", "bytes", "signals", "skew")
LIBRARY = "library"
_CHUNKS = (1, 2, 4)  # of a pipeline of fused kernels and rails
_RAILED = ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter")


@dataclass(frozen=True)
class Constants:
    """What was measured on a number of ranks; times in microseconds.

    Args:
        link_bytes_per_s: received by a rank from all peers.
        skew_us: until the last rank is at the library's collective.
        signal_us: from the last signal's sending to the end of the wait for it.
        collective_us: the library's, on the least data, without skew.
        launch_us, gaps_us: launches of a fused kernel, and between the library's kernels.
    """

    link_bytes_per_s: float
    skew_us: float
    signal_us: float
    collective_us: float
    launch_us: float
    gaps_us: float


#: medians of benchmarks/results/explain/nvidia-h200-x*.json, by number of ranks
MEASURED: Mapping[int, Constants] = {
    2: Constants(361.2e9, 0.85, 0.67, 6.42, 2.12, 1.91),
    4: Constants(354.7e9, 1.61, 0.74, 7.94, 1.96, 1.90),
    8: Constants(346.9e9, 2.61, 1.03, 11.58, 3.61, 1.97),
}


@dataclass(frozen=True)
class Link:
    """A link between nodes: bytes per second that a rank receives, and microseconds one way."""

    bytes_per_s: float
    us: float


@dataclass(frozen=True)
class Recorded:
    """The records of one problem.

    Args:
        op, problem: its fields, without the number of ranks.
        times: ranks -> way -> microseconds in a graph; of ours a way is how bytes grow.
    """

    op: str
    problem: Mapping[str, object]
    times: Mapping[int, Mapping[str, float]]

    def of(self, ranks: int) -> Problem | None:
        """The problem on a number of ranks; None if there is none."""
        return recorded_problem(self.op, {**self.problem, "world_size": ranks})


@dataclass(frozen=True)
class Scaled:
    """A call on a number of ranks, modelled.

    Args:
        ranks, nodes: how many.
        way: "library", or how ours go: "in a node", "flat" (one kernel signals through the links
            between nodes too), "rail" (the library carries shards between nodes).
        parts: microseconds, whose sum is the call; see `PARTS`.
        is_recorded: whether the sum is that of a record.
    """

    ranks: int
    nodes: int
    way: str
    parts: Mapping[str, float]
    is_recorded: bool

    @property
    def us(self) -> float:
        return sum(self.parts.values())


def recorded(records: Iterable[Record]) -> list[Recorded]:
    """The problems of records of `GPU`, with their times; of equal records the first counts."""
    by_problem: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for record in records:
        fields = dict(record.problem)
        ranks = int(fields.pop("world_size", 1))
        key = record.op, json.dumps(fields, sort_keys=True)
        if record.hardware.gpu != GPU or ranks == 1 or ranks in by_problem.get(key, {}):
            continue
        times = _times(record.op, (record.winner, record.baseline, *record.runners_up))
        if LIBRARY in times and recorded_problem(record.op, record.problem) is not None:
            by_problem.setdefault(key, {})[ranks] = times
    return [Recorded(op, json.loads(fields), times) for (op, fields), times in by_problem.items()]


def _times(op: str, measured: Iterable[Measurement]) -> dict[str, float]:
    times: dict[str, float] = {}
    for measurement in measured:
        us, variant = measurement.median_us.get("graph"), measurement.variant
        if us is not None:
            way = LIBRARY if is_library(op, variant) else _exchange(op, variant)
            times[way] = min(us, times.get(way, math.inf))
    return times


def _exchange(op: str, variant: str) -> str:
    """How a variant's bytes grow: only all-reduces have two ways."""
    is_two_shot = op == "matmul_all_reduce" and ("two_shot" in variant or variant == "overlap")
    return "two shots" if is_two_shot else "one shot"


def scaled(
    problem: Recorded, ranks: int, link: Link | None = None, known: Sequence[int] = tuple(MEASURED)
) -> list[Scaled]:
    """A call on a number of ranks: ours, by each way between nodes, and the library's.

    Args:
        link: between nodes, which have as many ranks as the largest record; None for one node.
        known: the numbers of ranks whose records and constants are known.
    """
    model = _Model(problem, tuple(known), link)
    return model.calls(ranks) if model.recorded and problem.of(ranks) is not None else []


def crossing(calls: Sequence[Scaled]) -> int | None:
    """The least number of ranks from which on the library is no slower than ours."""
    least: int | None = None
    for ranks in sorted({call.ranks for call in calls}, reverse=True):
        here = [call for call in calls if call.ranks == ranks]
        ours = min((call.us for call in here if call.way != LIBRARY), default=math.inf)
        if min(call.us for call in here if call.way == LIBRARY) > ours:
            break
        least = ranks
    return least


def left_out(problems: Iterable[Recorded], ranks: int = 8) -> list[tuple[str, float, float]]:
    """Records of a number of ranks beside what fewer ranks predict.

    Returns:
        Operation, and modelled over recorded time - 1, of ours and of the library's.
    """
    known = [count for count in MEASURED if count < ranks]
    compared = []
    for problem in problems:
        if ranks not in problem.times or max(known) not in problem.times:
            continue
        calls, measured = scaled(problem, ranks, known=known), problem.times[ranks]
        ours = [call.us for call in calls if call.way != LIBRARY]
        measured_ours = [us for way, us in measured.items() if way != LIBRARY]
        library = next(call.us for call in calls if call.way == LIBRARY)
        if ours and measured_ours:
            apart = min(ours) / min(measured_ours) - 1
            compared.append((problem.op, apart, library / measured[LIBRARY] - 1))
    return compared


class _Model:
    """What scales one problem."""

    def __init__(self, problem: Recorded, known: tuple[int, ...], link: Link | None) -> None:
        self._problem, self._known, self._link = problem, known, link
        self.recorded = [ranks for ranks in sorted(problem.times) if ranks in known]

    def calls(self, ranks: int) -> list[Scaled]:
        node = max(self.recorded) if self._link else ranks
        nodes = -(-ranks // node)
        ways = ["in a node"] if nodes == 1 else ["flat"] + ["rail"] * (self._problem.op in _RAILED)
        ours = [call for way in ways if (call := self._ours(way, ranks, min(node, ranks)))]
        parts = self._scaled(LIBRARY, LIBRARY, ranks, min(node, ranks))
        is_recorded = ranks in self.recorded
        return [*ours, Scaled(ranks, nodes, LIBRARY, parts, is_recorded)]

    def _ours(self, way: str, ranks: int, node: int) -> Scaled | None:
        """The faster exchange of ours."""
        times = self._problem.times[self._near(ranks)]
        exchanges = [
            self._scaled(exchange, way, ranks, node) for exchange in times if exchange != LIBRARY
        ]
        if not exchanges:
            return None
        best = min(exchanges, key=lambda parts: sum(parts.values()))
        return Scaled(ranks, -(-ranks // node), way, best, ranks in self.recorded)

    def _near(self, ranks: int) -> int:
        return max([count for count in self.recorded if count <= ranks] or self.recorded[:1])

    def _scaled(self, exchange: str, way: str, ranks: int, node: int) -> dict[str, float]:
        """The parts; bytes that the recorded work hides stay hidden."""
        near = self._near(ranks)
        before = self._grown(exchange, LIBRARY if way == LIBRARY else "in a node", near, near)
        work = self._problem.times[near][exchange] - sum(before.values())
        problem = self._problem.of(near)
        assert problem is not None  # it has a record
        hidden = min(before["bytes"], max(0.0, bounds_of(H200, problem).t_floor_us - work))
        parts = self._grown(exchange, way, ranks, node)
        parts["bytes"] -= hidden
        return {"work": work + hidden} | parts

    def _grown(self, exchange: str, way: str, ranks: int, node: int) -> dict[str, float]:
        """What grows with ranks; launches too, where kernels alternate with rails."""
        here, inside = constants(ranks, self._known), constants(node, self._known)
        nodes, link = -(-ranks // node), self._link
        rings = 2 if self._problem.op == "matmul_all_reduce" else 1
        received = self._received(exchange, ranks)
        local = 1e6 * self._received(exchange, node) / inside.link_bytes_per_s
        far = 1e6 * received * (ranks - node) / (ranks - 1) / link.bytes_per_s if link else 0.0
        one_way = link.us if link and nodes > 1 else 0.0
        tree = rings * one_way * math.ceil(math.log2(nodes))
        exchanges = 2 if exchange == "two shots" else 1
        launches, moved = here.launch_us, max(local, far)
        signals = exchanges * (here.signal_us + one_way)
        if way == LIBRARY:
            launches, signals = here.gaps_us, inside.collective_us + tree
            moved = max(1e6 * received / here.link_bytes_per_s, far / node)
        elif way == "rail":
            if rings == 2:
                whole = self._received("two shots", ranks)
                far *= whole / received
            hidden = min(local, far / node)
            exposed, gaps = min(
                ((hidden / chunks, (2 * chunks - 1) * H200.gap_us) for chunks in _CHUNKS), key=sum
            )
            launches, moved = launches + gaps, max(local, far / node) + exposed
            across = MEASURED[2].collective_us + tree
            signals = exchanges * inside.signal_us + across
        return {"launches": launches, "bytes": moved, "signals": signals, "skew": here.skew_us}

    def _received(self, exchange: str, ranks: int) -> float:
        """Bytes of a rank from all peers."""
        problem = self._problem.of(ranks)
        received = 0.0 if problem is None else problem.cost.link_bytes
        is_one_shot = self._problem.op == "matmul_all_reduce" and exchange == "one shot"
        return received * ranks / 2 if is_one_shot else received


@cache
def constants(ranks: int, known: tuple[int, ...]) -> Constants:
    """Measured constants, or those that follow from the numbers of ranks that are known."""
    if ranks in known:
        return MEASURED[ranks]
    if ranks < 2:
        return Constants(math.inf, 0.0, 0.0, 0.0, 0.0, 0.0)
    last = MEASURED[max(known)]
    spread = fmean(MEASURED[count].skew_us / _normal_range(count) for count in known)

    def by_peers(name: str) -> float:
        slope, start = linear_regression(known, [asdict(MEASURED[count])[name] for count in known])
        return start + slope * ranks

    return Constants(
        last.link_bytes_per_s, spread * _normal_range(ranks), by_peers("signal_us"),
        by_peers("collective_us"), last.launch_us, last.gaps_us,
    )  # fmt: skip


@cache
def _normal_range(ranks: int) -> float:
    """The expected largest minus least of so many standard normal numbers."""
    step = 0.01
    shares = (0.5 * (1 + math.erf(step * index / math.sqrt(2))) for index in range(-800, 801))
    return step * sum(1 - share**ranks - (1 - share) ** ranks for share in shares)
