"""Accounts of taxes and timelines of calls: the rows of bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taxfree import fingerprints
from taxfree.problems import format_problem, recorded_problem
from taxfree_tune.profiling.program_trace import Activity
from taxfree_tune.profiling.timeline import Timeline
from taxfree_tune.reporting.comparisons import family_of
from taxfree_tune.reporting.sources import ResultFile, Sources, iterate
from taxfree_tune.taxes import stacked


def taxes(sources: Sources) -> list[dict[str, Any]]:
    """A row per part of each pipeline's account, in microseconds and in percent of the library's.

    Pipelines of a problem keep their order, the library's first. Panels with the most GPUs come
    first.
    """
    rows = []
    first: dict[str, Mapping[str, Any]] = {}
    order: dict[str, int] = {}
    for file, row in iterate(sources.accounts):
        if recorded_problem(row["op"], row["problem"]) is None:
            continue
        problem = f"{file.source} {row['op']} {sorted(row['problem'].items())}"
        library = first.setdefault(problem, row)
        order[problem] = order.get(problem, -1) + 1
        common = _common(file, row)
        parts = stacked(row)
        end_us = sum(us for us in parts.values() if us > 0)
        for depth, (part, us) in enumerate(parts.items()):
            rows.append(
                common
                | {
                    "size": row["problem"][fingerprints.size_field(row["op"])],
                    "size_field": fingerprints.size_field(row["op"]),
                    "panel": f"{row['op']} {family_of(row['op'], row['problem'])}, "
                    f"{common['gpus']} GPUs, {common['machine']}",
                    "pipeline": order[problem],
                    "variant": row["variant"],
                    "remark": " modelled" if row.get("is_modelled") else "",
                    "part": part,
                    "depth": depth,
                    "us": round(us, 2),
                    "percent": round(100 * us / library["t_eager_us"], 2),
                    "total_us": round(row["t_eager_us"], 2),
                    "end_us": round(end_us, 2),
                    "end_percent": round(100 * end_us / library["t_eager_us"], 1),
                }
            )
    return sorted(rows, key=lambda row: (-row["gpus"], row["op"], row["panel"]))


def _common(file: ResultFile, row: Mapping[str, Any]) -> dict[str, Any]:
    modelled = ", modelled" if row.get("is_modelled") else ""
    return {
        "op": row["op"],
        "gpus": row["problem"]["world_size"],
        "machine": f"{row['hardware']}{modelled}",
        "measured": str(file.environment.get("created", ""))[:10],
        "source": file.source,
    }


def timelines(sources: Sources) -> list[dict[str, Any]]:
    """A row per step or activity of one call of each pipeline, in microseconds.

    Each has the place of its bar.
    """
    rows = []
    for file, entry in iterate(sources.timelines):
        common = _common(file, entry) | {
            "panel": f"{entry['op']} {format_problem(entry['op'], entry['problem'])}, "
            f"{entry['hardware']}"
        }
        for timeline in map(Timeline.from_json, entry["timelines"]):
            pipeline = common | {"variant": timeline.variant}
            for bar in timeline.bars():
                edges = {"top": round(bar.top, 4), "bottom": round(bar.bottom, 4)}
                timed = bar.timed
                times = {"rank": timed.rank, "begin_us": timed.begin_us, "end_us": timed.end_us}
                kind: dict[str, Any] = {"kind": bar.kind}
                if isinstance(timed, Activity):
                    kind["program"] = timed.program
                rows.append(pipeline | edges | times | kind)
    return rows


def spans(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of timelines in sum: a row per pipeline, rank and kind of work."""
    by_place: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["panel"], row["variant"], row["rank"], row["kind"])
        span = by_place.setdefault(key, row | {"count": 0})
        span["count"] += 1
        span["begin_us"] = min(span["begin_us"], row["begin_us"])
        span["end_us"] = max(span["end_us"], row["end_us"])
    return list(by_place.values())
