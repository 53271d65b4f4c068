"""The model benchmark on the ranks: one model by all paths, checked, and timed together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh

import taxfree
from benchmarks.llama import (
    Cache,
    Llama,
    Sizes,
    on_meta,
    parallel,
    random_weights,
    take_weights,
)
from taxfree._runtime.collectives import vote
from taxfree._runtime.runtime import Runtime
from taxfree.errors import one_line
from taxfree.models import report
from taxfree_kernels.fabric.base import Fabric
from taxfree_tune.measuring.timer import Timing, time_together
from taxfree_tuning_db import Record

STEPS = 4  # tokens that a check decodes

#: path -> (whose tensor parallelism, whether it is compiled)
PATHS: Mapping[str, tuple[str, bool]] = {
    "one process": ("one process", False),
    "torch eager": ("torch", False),
    "torch compiled": ("torch", True),
    "torch micro-pipeline": ("torch_symm_mem", True),
    "taxfree eager": ("taxfree", False),
    "taxfree compiled": ("taxfree", True),
}


@dataclass(frozen=True)
class Phase:
    """Calls of a model.

    Args:
        name: "prefill": a prompt of `length` tokens; "decode": one token of each of `batch`
            sequences, behind `length` others.
    """

    name: Literal["prefill", "decode"]
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of one call."""
        return self.length if self.name == "prefill" else self.batch


@dataclass(frozen=True)
class PathResult:
    """One path of one phase.

    Args:
        timings: mode -> times of a call; empty where nothing is timed.
        tokens: [step][sequence], chosen behind the reference's tokens.
        same_tokens: how many of them are the reference's.
        largest_gap: between the reference's logits of its token and of the chosen one, in standard
            deviations of its logits: how far from a tie the worst token is.
        relative_error: of the logits, against the same model in float64: Frobenius norm of the
            difference over that of the reference; the worst rank's.
        ran: what taxfree's report counted, by layer.
        skipped: why the path did not run; empty if it did.
    """

    path: str
    timings: Mapping[str, Timing]
    tokens: Sequence[Sequence[int]] = ()
    same_tokens: int = 0
    largest_gap: float = 0.0
    relative_error: float = 0.0
    ran: Mapping[str, Mapping[str, int]] | None = None
    skipped: str = ""


def measure(
    fabric: Fabric,
    sizes: Sizes,
    dtype: str,
    phases: Sequence[Phase],
    paths: Sequence[str],
    records: Sequence[Record],
    repetitions: int,
) -> tuple[list[list[PathResult]], Mapping[str, Mapping[str, int]]]:
    """Check all paths in each phase, and time them; collective.

    Args:
        repetitions: 0 times nothing. Then the reference is a model in one process, on every rank:
            PyTorch's tensor parallelism has no collectives where ranks share a GPU.

    Returns:
        The paths' results by phase; calls of the runtime, by problem and kind of choice.
    """
    models = _Models(fabric, sizes, getattr(torch, dtype), records, is_timed=repetitions > 0)
    with torch.no_grad():
        found = [_measure(fabric, models, each, paths, repetitions) for each in phases]
    models.runtime.check()
    return found, models.runtime.stats()


class _Models:
    """One model in each kind of tensor parallelism, on the same weights."""

    def __init__(
        self,
        fabric: Fabric,
        sizes: Sizes,
        dtype: torch.dtype,
        records: Sequence[Record],
        is_timed: bool,
    ) -> None:
        self.fabric, self.sizes, self.dtype, self.is_timed = fabric, sizes, dtype, is_timed
        self.runtime = Runtime.on_fabric(fabric, records)
        # Meshes of the same ranks are equal to DTensor, unless their dimensions have other names.
        self._meshes = {
            name: DeviceMesh.from_group(group, fabric.device.type, mesh_dim_names=(name,))
            for name, group in (("torch", dist.new_group()), ("taxfree", fabric.group))
        }
        self._own = self._weights([fabric.rank])

    def _weights(self, ranks: Sequence[int]) -> dict[str, torch.Tensor]:
        shape = parallel(self.sizes, self._meshes["torch"])
        return random_weights(shape, self.fabric.device, self.dtype, ranks)

    def model(self, kind: str) -> Llama:
        """The model in a kind of tensor parallelism, or whole."""
        if kind == "one process":
            return take_weights(on_meta(self.sizes), self._weights(range(self.fabric.world_size)))
        mesh = self._meshes["taxfree" if kind == "taxfree" else "torch"]
        model = parallel(self.sizes, mesh, kind == "torch_symm_mem", self.is_timed)
        take_weights(model, self._own)
        if kind == "taxfree":
            taxfree.enable(mesh, model)
        return model

    @property
    def reference(self) -> str:
        """The path whose model is computed in float64, too."""
        return "torch eager" if self.is_timed else "one process"

    def ranks(self, kind: str) -> Sequence[int]:
        """The ranks whose heads a model on this rank has."""
        return range(self.fabric.world_size) if kind == "one process" else [self.fabric.rank]

    @contextlib.contextmanager
    def compiling(self, kind: str) -> Iterator[None]:
        """The compiler's options for a kind of tensor parallelism."""
        if kind != "torch_symm_mem":
            yield
            return
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(self._meshes["torch"].get_group().group_name)
        with inductor_config.patch(_micro_pipeline_tp=True):
            yield


