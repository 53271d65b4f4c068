"""The ranks' side of a model's bench: one model in all modes, checked, and timed together."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh

import taxfree
from taxfree._runtime.collectives import vote
from taxfree._runtime.runtime import Runtime
from taxfree.errors import TaxfreeError, one_line
from taxfree.models.decode import ModelStep
from taxfree.models.step_records import StepChoice
from taxfree_kernels.decode_step.decoder import Cache
from taxfree_kernels.errors import PeerTimeout
from taxfree_kernels.fabric.base import Fabric
from taxfree_tune.benching import decoder
from taxfree_tune.measuring.timer import Timing, capturing, time_together
from taxfree_tune.measuring.trial import ERROR_ALLOWANCE
from taxfree_tune.shapes.models import Model
from taxfree_tuning_db import Record

#: whose tensor parallelism, and how it runs; in the order of tables
MODES: Sequence[tuple[str, str]] = (
    ("torch", "eager"),
    ("torch", "compiled"),
    ("torch", "micro-pipeline"),
    ("torch", "graph"),
    ("taxfree", "eager"),
    ("taxfree", "compiled"),
    ("taxfree", "graph"),
    ("taxfree", "step"),
)
_CHAIN = {"prefill": 4, "decode": 10}  # calls of a repetition on GPUs

_Call = Callable[[], torch.Tensor]


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

    def __str__(self) -> str:
        if self.name == "prefill":
            return f"prefill of {self.length} tokens"
        return f"decode of batch {self.batch} behind {self.length} tokens"


@dataclass(frozen=True)
class ModeOutcome:
    """One mode of a phase.

    Args:
        path: whose tensor parallelism.
        mode: "graph" is compiled code in a captured graph, "step" a `taxfree.decode_step`, in one
            where there are graphs.
        state: "measured", "refused" (it does not serve the phase), "failed" or "wrong".
        reason: one line where it is not measured; of a step that is, what runs it.
        relative_error: of the logits, against the same weights in float64: Frobenius norm of the
            difference over that of the reference; the worst rank's. None where there are none.
        timing: of a call; None where it is not measured.
        allowed_error: what `relative_error` may be, by that of PyTorch's eager mode.
    """

    path: str
    mode: str
    state: str
    reason: str = ""
    relative_error: float | None = None
    timing: Timing | None = None
    allowed_error: float | None = None


def measure_phase(
    fabric: Fabric,
    model: Model,
    dtype: str,
    phase: Phase,
    modes: Sequence[tuple[str, str]],
    records: Sequence[Record],
    repetitions: int,
    tried: Path,
) -> tuple[list[ModeOutcome], dict[str, dict[str, int]]]:
    """Check modes of a phase, then time those that are right; a task of the workers.

    Args:
        modes: some of `MODES`.
        tried: a file that holds the name of a mode while it is tried, which may end the ranks.

    Returns:
        Their outcomes; calls of the runtime, by problem and kind of choice.
    """
    torch.compiler.reset()  # a phase has shapes of its own
    gc.collect()
    with torch.no_grad():
        bench = Bench(fabric, model, getattr(torch, dtype), phase, records)
        exact = bench.exact_logits()
        allowed = ERROR_ALLOWANCE * bench.error(bench.call("torch", "eager")(), exact)
        outcomes = []
        for path, mode in modes:
            if fabric.rank == 0:
                tried.write_text(f"{path} {mode}", encoding="utf-8")
            outcomes.append(bench.check(path, mode, exact, allowed))
        if fabric.rank == 0:
            tried.write_text("", encoding="utf-8")
        right = [outcome for outcome in outcomes if outcome.state == "measured"]
        calls = [(bench.timed(outcome.path, outcome.mode), "eager") for outcome in right]
        chain = _CHAIN[phase.name] if fabric.has_graphs else None
        timings = time_together(fabric, calls, repetitions, chain=chain)
        bench.runtime.check()
    timed = {id(outcome): timing for outcome, timing in zip(right, timings, strict=True)}
    outcomes = [replace(outcome, timing=timed.get(id(outcome))) for outcome in outcomes]
    return outcomes, bench.runtime.stats()


@cache
def _torch_group(fabric: Fabric) -> dist.ProcessGroup:
    """A group for PyTorch's own paths: compiled code runs the operations on the fabric's."""
    group: dist.ProcessGroup = dist.new_group()
    return group


class Bench:
    """One model on the same weights in all modes.

    Args:
        scales: with which steps have layers in fp8, "channel" or "block"; other modes have what
            these stand for. "none": 16 bits.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: Model,
        dtype: torch.dtype,
        phase: Phase,
        records: Sequence[Record],
        scales: str = "none",
    ) -> None:
        self.runtime = Runtime.on_fabric(fabric, records)
        self._fabric, self._model, self._phase = fabric, model, phase
        # Meshes of the same ranks are equal to DTensor, unless their dimensions have other names.
        self._meshes = {
            name: DeviceMesh.from_group(group, fabric.device.type, mesh_dim_names=(name,))
            for name, group in (("torch", _torch_group(fabric)), ("taxfree", fabric.group))
        }
        shape = decoder.parallel_decoder(model, self._meshes["torch"])
        self._weights = decoder.random_weights(shape, fabric.rank, fabric.device, dtype)
        self._in_fp8 = None
        if scales != "none":
            made = decoder.for_step(self._decoder("torch"), fabric.rank)
            self._in_fp8 = decoder.in_fp8(made, scales)
        self._state = self._drawn_state(dtype)
        self._calls: dict[tuple[str, str], _Call] = {}
        self._run_step: Callable[[], Any]
        self._ran = ""

    def _drawn_state(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int, Any]:
        """Tokens, rotary's factors, the first position, and a cache: arguments of the model."""
        model, phase, device = self._model, self._phase, self._fabric.device
        shared = torch.Generator(device).manual_seed(1)
        of_rank = torch.Generator(device).manual_seed(2 + self._fabric.rank)
        start, count = (0, phase.length) if phase.name == "prefill" else (phase.length, 1)
        rows = (phase.tokens,)
        tokens = torch.randint(model.vocabulary, rows, generator=shared, device=device)
        kv_heads = decoder.kv_heads_of_rank(model, self._fabric.world_size)
        size = phase.batch, start + count, kv_heads, model.head_dim
        state = [
            tuple(torch.randn(size, generator=of_rank, device=device, dtype=dtype) for _ in "kv")
            for _ in range(model.layers)
        ]
        rotary = decoder.rotary_factors(start + count, model.head_dim, device)[start:].to(dtype)
        return tokens, rotary, start, state

    def _decoder(self, path: str, is_sequence_parallel: bool = False) -> decoder.Decoder:
        made = decoder.parallel_decoder(self._model, self._meshes[path], is_sequence_parallel)
        decoder.take_weights(made, self._weights)
        if path == "taxfree":
            taxfree.enable(self._meshes[path], made)
        return made

    def call(self, path: str, mode: str) -> _Call:
        """A call of the model in a mode, made once; it returns the logits."""
        made = self._calls.get((path, mode))
        if made is None:
            made = self._calls[path, mode] = self._made(path, mode)
        return made

    def _made(self, path: str, mode: str) -> _Call:
        if mode == "eager":
            return partial(self._decoder(path), *self._state)
        if mode == "graph":
            return self._captured(self.call(path, "compiled"))
        if mode == "step":
            self._run_step, logits, step = self.step()
            self._ran = step.ran
            return logits
        if mode == "compiled":
            return partial(self._decoder(path).compile_parts(), *self._state)
        with self._micro_pipeline():
            made = self._decoder(path, is_sequence_parallel=True).compile_parts()
            call = partial(made, *self._state)
            call()
        return call

    def step(self, choice: StepChoice | None = None) -> tuple[Callable[[], Any], _Call, ModelStep]:
        """A decode step of its own: what is timed, and its logits.

        Args:
            choice: of the way to compute it; by the records when None.
        """
        tokens, _, start, state = self._state
        keys, values = (tuple(layer[i].transpose(1, 2) for layer in state) for i in range(2))
        group = self._fabric.group if self._fabric.world_size > 1 else None
        made = self._in_fp8 or decoder.for_step(self._decoder("torch"), self._fabric.rank)
        step = ModelStep(made, Cache(keys, values), group, choice)
        positions = torch.full_like(tokens, start, dtype=torch.int32)
        call = partial(step, tokens, positions)
        run = self._captured(call) if self._fabric.has_graphs else call

        def logits() -> torch.Tensor:
            run()
            return step.logits

        return run, logits, step

    def _captured(self, call: _Call) -> _Call:
        call()
        self._fabric.barrier()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            logits = call()
        return partial(_replayed, graph, logits, call)

    @contextlib.contextmanager
    def _micro_pipeline(self) -> Iterator[None]:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(self._meshes["torch"].get_group().group_name)
        with inductor_config.patch(_micro_pipeline_tp=True):
            yield

    def timed(self, path: str, mode: str) -> Callable[[int], Any]:
        """What the timer calls; a step gathers no logits, but chooses tokens."""
        call = self._run_step if mode == "step" else self.call(path, mode)
        return lambda _: call()

    # -- logits --

    def check(self, path: str, mode: str, exact: torch.Tensor, allowed: float) -> ModeOutcome:
        """Run a mode once: its outcome, with no time yet; collective.

        Raises:
            TaxfreeError, PeerTimeout: it failed on some ranks, while others wait inside of it.
        """
        reason = self._unsupported_reason(mode)
        if reason:
            return ModeOutcome(path, mode, "refused", reason)
        failure, logits = "", exact
        try:
            logits = self.call(path, mode)()
            self.runtime.check()
        except Exception as raised:
            failure = one_line(raised)
        try:
            failure = next(filter(None, vote(self._fabric.group, failure)), "")
        except PeerTimeout as lost:
            lost.is_secondary = True
            raise TaxfreeError(failure) if failure else lost from None
        if failure:
            if path == "taxfree":
                self.runtime.reset()  # a peer may have been lost
            return ModeOutcome(path, mode, "failed", failure)
        error = self.error(logits, exact)
        if error <= allowed:
            ran = self._ran if mode == "step" else ""
            return ModeOutcome(path, mode, "measured", ran, error, allowed_error=allowed)
        reason = f"relative error {error:.3g}, {allowed:.3g} is allowed"
        return ModeOutcome(path, mode, "wrong", reason, error, allowed_error=allowed)

    def _unsupported_reason(self, mode: str) -> str:
        """The reason why a mode does not serve the phase; empty if it does."""
        if mode == "graph" and not self._fabric.has_graphs:
            return "there are no graphs on a CPU"
        if mode == "step":
            return self._step_unsupported_reason()
        if mode != "micro-pipeline":
            return ""
        if not self._fabric.has_graphs:
            return "symmetric memory of PyTorch needs GPUs"
        if self._phase.tokens % self._fabric.world_size:
            return f"{self._phase.tokens} rows do not divide over {self._fabric.world_size} ranks"
        return ""

    def _step_unsupported_reason(self) -> str:
        if self._phase.name == "prefill":
            return "a step is one token of each sequence"
        attention, mlp = self._model.blocks
        if attention.bias or mlp.bias or self._model.head_bias or any(c.bias for c in mlp.columns):
            return "a step adds biases to q, k and v alone"
        return ""

    def error(self, logits: torch.Tensor, exact: torch.Tensor) -> float:
        """The worst rank's relative error of logits; collective."""
        error = float((logits.double() - exact).norm() / exact.norm())
        worst: float = max(vote(self._fabric.group, error))
        return worst

    def exact_logits(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the same weights in float64, whose layers are converted one by one.

        Args:
            tokens: in place of those that are drawn.
        """
        made = self._decoder("torch")
        drawn, rotary, start, cache = self._state
        tokens = drawn if tokens is None else tokens
        rotary, x = rotary.double(), made.embedding(tokens).double()
        for layer in cache:
            block: Any = made.blocks[0].double()
            block.attention.attend = _attend_by_kv_head
            copies = tuple(states.double() for states in layer)
            normed = block.attention_norm(x)
            x, _ = block(x, normed, torch.nn.Identity(), rotary=rotary, start=start, cache=copies)
            del made.blocks[0]
        logits: torch.Tensor = made.head.double()(made.norm.double()(x[-self._phase.batch :]))
        return logits


def _replayed(graph: torch.cuda.CUDAGraph, logits: torch.Tensor, captured: _Call) -> torch.Tensor:
    """What a graph computes; the call that it captured holds the inputs that it reads."""
    del captured
    graph.replay()
    return logits


def _attend_by_kv_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """In float64 all scores are held at once: those of few heads fit."""
    kv_heads = k.shape[1]
    parts = zip(q.chunk(kv_heads, 1), k.split(1, 1), v.split(1, 1), strict=True)
    return torch.cat([decoder.attend(*part) for part in parts], 1)
