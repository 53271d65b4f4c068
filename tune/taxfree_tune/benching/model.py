"""Measures a model end to end: prefill and decode with random weights, by PyTorch and by taxfree.

All modes of a phase run interleaved in one task of the rank workers, on the same weights. A mode
that fails, or is less exact than PyTorch's eager one may be, leaves the others their rows.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from taxfree.errors import TaxfreeError, UsageError
from taxfree.problems import DTYPE_ALIASES
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_tune.benching import decoder, model_tasks
from taxfree_tune.benching.model_tasks import MODES, ModeOutcome, Phase
from taxfree_tune.measuring import environment
from taxfree_tune.measuring.groups import group_for
from taxfree_tune.shapes.models import Model, load_model, split_layers
from taxfree_tune.tuning.history import TuningHistory
from taxfree_tune.workers.group import Workers

_DEADLINE_S = 1800.0  # of a phase: compiling many layers takes minutes
_GPU_REPETITIONS, _HOST_REPETITIONS = 15, 3
#: what a mode of taxfree is compared with: PyTorch's modes that launch in the same way
_ALIKE: Mapping[str, Sequence[str]] = {
    "eager": ("eager",),
    "compiled": ("compiled", "micro-pipeline"),
    "graph": ("graph",),
    "step": ("graph",),
}


@dataclass(frozen=True)
class ModelBench:
    """What is measured.

    Args:
        name: as it was given.
        model: the dimensions, with the layers and the vocabulary that are measured.
        dtype: of weights and activations.
        ranks: over which the model is split.
        phases, modes: in this order; modes are some of `MODES`.
    """

    name: str
    model: Model
    dtype: str
    ranks: int
    phases: Sequence[Phase]
    modes: Sequence[tuple[str, str]] = MODES

    def problems(self) -> list[MatmulAllReduce]:
        """The operations between ranks: eager, and as compiled code may fuse them."""
        sums: list[dict[str, Any]] = split_layers("sum", self.model, self.ranks, is_cast=True)
        return [
            MatmulAllReduce(m=phase.tokens, dtype=self.dtype, world_size=self.ranks, **fields)
            for phase in self.phases
            for fields in sums
        ]

    def to_json(self) -> dict[str, Any]:
        """The model as result files have it."""
        return {"name": self.name, **dataclasses.asdict(self.model), "dtype": self.dtype}


def model_to_bench(
    name: str, ranks: int, layers: int | None, dtype: str | None, in_fp8: bool = False
) -> tuple[Model, str]:
    """A model that can be measured, and the dtype in which it computes.

    Args:
        name: of a known model, or a path of a config.
        ranks: the vocabulary is padded to a multiple of them.
        layers: of the model; None for all.
        dtype: in place of the config's; what is quantised is then of this type, too.
        in_fp8: whether layers may be in fp8, as steps have them.

    Raises:
        UsageError: there is no such model, it is not of Llama's family, computes in no type of the
            operations, or does not split.
    """
    model = load_model(name)
    sees_all = [attention.window for attention in model.attentions] == [0]
    if model.family not in decoder.FAMILIES or not sees_all or model.head_dim % 2:
        raise UsageError(
            f"{name} is no dense model of {', '.join(decoder.FAMILIES)} without windows",
            "--shapes model measures the operations of its layers",
        )
    unserved = next((block.quantised for block in model.blocks if block.quantised), None)
    if in_fp8 and model.scales != "none":
        unserved = None
    if not (unserved or model.is_served):
        unserved = model.dtype
    if unserved and dtype is None and any(block.scales for block in model.blocks):
        raise UsageError(
            f"{name} has layers in {unserved}, which PyTorch's styles of tensor parallelism do not "
            "split: a whole model is measured beside these",
            "--shapes model measures their operations, tune --op decode_step a step of them; "
            "--dtype bf16 measures the model in a 16-bit type",
        )
    if unserved and dtype is None:
        raise UsageError(
            f"{name} computes in {unserved}, which the operations do not",
            "--dtype bf16 measures it in a 16-bit type",
        )
    if dtype is not None:
        blocks = tuple(replace(block, quantised="", scales="") for block in model.blocks)
        model = replace(model, blocks=blocks)
    split_layers("sum", model, ranks, is_cast=True)
    if layers is not None and layers > model.layers:
        raise UsageError(f"{name} has {model.layers} layers, not {layers}", "give fewer --layers")
    vocabulary = -(-model.vocabulary // ranks) * ranks
    model = replace(model, layers=layers or model.layers, vocabulary=vocabulary)
    return model, DTYPE_ALIASES.get(dtype or "", dtype) or model.dtype or "bfloat16"


@dataclass(frozen=True)
class PhaseResult:
    """One phase, measured.

    Args:
        phase: which.
        outcomes: of the modes, in their order.
        problems: calls of the operations, by problem and kind of choice, such as "exact".
        hardware: of a rank's device.
    """

    phase: Phase
    outcomes: Sequence[ModeOutcome]
    problems: Mapping[str, Mapping[str, int]]
    hardware: Hardware

    @property
    def is_interpreted(self) -> bool:
        """Whether times are those of a CPU, which are not compared."""
        return self.hardware.backend == "interpreter"

    def tokens_per_s(self, outcome: ModeOutcome) -> float | None:
        """Of a mode that was timed."""
        timing = outcome.timing
        return None if timing is None else self.phase.tokens * 1e6 / timing.median_us

    def speedup(self, outcome: ModeOutcome) -> float | None:
        """A mode of taxfree over PyTorch's fastest that is launched alike; None for others."""
        if outcome.path == "torch" or outcome.timing is None or self.is_interpreted:
            return None
        times = [
            other.timing.median_us
            for other in self.outcomes
            if other.path == "torch" and other.mode in _ALIKE[outcome.mode] and other.timing
        ]
        return min(times) / outcome.timing.median_us if times else None


