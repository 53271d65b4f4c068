"""The bench of a whole model: its modes agree with float64, and a broken one is told."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from taxfree.errors import UsageError, WorkerLost
from taxfree_kernels.hardware import KNOWN
from taxfree_tune.benching import model_tasks
from taxfree_tune.benching.model import ModelBench, PhaseResult, document, model_to_bench, run
from taxfree_tune.benching.model_tasks import MODES, Bench, ModeOutcome, Phase
from taxfree_tune.measuring.timer import Timing
from taxfree_tune.shapes import ShapeRequest, expand
from taxfree_tune.shapes.models import Attention, Block, Column, Model
from taxfree_tune.tuning.history import TuningHistory
from taxfree_tune.workers.group import Workers

QKV = tuple(Column(((8 * heads, heads),)) for heads in (4, 2, 2))
BLOCKS = Block(QKV, 32), Block((Column(((64, 64),)),) * 2, 64)
MODEL = Model("llama", 32, BLOCKS, (Attention(4, 2, 8),), layers=2, vocabulary=64)
SETTINGS = {"dtype": "bfloat16", "records": [], "repetitions": 2, "tried": Path(os.devnull)}
PROMPT, TOKENS = Phase("prefill", 1, 6), Phase("decode", 2, 5)


def wanted(*modes: str) -> list[tuple[str, str]]:
    return [each for each in MODES if each[1] in modes]


def measured(ranks: Any, model: Model, phase: Phase, *modes: str) -> list[ModeOutcome]:
    task = "taxfree_tune.benching.model_tasks:measure_phase"
    arguments = {"model": model, "phase": phase, "modes": wanted(*modes), **SETTINGS}
    (outcomes, problems), other = ranks.run(2, task, **arguments)
    assert [each.relative_error for each in other[0]] == [each.relative_error for each in outcomes]
    assert all("k=16" in each or "k=32" in each for each in problems)
    return outcomes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("phase", [PROMPT, TOKENS], ids=str)
def test_logits_are_those_of_float64(ranks, family: str, phase: Phase) -> None:
    attention, mlp = BLOCKS
    if family == "qwen2":
        columns = (dataclasses.replace(each, bias=True) for each in QKV)
        attention = dataclasses.replace(attention, columns=tuple(columns))
    model = dataclasses.replace(MODEL, family=family, blocks=(attention, mlp))
    *outcomes, step = measured(ranks, model, phase, "eager", "step")
    assert [(each.path, each.state) for each in outcomes] == [
        ("torch", "measured"), ("taxfree", "measured"),
    ]  # fmt: skip
    if phase is PROMPT:
        assert (step.state, step.reason) == ("refused", "a step is one token of each sequence")
    else:
        outcomes.append(step)
    assert all(0 < each.relative_error < 0.02 for each in outcomes)
    assert all(len(each.timing.samples_us) == 2 for each in outcomes)


def test_compiled_code_agrees_and_what_needs_gpus_says_so(ranks) -> None:
    model = dataclasses.replace(MODEL, layers=1)
    outcomes = measured(ranks, model, TOKENS, "compiled", "micro-pipeline", "graph")
    assert [(each.path, each.mode, each.state) for each in outcomes] == [
        ("torch", "compiled", "measured"), ("torch", "micro-pipeline", "refused"),
        ("torch", "graph", "refused"), ("taxfree", "compiled", "measured"),
        ("taxfree", "graph", "refused"),
    ]  # fmt: skip
    assert {each.reason for each in outcomes} == {
        "", "symmetric memory of PyTorch needs GPUs", "there are no graphs on a CPU",
    }  # fmt: skip


def test_the_problems_of_a_model_are_those_of_its_shapes() -> None:
    request = ShapeRequest(["model m=2,6"], "qwen2.5-7b", world_sizes=(2,), paths=("tp",))
    model, dtype = model_to_bench("qwen2.5-7b", 2, 1, None)
    bench = ModelBench("qwen2.5-7b", model, dtype, 2, [PROMPT, TOKENS])
    assert {*bench.problems()} == {*expand("matmul_all_reduce", request)}


def spoiled(fabric: Any, how: str, **arguments: Any) -> list[ModeOutcome]:
    """A bench in which taxfree's eager mode raises, or gives other logits."""
    made = model_tasks.Bench._made

    def broken(bench: Any, path: str, mode: str) -> Any:
        call = made(bench, path, mode)
        if path == "torch":
            return call
        if how == "raises":
            raise ValueError("no such kernel")
        return lambda: 1.1 * call()

    model_tasks.Bench._made = broken  # type: ignore[method-assign]
    try:
        return model_tasks.measure_phase(fabric, **arguments)[0]
    finally:
        model_tasks.Bench._made = made  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("how", "state", "said"),
    [("raises", "failed", "ValueError: no such kernel"), ("errs", "wrong", "relative error 0.")],
)
def test_a_broken_mode_leaves_the_others_their_rows(ranks, how, state, said) -> None:
    for outcomes in ranks.run(
        2, "tests.tune.test_bench_model:spoiled", how=how, model=MODEL, phase=TOKENS,
        modes=wanted("eager"), **SETTINGS,
    ):  # fmt: skip
        torch, ours = outcomes
        assert torch.timing is not None
        assert (ours.state, ours.timing) == (state, None)
        assert said in ours.reason


