"""From what was measured to accounts: one part after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from taxfree_tune.measuring.bounds import Bounds
from taxfree_tune.taxes.account import ALLOWED, INSIDE, NO_GRAPHS, Account, Part, Tax
from taxfree_tune.taxes.critical_path import Inside, inside
from taxfree_tune.taxes.measured import ClockReadings, PipelineMeasurement, ProgramTrace, Times

MOST_SPREAD = 0.25  # of t_eager, between the repetitions of a residual


def accounts(measured: PipelineMeasurement, bounds: Bounds) -> tuple[Account, ...]:
    """Reconcile what was measured, rank by rank."""
    return tuple(_account(measured, bounds, rank) for rank in range(len(measured.eager_us)))


def _account(measured: PipelineMeasurement, bounds: Bounds, rank: int) -> Account:
    eager = measured.eager_us[rank]
    graph = None if measured.graph_us is None else measured.graph_us[rank]
    timed_parts = [] if graph is None else _launch(measured, eager - graph)
    unsplit = [NO_GRAPHS] if graph is None and measured.trace is None else []
    work: Times | None = None
    if measured.trace is not None and measured.trace.shows_programs:
        inner, work = _inside(measured, measured.trace, bounds, rank)
        timed_parts += inner
    elif measured.of_kind("collective"):
        timed_parts += _bulk_synchronous(measured, bounds, rank)
        timed_parts += _locality(measured, rank)
        work = _work(measured, rank) - bounds.t_floor_us
    elif bounds.t_link_us == 0:  # ranks exchange nothing
        work = _kernel_us(measured, measured.in_place, rank).sum(axis=1) - bounds.t_floor_us
    else:
        unsplit.append(INSIDE)
    # A program trace may have another number of repetitions.
    spent = sum(
        (part.us if len(times) != len(eager) else times for part, times in timed_parts), 0 * eager
    )
    parts = tuple(part for part, _ in timed_parts)
    return Account(
        rank,
        float(np.median(eager)),
        None if graph is None else float(np.median(graph)),
        bounds.t_bound_us,
        parts,
        _iqr(eager - spent),
        "; ".join(unsplit),
        None if work is None else float(np.median(work)),
        _iqr(eager),
        _no_account(measured, rank, parts, eager - spent - bounds.t_bound_us),
    )


def _no_account(
    measured: PipelineMeasurement, rank: int, parts: Sequence[Part], residual: Times
) -> str:
    """Why the parts cannot be believed; empty if they can."""
    total = float(np.median(measured.eager_us[rank]))
    reading = float(measured.clock_reading_us()[rank])
    if reading < 0:
        return f"the calls were {-reading:.1f} us a reading faster with clock readings than without"
    steps = np.median(measured.in_place.step_us()[rank], axis=0)
    shortest = int(np.argmin(steps))
    if reading > steps[shortest]:
        return (
            f"a clock reading seems to take {reading:.1f} us, more than the step "
            f"{measured.steps[shortest].name} together with it, {steps[shortest]:.1f}"
        )
    for part in parts:
        allowed = max(ALLOWED * total, 2 * (part.iqr_us or 0.0))
        if part.us < -allowed and part.tax != "graph penalty":
            return f"{part.name} is negative, {part.us:.1f} us, by more than its spread"
    spread = _iqr(residual)
    if spread > MOST_SPREAD * total:
        return f"what is left of a call differs by {spread:.1f} us between repetitions"
    left = float(np.median(residual))
    if left < -max(ALLOWED * total, 2 * spread):
        return f"bound and parts are {-left:.1f} us more than the call, by more than their spread"
    return ""


def _launch(measured: PipelineMeasurement, host: Times) -> list[tuple[Part, Times]]:
    gaps = max(0, measured.kernels - 1)
    method = f"{gaps} x {measured.gap_us:.2f} us, the period of empty kernels in a graph"
    between = Part("gaps", "launch", gaps * measured.gap_us, gaps * measured.gap_iqr_us, method)
    if np.median(host) < 0:
        first = _part("graph penalty", "graph penalty", host, "t_eager - t_graph, negative")
    else:
        first = _part("host", "launch", host, "t_eager - t_graph")
    return [first, (between, np.full_like(host, between.us))]


def _bulk_synchronous(
    measured: PipelineMeasurement, bounds: Bounds, rank: int
) -> list[tuple[Part, Times]]:
    tax: Tax = "bulk synchronous"
    steps = measured.of_kind("collective")  # of some pipelines several, added up
    skew = _skew(measured, measured.in_place, steps, rank)
    error = float(measured.alignment.error_ns.max()) * 1e-3
    parts = [
        _part("skew", tax, skew, f"last rank's arrival - own, clocks aligned to {error:.2f} us")
    ]
    # The part of the link's time that is in the bound cannot be hidden.
    exposed = max(0.0, bounds.t_link_us - bounds.t_floor_us)
    rest = _kernel_us(measured, measured.in_place, rank)[:, steps].sum(axis=1) - skew - exposed
    method = "the collective in its place - skew"
    if measured.latency_probe is not None:
        probe = _kernel_us(measured, measured.latency_probe, rank)[:, steps].sum(axis=1)
        probe = probe - _skew(measured, measured.latency_probe, steps, rank)
        parts.append(
            _part("latency", tax, probe, "the collective on minimal data, in its place - its skew")
        )
        rest, method = rest - np.median(probe), f"{method} - latency"
    if exposed:
        method += f" - {exposed:.1f} us of the bound"
    parts.append(_part("transfer", tax, rest, method))
    return parts


def _skew(
    measured: PipelineMeasurement, readings: ClockReadings, steps: list[int], rank: int
) -> Times:
    """What this rank waits for the last one to arrive at these steps."""
    waits = [readings.skew_us(step, measured.alignment)[rank] for step in steps]
    return np.asarray(np.sum(waits, axis=0), dtype=np.float64)


def _locality(measured: PipelineMeasurement, rank: int) -> list[tuple[Part, Times]]:
    kernel = _kernel_us(measured, measured.in_place, rank)
    parts = [
        _part(
            step.name,
            "locality",
            kernel[:, index],
            "in its place, between clock readings",
            step.memory_bytes,
        )
        for index, step in enumerate(measured.steps)
        if step.kind == "copy"
    ]
    if measured.hot is None:
        return parts
    consumer = measured.of_kind("consumer")[0]
    in_place = measured.in_place.step_us()[rank, :, consumer]
    hot = measured.hot.step_us()[rank, :, consumer]
    method = "in its place - there on an input that was just read"
    if measured.cold is not None:
        limit = np.median(measured.cold.step_us()[rank, :, consumer] - hot)
        method += f"; evicted {limit:+.2f} us"
    step = measured.steps[consumer]
    return [*parts, _part(step.name, "locality", in_place - hot, method, step.memory_bytes)]


def _work(measured: PipelineMeasurement, rank: int) -> Times:
    """Time of producers in their place, and of consumers on an input that was just read."""
    hot = measured.in_place if measured.hot is None else measured.hot
    produced = _kernel_us(measured, measured.in_place, rank)[:, measured.of_kind("producer")]
    consumed = _kernel_us(measured, hot, rank)[:, measured.of_kind("consumer")]
    return np.asarray(produced.sum(axis=1) + consumed.sum(axis=1), dtype=np.float64)


def _inside(
    measured: PipelineMeasurement, trace: ProgramTrace, bounds: Bounds, rank: int
) -> tuple[list[tuple[Part, Times]], Times]:
    """Parts of a fused kernel's account, and its work beyond the bound."""
    calls = [inside(trace, rank, call) for call in range(trace.call_us.shape[1])]
    by_name = {
        field.name: np.array([getattr(call, field.name) for call in calls])
        for field in dataclasses.fields(Inside)
    }
    # The part of the link's time in the bound cannot be hidden; it may show up as senders' work.
    exposed = max(0.0, bounds.t_link_us - bounds.t_floor_us)
    allowed = np.minimum(exposed, by_name["transfer"])
    transfer, work = by_name["transfer"] - allowed, by_name["work"] - (exposed - allowed)
    parts = []
    # Otherwise other kernels of the call ran then, or programs that had not recorded anything.
    if trace.shows_starts and trace.launches == 1:
        method = "a call - from its first program's start to its last one's end"
        parts.append(_part("ends", "launch", by_name["outside"], method))
    else:
        work = work + by_name["outside"] - max(0, measured.kernels - 1) * measured.gap_us
    if trace.shows_starts:
        method = "until critical programs run"
        parts.append(_part("start", "launch", by_name["starting"], method))
    else:
        work = work + by_name["starting"]
    bulk: Tax = "bulk synchronous"
    error = float(measured.alignment.error_ns.max()) * 1e-3
    clocks = f"clocks aligned to {error:.2f} us"
    taken_off = f" - {exposed:.1f} us of the bound" if exposed else ""
    parts += [
        _part("skew", bulk, by_name["skew"], f"waits for a rank whose call began later, {clocks}"),
        _part("latency", bulk, by_name["latency"], "waits after the last signal was sent"),
        _part("transfer", bulk, transfer, f"other waits of critical programs{taken_off}"),
    ]
    return parts, work - bounds.t_floor_us


def _kernel_us(measured: PipelineMeasurement, readings: ClockReadings, rank: int) -> Times:
    """Steps without the clock readings between them and without gaps: [repetition, step]."""
    gaps = measured.gap_us * np.array([step.kernels for step in measured.steps])
    return np.asarray(
        readings.step_us()[rank] - measured.clock_reading_us()[rank] - gaps, dtype=np.float64
    )


def _part(
    name: str, tax: Tax, times: Times, method: str, memory_bytes: int = 0
) -> tuple[Part, Times]:
    part = Part(name, tax, float(np.median(times)), _iqr(times), method, memory_bytes)
    return part, times


def _iqr(times: Times) -> float:
    first, third = np.percentile(times, (25, 75))
    return float(third - first)
