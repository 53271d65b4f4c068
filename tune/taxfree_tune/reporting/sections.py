"""The sections of a report, and the figures in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taxfree_tune.reporting import calls, comparisons, models, studies
from taxfree_tune.reporting.call_figures import taxes_of, timeline_of
from taxfree_tune.reporting.comparison_figures import map_of, speedups
from taxfree_tune.reporting.drawing import Figure
from taxfree_tune.reporting.sources import Sources


@dataclass(frozen=True)
class Section:
    """A heading, a few sentences, and figures; without figures, why there are none."""

    name: str
    title: str
    text: str
    figures: tuple[Figure, ...]
    without: str


def sections(sources: Sources) -> list[Section]:
    """All sections of a report."""
    compared = comparisons.rows(comparisons.comparisons(sources))
    return [
        Section(
            "map",
            "Map: fused against the library",
            "A cell is one problem: the library's time over ours. The library's time is that of "
            "its fastest path, in a graph or eager; ours is in a graph where there are graphs. "
            "Orange is slower than the library, blue is faster, grey is within 5 %.",
            tuple(map_of(op, compared) for op in dict.fromkeys(row["op"] for row in compared)),
            "There are no records of problems of this version.",
        ),
        Section(
            "speed-up",
            "Speed-up, with losses",
            "Each mark is a problem. Left of the line at 1, the library is faster.",
            (speedups(compared),) if compared else (),
            "There are no records of problems of this version.",
        ),
        Section(
            "models",
            "Models, end to end",
            "Prefill and decode of a model with random weights, by PyTorch's tensor parallelism "
            "and by taxfree, in each mode. Graphs are of compiled code.",
            _some(models.models_of, models.rows(sources)),
            "No model was measured. The file of taxfree bench --model --out is one: give it with "
            "--results.",
        ),
        Section(
            "taxes",
            "Taxes before and after",
            "Of each pair of bars the upper is an eager call of the library, the lower one of what "
            "dispatch ran. Parts below the bound's are taxes and what is left; negative parts "
            "are drawn to the left of zero.",
            _some(taxes_of, calls.taxes(sources)),
            "No account is at hand. The output of taxfree explain --json is one: give that file "
            "with --results.",
        ),
        Section(
            "studies",
            "Studies",
            "Each tuned problem is a study: candidates in the order in which they were tried, and "
            "the best so far.",
            _some(studies.convergence_of, studies.convergence(sources)),
            "No trials are at hand. Shipped tables hold records without their trials; the database "
            "of taxfree tune holds both: give it with --db.",
        ),
        Section(
            "timeline",
            "Timeline of one call",
            "Steps of the library are bars of a rank. Programs of a fused kernel are thin bars in "
            "the band of their rank: when each computes, waits and sends.",
            _some(timeline_of, calls.timelines(sources)),
            "No timeline is at hand. The file of taxfree explain --trace is one: give it with "
            "--results.",
        ),
    ]


def _some(make: Any, rows: list[dict[str, Any]]) -> tuple[Figure, ...]:
    return (make(rows),) if rows else ()