def run(bench: ModelBench, fabric: str, history: TuningHistory) -> Iterator[PhaseResult]:
    """Measure the phases of a model.

    Ranks that a mode ends, or leaves waiting for each other, are started again: the mode has
    failed, and the phase is measured without it.

    Args:
        fabric: "host", "cuda" or "rocm".
        history: gives the records that the dispatcher uses.

    Yields:
        Each phase as soon as it is measured. Closing the iterator ends the workers.

    Raises:
        TaxfreeError: the workers do not start.
    """
    problems = bench.problems()
    with (
        tempfile.TemporaryDirectory() as folder,
        Workers(lambda: group_for(problems, fabric)) as workers,
    ):
        for phase in bench.phases:
            yield _measured(workers, bench, phase, history, Path(folder, "tried"))


def _measured(
    workers: Workers, bench: ModelBench, phase: Phase, history: TuningHistory, tried: Path
) -> PhaseResult:
    lost: dict[tuple[str, str], ModeOutcome] = {}
    while True:
        group = workers.group()
        hardware = group.hardware
        is_interpreted = hardware.backend == "interpreter"
        modes = [mode for mode in bench.modes if mode not in lost]
        tried.write_text("", encoding="utf-8")
        try:
            outcomes, problems = group.call(
                model_tasks.measure_phase, _DEADLINE_S, model=bench.model, dtype=bench.dtype,
                phase=phase, modes=modes, records=history.records,
                repetitions=_HOST_REPETITIONS if is_interpreted else _GPU_REPETITIONS, tried=tried,
            )[0]  # fmt: skip
        except TaxfreeError as error:
            path, _, mode = tried.read_text(encoding="utf-8").partition(" ")
            broken = [(path, mode)] if mode else modes
            lost |= {failed: ModeOutcome(*failed, "failed", error.message) for failed in broken}
            if mode:
                continue
            outcomes, problems = [], {}
        by_mode = lost | {(outcome.path, outcome.mode): outcome for outcome in outcomes}
        return PhaseResult(phase, [by_mode[mode] for mode in bench.modes], problems, hardware)


def document(bench: ModelBench, fabric: str, results: Sequence[PhaseResult]) -> dict[str, Any]:
    """The content of a result file, as JSON.

    Args:
        fabric: that they were measured on.
        results: at least one.
    """
    return {
        "schema": 1,
        "environment": environment.record(fabric, results[0].hardware),
        "model": bench.to_json(),
        "rows": [row for result in results for row in _rows(bench, result)],
        "skipped": [
            {
                "phase": dataclasses.asdict(result.phase),
                **{name: getattr(outcome, name) for name in ("path", "mode", "state", "reason")},
            }
            for result in results
            for outcome in result.outcomes
            if outcome.state != "measured"
        ],
        "problems": {str(result.phase): result.problems for result in results},
    }


def _rows(bench: ModelBench, result: PhaseResult) -> Iterator[dict[str, Any]]:
    for outcome in result.outcomes:
        if outcome.timing is not None:
            yield {
                "model": bench.name,
                "layers": bench.model.layers,
                "world_size": bench.ranks,
                "phase": dataclasses.asdict(result.phase),
                "path": outcome.path,
                "mode": outcome.mode,
                "median_us": outcome.timing.median_us,
                "iqr_us": outcome.timing.iqr_us,
                "tokens_per_s": result.tokens_per_s(outcome),
                "speedup": result.speedup(outcome),
                "relative_error": outcome.relative_error,
                "allowed_error": outcome.allowed_error,
                "samples_us": outcome.timing.samples_us,
                **({"ran": outcome.reason} if outcome.reason else {}),
            }
