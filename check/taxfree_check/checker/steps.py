"""Schedules of a decode step, by its twin: a tiny model, whose tokens and logits are compared.

The exact step is that of the operations, in float64, on the whole model. All ranks, and all
schedules, have to get the same bits; to see it, some models have the same head on every rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch

from taxfree.models.decode import ModelStep
from taxfree_check.checker.fabric import SimulatedFabric, Simulation
from taxfree_check.checker.report import Reason, Violation
from taxfree_check.checker.simulate import Call, ScheduleOutcome
from taxfree_check.checker.trial import FIRST_GENERATIONS
from taxfree_check.decoders import in_fp8, part_of
from taxfree_kernels.decode_step.decoder import SCALED, Cache, Decoder, Layer
from taxfree_kernels.decode_step.twin import TwinStep
from taxfree_kernels.fp8 import dequantised, quantised

_CALLS = 5  # a slot of Lamport words that the wrong turn takes is then in use
_PROGRAMS = (2, 3)
_TOLERANCE = 1e-4  # of the largest logit, in float32
_HEAD_DIM, _HIDDEN, _WIDE, _VOCAB, _CAPACITY = 4, 8, 8, 8, 12  # of a rank; hidden of all


@dataclass(frozen=True)
class StepProblem:
    """A tiny model, in float32.

    Args:
        layers: an area of sums is emptied behind q, k and v for the third one.
        has_same_head: each rank's part of the vocabulary has the same rows.
        has_all: biases, norms of queries and keys, and a window in one layer.
        scales: of weights in fp8, see ``decoder.scales_of``.
    """

    world_size: int
    batch: int = 1
    layers: int = 2
    has_same_head: bool = False
    has_all: bool = False
    scales: str = "none"


def tiny(world_size: int) -> list[StepProblem]:
    """Problems that together execute every synchronising line."""
    small = StepProblem(world_size)
    return [
        small,
        replace(small, batch=2, has_all=True),
        replace(small, layers=3, has_same_head=True),
    ]


def scaled(world_size: int) -> list[StepProblem]:
    """Problems with weights in fp8."""
    small = StepProblem(world_size)
    return [
        replace(small, batch=2, scales="channel"),
        replace(small, scales="block", has_same_head=True),
    ]


@dataclass(frozen=True)
class Model:
    """The whole, and each rank's part; what the calls are given."""

    whole: Decoder
    parts: list[Decoder]
    tokens: torch.Tensor  # [calls, batch]
    positions: torch.Tensor


class StepTrial:
    """One schedule: calls of a step on all ranks, back to back.

    Args:
        seed: of the schedule, and of what is drawn for it.
    """

    def __init__(self, problem: StepProblem, seed: int) -> None:
        rng = Random(seed)
        self._problem, self._seed = problem, seed
        self._programs, self._first = rng.choice(_PROGRAMS), rng.choice(FIRST_GENERATIONS)
        self._config = {name: rng.choice((1, 2)) for name in ("SPLITS", "DOWN_PARTS", "XCDS")}
        self._results: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []

    def run(self) -> ScheduleOutcome:
        """Run the schedule, and compare tokens and logits of all calls."""
        outcome = Simulation(self._problem.world_size).run(
            self._setup, self._seed, first_generation=self._first, co_resident=True
        )
        if outcome.violation is not None:
            return outcome
        return replace(outcome, violation=self._wrong_result())

    def _setup(self, fabric: SimulatedFabric) -> list[Call]:
        if fabric.rank == 0:
            self._results = []
        part, held = model(self._problem).parts[fabric.rank], cache(self._problem, fabric.rank, 1)
        step = TwinStep(part, held, self._problem.batch, fabric, self._config, self._programs)
        return [partial(self._call, fabric.rank, step, number) for number in range(_CALLS)]

    def _call(self, rank: int, step: TwinStep, number: int) -> None:
        drawn = model(self._problem)
        tokens = step(drawn.tokens[number], drawn.positions[number])
        self._results.append((rank, number, tokens.clone(), step.logits.clone()))

    def _wrong_result(self) -> Violation | None:
        wanted = exact(self._problem)
        for rank, number, tokens, logits in self._results:
            whole = wanted[number]
            part = whole.chunk(self._problem.world_size, 1)[rank]
            error = (logits.double() - part).abs().max() / whole.abs().max()
            first = whole.argmax(1)
            if error <= _TOLERANCE and torch.equal(tokens, first):
                continue
            what = f"rank {rank}, call {number}: logits off by {error:.3g}"
            text = f"{what}, tokens {tokens.tolist()}, not {first.tolist()}"
            return Violation(Reason.WRONG_RESULT, (text, str(self._problem)))
        if self._problem.has_same_head:
            of_first = {number: logits for rank, number, _, logits in self._results if rank == 0}
            for rank, number, _, logits in self._results:
                if not torch.equal(logits, of_first[number]):
                    text = f"ranks 0 and {rank} have other bits in call {number}"
                    return Violation(Reason.WRONG_RESULT, (text, str(self._problem)))
        return None