def _measure(
    fabric: Fabric, models: _Models, phase: Phase, paths: Sequence[str], repetitions: int
) -> list[PathResult]:
    torch.compiler.reset()  # a phase has shapes of its own
    kind, _ = PATHS[models.reference]
    exact = _run(models, models.model(kind).double(), kind, torch.float64, phase)
    chosen = exact.argmax(-1)
    results, calls = [], []
    for path in paths:
        report.clear()
        reason, model, logits = _checked(models, path, phase, chosen)
        if logits is None:
            results.append(PathResult(path, {}, skipped=reason))
            continue
        tokens = logits.argmax(-1)
        gaps = exact.amax(-1) - exact.gather(-1, tokens[..., None])[..., 0]
        result = PathResult(
            path,
            {},
            tokens.tolist(),
            same_tokens=int((tokens == chosen).sum()),
            largest_gap=float((gaps / exact.std(-1)).max()),
            relative_error=_error(fabric, logits, exact),
        )
        if PATHS[path][0] == "taxfree":
            result = replace(result, ran=taxfree.report().layers)
        results.append(result)
        state = _state(models, PATHS[path][0], models.dtype, phase)
        has_graph = PATHS[path][1] and phase.name == "decode" and fabric.has_graphs
        for mode in ("eager", "graph") if has_graph else ("eager",):
            calls.append((path, mode, lambda _, model=model, state=state: model(*state)))
    if not repetitions:
        return results
    times = time_together(fabric, [(call, mode) for _, mode, call in calls], repetitions)
    timings: dict[str, dict[str, Timing]] = {}
    for (path, mode, _), timing in zip(calls, times, strict=True):
        timings.setdefault(path, {})[mode] = timing
    return [replace(each, timings=timings.get(each.path, {})) for each in results]


def _unsupported_reason(models: _Models, kind: str, phase: Phase) -> str:
    """The reason why a kind of tensor parallelism does not serve a phase; empty if it does."""
    has_graphs, world_size = models.fabric.has_graphs, models.fabric.world_size
    if kind.startswith("torch") and has_graphs and not models.is_timed:
        return "PyTorch has no collectives for ranks that share a GPU"
    if kind != "torch_symm_mem":
        return ""
    if not has_graphs:
        return "symmetric memory of PyTorch needs GPUs"
    if phase.name == "decode" or phase.length % world_size:
        return "its tokens do not divide over the ranks"
    return ""


def _checked(
    models: _Models, path: str, phase: Phase, chosen: torch.Tensor
) -> tuple[str, Any, torch.Tensor | None]:
    """The reason why a path cannot run; else nothing, its model, and the logits."""
    kind, is_compiled = PATHS[path]
    reason = _unsupported_reason(models, kind, phase)
    if reason:
        return reason, None, None
    try:
        with models.compiling(kind):
            model: Any = models.model(kind)
            model = torch.compile(model, dynamic=False) if is_compiled else model
            logits = _run(models, model, kind, models.dtype, phase, chosen)
    except Exception as error:
        if kind != "torch_symm_mem":  # which may not run on this machine, or only on some ranks
            raise
        reason = one_line(error)
    reason = next(filter(None, vote(models.fabric.group, reason)), "")
    return (reason, None, None) if reason else ("", model, logits)


def _run(
    models: _Models,
    model: Any,
    kind: str,
    dtype: torch.dtype,
    phase: Phase,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits of each step, [steps, batch, vocabulary], behind chosen tokens or its own."""
    tokens, positions, cache = _state(models, kind, dtype, phase)
    found: list[torch.Tensor] = []
    for step in range(STEPS if phase.name == "decode" else 1):
        if step:
            tokens = (found[-1].argmax(-1) if chosen is None else chosen[step - 1])[:, None]
        logits = model(tokens, positions + step, cache)
        if logits.shape[-1] != models.sizes.vocabulary:
            everyone = vote(models.fabric.group, logits.cpu())
            logits = torch.cat(everyone, dim=-1).to(logits.device)
        found.append(logits)
    return torch.stack(found)


def _state(
    models: _Models, kind: str, dtype: torch.dtype, phase: Phase
) -> tuple[torch.Tensor, torch.Tensor, Cache]:
    """Tokens, their positions, and the cache before a call; all drawn at random."""
    sizes, device = models.sizes, models.fabric.device
    world_size = models.fabric.world_size
    common, *own = (
        torch.Generator(device).manual_seed(seed)
        for seed in (1, *(2 + rank for rank in models.ranks(kind)))
    )
    count = phase.length if phase.name == "prefill" else 1
    tokens = torch.randint(sizes.vocabulary, (phase.batch, count), generator=common, device=device)
    first = 0 if phase.name == "prefill" else phase.length
    shape = phase.batch, sizes.kv_heads // world_size, first + max(count, STEPS), sizes.head_dim

    def drawn() -> torch.Tensor:
        parts = [torch.randn(shape, generator=each, device=device) for each in own]
        return torch.cat(parts, dim=1).to(models.dtype).to(dtype)

    cache = [(drawn(), drawn()) for _ in range(sizes.layers)]
    return tokens, torch.arange(first, first + count, device=device), cache


def _error(fabric: Fabric, logits: torch.Tensor, exact: torch.Tensor) -> float:
    own = float((logits.double() - exact).norm() / exact.norm())
    worst: float = max(vote(fabric.group, own))
    return worst