class _Group:
    """Ranks that end when they try a graph of taxfree."""

    hardware = KNOWN["cpu"]

    def call(self, _: Any, __: float, modes: Any, tried: Path, **___: Any) -> Any:
        if ("taxfree", "graph") in modes:
            tried.write_text("taxfree graph")
            raise WorkerLost("rank 1 died")
        return [([outcome(*each, 100.0) for each in modes], {"a problem": {"exact": 2}})]


def test_a_mode_that_ends_the_ranks_leaves_the_others_their_rows(monkeypatch) -> None:
    starts = []
    monkeypatch.setattr(Workers, "group", lambda _: starts.append(1) or _Group())
    bench = ModelBench("a model", MODEL, "bfloat16", 2, [TOKENS], wanted("eager", "graph"))
    (result,) = run(bench, "host", TuningHistory((), None))
    assert [each.state for each in result.outcomes] == ["measured"] * 3 + ["failed"]
    assert result.outcomes[-1].reason == "rank 1 died"
    assert len(starts) == 2
    found = document(bench, "host", [result])
    assert [row["mode"] for row in found["rows"]] == ["eager", "graph", "eager"]
    assert [row["state"] for row in found["skipped"]] == ["failed"]


def outcome(path: str, mode: str, us: float) -> ModeOutcome:
    return ModeOutcome(path, mode, "measured", "", 0.01, Timing((us,), 0.0))


def test_what_a_captured_call_reads_lives_as_long_as_the_graph(monkeypatch) -> None:
    monkeypatch.setattr(model_tasks, "capturing", contextlib.nullcontext)
    monkeypatch.setattr(model_tasks.torch.cuda, "CUDAGraph", mock.Mock)
    positions = torch.zeros(2)
    seen = weakref.ref(positions)
    replay = Bench._captured(mock.Mock(), partial(torch.add, positions, 1))
    del positions
    assert seen() is not None
    assert torch.equal(replay(), torch.ones(2))


def test_modes_are_compared_with_the_fastest_of_pytorch_that_is_launched_alike() -> None:
    outcomes = [
        outcome("torch", "eager", 800.0), outcome("torch", "compiled", 400.0),
        outcome("torch", "micro-pipeline", 300.0), outcome("torch", "graph", 200.0),
        outcome("taxfree", "compiled", 150.0), outcome("taxfree", "graph", 100.0),
    ]  # fmt: skip
    result = PhaseResult(TOKENS, outcomes, {}, KNOWN["h100"])
    assert [result.speedup(each) for each in outcomes] == [None] * 4 + [2.0, 2.0]
    assert result.tokens_per_s(outcomes[-1]) == 20000.0
    interpreted = PhaseResult(TOKENS, outcomes, {}, KNOWN["cpu"])
    assert interpreted.speedup(outcomes[-1]) is None


class TestModels:
    def test_have_fewer_layers_if_that_is_asked_for(self) -> None:
        model, dtype = model_to_bench("qwen3-32b", 2, 4, None)
        assert (model.layers, model.vocabulary, dtype) == (4, 151936, "bfloat16")
        assert model_to_bench("llama-3.1-8b", 4, None, "fp16")[1] == "float16"

    @pytest.mark.parametrize(
        ("name", "ranks", "layers", "said"),
        [
            ("mixtral-8x7b", 2, None, "is no dense model of llama"),
            ("gemma-2-9b", 2, None, "is no dense model of llama"),
            ("llama-3.1-8b", 3, None, "num_attention_heads 32 of the model does not split over 3"),
            ("llama-3.1-8b", 2, 33, "has 32 layers, not 33"),
        ],
    )
    def test_that_cannot_run_are_errors_of_the_user(self, name, ranks, layers, said) -> None:
        with pytest.raises(UsageError, match=said):
            model_to_bench(name, ranks, layers, None)