@functools.cache
def model(problem: StepProblem) -> Model:
    """Random weights that each rank has a part of."""
    world, generator = problem.world_size, torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    def layer(number: int) -> Layer:
        q, kv = 2 * world * _HEAD_DIM, world * _HEAD_DIM
        wide = world * _WIDE
        more: dict[str, Any] = {}
        if problem.has_all:
            more = {"q_bias": drawn(q), "k_bias": drawn(kv), "v_bias": drawn(kv)}
            more |= {"q_norm": norm(_HEAD_DIM), "k_norm": norm(_HEAD_DIM)}
            more |= {"window": 5 if number == 1 else None}
        return Layer(
            norm(_HIDDEN), drawn(q, _HIDDEN), drawn(kv, _HIDDEN), drawn(kv, _HIDDEN),
            drawn(_HIDDEN, q), norm(_HIDDEN), drawn(wide, _HIDDEN), drawn(wide, _HIDDEN),
            drawn(_HIDDEN, wide), **more,
        )  # fmt: skip

    head = drawn(_VOCAB, _HIDDEN) if problem.has_same_head else drawn(world * _VOCAB, _HIDDEN)
    head = head.repeat(world, 1) if problem.has_same_head else head
    frequencies = torch.tensor([1.0, 0.3])
    whole = Decoder(
        tuple(map(layer, range(problem.layers))), drawn(world * _VOCAB, _HIDDEN), norm(_HIDDEN),
        head, frequencies, _HEAD_DIM, 1e-5, rope_scale=1.1,
    )  # fmt: skip
    tokens = torch.randint(world * _VOCAB, (_CALLS, problem.batch), generator=generator)
    positions = torch.arange(_CALLS)[:, None] + 3 + 4 * torch.arange(problem.batch)
    parts = [in_fp8(part_of(whole, rank, world), problem.scales) for rank in range(world)]
    if problem.scales != "none":
        whole = _together(whole, parts)
    return Model(whole, parts, tokens, positions)


def _together(whole: Decoder, parts: list[Decoder]) -> Decoder:
    """The whole of what all parts in fp8 stand for, float64."""

    def of_layer(number: int) -> Layer:
        weights: dict[str, Any] = {}
        for index, name in enumerate(SCALED):
            layers = [part.layers[number] for part in parts]
            of_ranks = [
                dequantised(getattr(layer, name).t(), layer.scales[index].t()).t()
                for layer in layers
            ]
            weights[name] = torch.cat(of_ranks, 1 if name in ("o", "down") else 0)
        return replace(whole.layers[number], **weights)

    return replace(whole, layers=tuple(map(of_layer, range(len(whole.layers)))))


class _Fp8Operations(ModelStep):
    """Operations of weights that those in fp8 stand for; each rank quantises its part of inputs."""

    scales, ranks = "none", 1

    def _rounded(self, x: torch.Tensor, parts: int) -> torch.Tensor:
        if self.scales == "none":
            return x
        rounded = [dequantised(*quantised(part, self.scales)) for part in x.chunk(parts, 1)]
        return torch.cat(rounded, 1)

    def _inputs(self, x: torch.Tensor) -> Any:
        return self._rounded(x, 1), None

    def _added(
        self, y: torch.Tensor, name: str, layer: Layer, x: torch.Tensor, norm: torch.Tensor
    ) -> Any:
        rows = getattr(layer, name)
        total = x + torch.nn.functional.linear(self._rounded(y, self.ranks), rows)
        return self._normalised(total, norm), total


def cache(problem: StepProblem, rank: int, heads: int) -> Cache:
    """Keys and values before the first call, of so many heads; NaN where none is read."""
    states: list[tuple[torch.Tensor, ...]] = []
    for which in range(2):
        layers = []
        for number in range(problem.layers):
            seed = 10 * number + which
            shape = (problem.batch, problem.world_size, _CAPACITY, _HEAD_DIM)
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            for sequence, position in enumerate(model(problem).positions[0].tolist()):
                whole[sequence, :, position:] = float("nan")
            layers.append(whole[:, rank : rank + heads].contiguous())
        states.append(tuple(layers))
    keys, values = states
    return Cache(keys, values)


@functools.cache
def exact(problem: StepProblem) -> list[torch.Tensor]:
    """Logits of each call, float64 [batch, vocabulary]."""
    made, held = model(problem), cache(problem, 0, problem.world_size)
    for states in (*held.keys, *held.values):
        states.nan_to_num_()  # that of what is masked is not in the kernel's sums
    step = _Fp8Operations(cast(made.whole, torch.float64), cast(held, torch.float64), None)
    step.scales, step.ranks = problem.scales, problem.world_size
    return [
        step.run_operations(tokens, positions.int())
        for tokens, positions in zip(made.tokens, made.positions, strict=True)
    ]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A decoder, a layer or a cache with tensors of another dtype, but for frequencies."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    if isinstance(value, Decoder | Layer | Cache):
        fields = {name: cast(field, dtype) for name, field in vars(value).items()}
        fields |= {"inv_freq": value.inv_freq} if isinstance(value, Decoder) else {}
        return replace(value, **fields)
    return value
