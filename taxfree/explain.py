"""What a call of the library costs, what the dispatcher's pick costs, and why it picks that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from taxfree.bench import DISPATCH, ProblemResult
from taxfree.bounds import Bounds
from taxfree.dispatch import Choice
from taxfree.results import Row, Skipped
from taxfree_tuning_db import Rung

NO_GRAPHS = "interpreted kernels cannot be captured in a graph"


@dataclass(frozen=True)
class Pipeline:
    """One way to compute a problem, with its times in microseconds.

    Args:
        variant, config: what runs.
        launches: kernels of one call, collectives counted as one.
        t_eager_us, t_graph_us: called from the host, and captured in a graph; None where the
            fabric has no such mode.
        is_dispatched: whether the dispatcher picks it; its times are then those of a call through
            the dispatcher.
    """

    variant: str
    config: dict[str, Any]
    launches: int
    t_eager_us: float | None
    t_graph_us: float | None
    is_dispatched: bool


@dataclass(frozen=True)
class Explanation:
    """The pipelines of one problem.

    Args:
        op, problem: what is explained.
        bounds: of the problem.
        pipelines: the baseline first.
        skipped: variants that were asked for and not timed.
        choice, ladder: what the dispatcher picks, why, and the steps of its look-up.
        unmeasured: name of a time -> why no pipeline has it.
    """

    op: str
    problem: dict[str, Any]
    bounds: Bounds
    pipelines: tuple[Pipeline, ...]
    skipped: tuple[Skipped, ...]
    choice: Choice
    ladder: tuple[Rung, ...]
    unmeasured: dict[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """A row per pipeline, as JSON."""
        times = dataclasses.asdict(self.bounds) | {"t_bound_us": self.bounds.t_bound_us}
        common = {"op": self.op, "problem": self.problem}
        return [common | dataclasses.asdict(pipeline) | times for pipeline in self.pipelines]

    def dispatch_json(self) -> dict[str, Any]:
        """What the dispatcher picks and why, as JSON."""
        ladder = [dataclasses.asdict(rung) for rung in self.ladder]
        common = {"op": self.op, "problem": self.problem}
        return common | dataclasses.asdict(self.choice) | {"ladder": ladder}


def explain(result: ProblemResult) -> Explanation:
    """Arrange what `taxfree.bench` measured by pipelines."""
    by_variant: dict[str, list[Row]] = {}
    for row in result.rows:
        by_variant.setdefault(row.variant, []).append(row)
    on_host = result.hardware.backend == "interpreter"
    return Explanation(
        op=result.op,
        problem=dataclasses.asdict(result.problem),
        bounds=result.bounds,
        pipelines=tuple(_pipeline(rows) for rows in by_variant.values()),
        skipped=result.skipped,
        choice=result.choice,
        ladder=result.ladder,
        unmeasured={"t_graph_us": NO_GRAPHS} if on_host else {},
    )


def _pipeline(rows: Sequence[Row]) -> Pipeline:
    row = rows[0]
    is_dispatched = row.variant == DISPATCH
    config = dict(row.config)
    variant = config.pop("variant") if is_dispatched else row.variant
    times = {each.mode: each.median_us for each in rows}
    return Pipeline(
        variant, config, row.launches, times.get("eager"), times.get("graph"), is_dispatched
    )
