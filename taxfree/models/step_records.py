"""What runs a decode step: its kernel with a config, or operations, by the tuning table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from taxfree import fingerprints
from taxfree._runtime.dispatch import Dispatcher
from taxfree_kernels.decode_step import tuned
from taxfree_kernels.decode_step.decoder import Decoder, scales_of
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import unsupported_reason
from taxfree_tuning_db import Measurement, Query, Record, Table, look_up


@dataclass(frozen=True)
class StepChoice:
    """One of the ways to compute a step.

    Args:
        way: "kernel" or "operations"; "library": operations without any of ours.
        config: of the kernel; parameters that are missing are those of its first config.
        why: one line; empty for the kernel where no record serves.
    """

    way: str
    config: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


def problem_of(decoder: Decoder, batch: int, capacity: int, world_size: int) -> tuned.StepProblem:
    """The key of a step's records; the same on all ranks."""
    first = decoder.layers[0]
    scales = scales_of(first)
    return tuned.StepProblem(
        batch=batch,
        context=capacity,
        layers=len(decoder.layers),
        hidden=first.q.shape[1],
        heads=len(first.q) // decoder.head_dim,
        kv_heads=len(first.k) // decoder.head_dim,
        head_dim=decoder.head_dim,
        intermediate=len(first.gate),
        vocabulary=len(decoder.embedding),
        dtype=str(decoder.embedding.dtype).removeprefix("torch."),
        world_size=world_size,
        x_dtype="same" if scales == "none" else "fp8",
        scales=scales,
    )


def choose(problem: tuned.StepProblem, dispatcher: Dispatcher, hardware: Hardware) -> StepChoice:
    """By the record of the problem, or of one within a factor of two; else by the hardware."""
    if dispatcher.is_disabled:
        return StepChoice("operations", why="TAXFREE_DISABLE is set, or ranks differ")
    unsupported = unsupported_reason(tuned.WAYS["kernel"], problem, hardware)
    if unsupported is not None:
        return StepChoice("operations", why=unsupported)
    record = recorded(problem, dispatcher.table, hardware)
    if record is not None:
        return of_record(problem, record)
    if hardware.backend == "interpreter":
        return StepChoice("operations", why="the kernel is interpreted here, and no record asks")
    return StepChoice("kernel")


def recorded(problem: tuned.StepProblem, table: Table, hardware: Hardware) -> Record | None:
    """The record that serves a problem."""
    space = tuned.WAYS["kernel"].space(problem, hardware)

    def illegal_reason(record: Record) -> str | None:
        if (record.problem["batch"] == 1) != (problem.batch == 1):
            return "one sequence is computed in another way than several"
        config = _fastest(record).config
        changed = [name for name, value in config.items() if value not in space.get(name, ())]
        return f"{changed[0]} is not in the space of this problem" if changed else None

    fingerprint = fingerprints.hardware_fingerprint(hardware)
    query = Query(
        tuned.STEP, asdict(problem), fingerprint, fingerprints.software_fingerprint(),
        tuned.VERSIONS, tuned.INTERPOLATED, tuned.IGNORED, fingerprints.NEIGHBOUR_OCTAVES,
        illegal_reason,
    )  # fmt: skip
    found = look_up(table.own(fingerprint), query)
    return found.record if found.is_recorded else None


def of_record(problem: tuned.StepProblem, record: Record) -> StepChoice:
    """The faster of the two ways; the library's graph is not ours to run."""
    fastest = _fastest(record)
    mode = "graph" if "graph" in fastest.median_us else "eager"
    measured = sorted((record.winner, record.baseline, *record.runners_up), key=_ways)
    times = {each.variant: each.median_us[mode] for each in reversed(measured)}
    said = ", ".join(f"{name} {time:.4g} us" for name, time in reversed(times.items()))
    kind = "record" if record.problem == asdict(problem) else "neighbour's record"
    return StepChoice(fastest.variant, fastest.config, f"{kind}: {said}")


def _fastest(record: Record) -> Measurement:
    """Runners-up come in the order of their times."""
    ours = (each for each in (record.winner, *record.runners_up) if each.variant in tuned.WAYS)
    return next(ours, record.baseline)


def _ways(measured: Measurement) -> tuple[str, float]:
    return measured.variant, min(measured.median_us.values())
