"""Timelines of one call of each pipeline, as JSON and as Chrome traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from taxfree_tune.profiling.explain import Explanation, Pipeline
from taxfree_tune.profiling.program_trace import Activity, activities
from taxfree_tune.profiling.step_timer import Span

_Timed = TypeVar("_Timed", Span, Activity)


BAND = 0.8  # of the distance from rank to rank


@dataclass(frozen=True)
class Bar:
    """A step or an activity, as pictures show it.

    Args:
        kind: the step's name, or the activity's kind.
        timed: its rank and its times.
        top, bottom: its place, where rank r has the middle r.
    """

    kind: str
    timed: Span | Activity
    top: float
    bottom: float


@dataclass(frozen=True)
class Timeline:
    """One call of a pipeline; times are in microseconds since its first event.

    Args:
        variant: the pipeline.
        steps: on all ranks, if the pipeline consists of several kernels.
        activities: of the programs of a fused kernel, on all ranks.
    """

    variant: str
    steps: tuple[Span, ...] = ()
    activities: tuple[Activity, ...] = ()

    @property
    def ranks(self) -> list[int]:
        """Those that did anything, in order."""
        ranks = {step.rank for step in self.steps}
        return sorted(ranks | {activity.rank for activity in self.activities})

    def bars(self) -> list[Bar]:
        """A step fills the band of its rank; programs share it, the lowest id on top."""
        height = BAND / (1 + max((activity.program for activity in self.activities), default=0))
        tops = (
            (activity, activity.rank - BAND / 2 + activity.program * height)
            for activity in self.activities
        )
        return [
            *(Bar(s.name, s, s.rank - BAND / 2, s.rank + BAND / 2) for s in self.steps),
            *(Bar(activity.kind, activity, top, top + height) for activity, top in tops),
        ]

    def to_json(self) -> dict[str, Any]:
        """As JSON, in hundredths of microseconds."""
        return {
            "variant": self.variant,
            "steps": [_rounded(step) for step in self.steps],
            "activities": [_rounded(activity) for activity in self.activities],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Timeline:
        return cls(
            document["variant"],
            tuple(Span(*fields) for fields in document["steps"]),
            tuple(Activity(*fields) for fields in document["activities"]),
        )


def _rounded(timed: Span | Activity) -> list[Any]:
    fields = dataclasses.astuple(timed)
    return [round(field, 2) if isinstance(field, float) else field for field in fields]


def timelines(explanation: Explanation) -> tuple[Timeline, ...]:
    """One call of each pipeline: its timed steps, or what the programs of a fused kernel did."""
    return tuple(_timeline(pipeline) for pipeline in explanation.pipelines)


def _timeline(pipeline: Pipeline) -> Timeline:
    assert pipeline.timed is not None
    recorded = pipeline.timed.measurement.trace
    if recorded is None:
        return Timeline(pipeline.variant, steps=_from_zero(_middle_call(pipeline)))
    return Timeline(pipeline.variant, activities=_from_zero(tuple(activities(recorded))))


def _middle_call(pipeline: Pipeline) -> tuple[Span, ...]:
    """One call of the chain that was timed, away from its ends."""
    assert pipeline.timed is not None
    steps = len(pipeline.timed.measurement.steps)
    first = pipeline.timed.measurement.calls // 2 * steps
    spans: list[Span] = []
    for rank in range(len(pipeline.accounts)):
        spans_of_rank = [span for span in pipeline.timed.spans if span.rank == rank]
        spans += spans_of_rank[first : first + steps]
    return tuple(spans)


def _from_zero(timed: tuple[_Timed, ...]) -> tuple[_Timed, ...]:
    start = min((activity.begin_us for activity in timed), default=0.0)
    return tuple(
        dataclasses.replace(
            activity, begin_us=activity.begin_us - start, end_us=activity.end_us - start
        )
        for activity in timed
    )


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Timelines as a Chrome trace: a process per pipeline and rank, a track per program."""
    events: list[dict[str, Any]] = []
    process = 0
    for timeline in timelines:
        for rank in timeline.ranks:
            name = {"name": f"{timeline.variant} rank {rank}"}
            events.append({"ph": "M", "pid": process, "name": "process_name", "args": name})
            events += [
                _slice(process, 0, step.name, step) for step in timeline.steps if step.rank == rank
            ]
            events += [
                _slice(process, activity.program, _named(activity), activity)
                for activity in timeline.activities
                if activity.rank == rank
            ]
            process += 1
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _slice(process: int, track: int, name: str, timed: Span | Activity) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "ts": timed.begin_us,
        "dur": timed.end_us - timed.begin_us,
    }


def _named(activity: Activity) -> str:
    return activity.kind if activity.peer is None else f"{activity.kind} {activity.peer}"
