"""Sizes at run time: one plan for many rows, one workspace, planning that leaves nobody waiting."""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from taxfree._runtime.unrecorded import UnrecordedProblems
from taxfree.errors import TaxfreeError, UsageError
from taxfree.problems import recorded_problem
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation, problem_class, resized, variants
from tests.ranks import Ranks, on_every_fabric
from tests.sample import Sample
from tests.taxfree.runtime_tasks import FIELDS, K, N, problem_of, record_of, runtime_of, tensors_of
from tests.taxfree.test_runtime_calls import joined, method_of

GATHER, ALL_REDUCE, SCATTER, DECODE = (
    "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "flash_decode",
)  # fmt: skip
RECORDED = 40
SIZES = (20, 31, 33, RECORDED)  # within a factor of two, or the record is not used for them
SEQUENCES = (3, 4, 5)
PROMPTS, EMBEDDING = "attention", "embedding_all_to_all"
ROWS_FIELD = {DECODE: "batch", PROMPTS: "batch", EMBEDDING: "batch"}

CASES: list[tuple[str, dict[str, Any]]] = [
    (GATHER, {}),
    (GATHER, {"gather_dim": 0, "bias": True}),
    (ALL_REDUCE, {}),
    (ALL_REDUCE, {"bias": True, "residual": True}),
    (ALL_REDUCE, {"residual": True, "rms_norm": True}),
    (SCATTER, {}),
    (SCATTER, {"scatter_dim": 1, "n": 48}),  # also of three ranks
    (DECODE, {}),
    (DECODE, {"page_size": 5, "soft_cap": True, "window": 30}),
    (PROMPTS, {}),
    (PROMPTS, {"packed": True}),
    (EMBEDDING, {}),
    (EMBEDDING, {"shard_dim": 1, "weighted": True}),
]


def run(ranks: Ranks, task: Callable[..., Any], **arguments: Any) -> list[Any]:
    return ranks.run(ranks.few, f"{task.__module__}:{task.__name__}", **arguments)


def sized(problem: Any, size: int) -> Any:
    op = type(problem).__module__.split(".")[-2]
    return resized(problem, **{ROWS_FIELD.get(op, "m"): size})


def largest(op: str, fields: dict[str, Any]) -> Any:
    return sized(problem_of(op, **fields), SEQUENCES[-1] if op in ROWS_FIELD else RECORDED)


def called(rt: Any, op: str, problem: Any, inputs: Any, **others: Any) -> torch.Tensor:
    name, arguments, options = method_of(op, problem, inputs)
    return joined(getattr(rt, name)(*arguments, **options, **others))


def served_by_each_variant() -> Iterator[tuple[str, dict[str, Any], str]]:
    for op, fields in CASES:
        shape = {"n": N, "k": K, "m": RECORDED}
        if op in FIELDS:
            shape = FIELDS[op] | {"batch": 5}
        problem = problem_class(op)(**shape | fields, world_size=2)
        for name, variant in variants(op).items():
            if name != "baseline" and variant.unsupported_reason(problem, KNOWN["cpu"]) is None:
                yield op, fields, name


# -- what runs on the ranks --------------------------------------------------------------------


def call_all_sizes(fabric: Any, op: str, fields: dict[str, Any], variant: str | None) -> Any:
    """Calls of a prepared range that are wrong or served by another variant than the recorded."""
    top, sizes = largest(op, fields), SEQUENCES if op in ROWS_FIELD else SIZES
    rt = runtime_of(fabric, *([] if variant is None else [record_of(fabric, top, variant)]))
    rt.prepare([top.for_rows(0, sizes[-1])])
    planned, complaints = rt.memory(), []
    for seed, size in enumerate((0, *sizes, sizes[0])):
        problem = sized(top, size)
        if size == 0:
            inputs = operation(op).make_inputs(sized(top, 1), fabric.rank, 1, fabric.device)
            expected = operation(op).empty_output(problem, fabric.device)
            inputs = without_rows(op, inputs)
            expected = expected[:0] if op == PROMPTS else expected
        else:
            inputs, expected = tensors_of(fabric, problem, seed)
            choice = rt.choice(problem)
            if choice.variant != (variant or "baseline"):
                complaints.append(f"{size}: runs {choice.variant}: {choice.why}")
        if not torch.equal(called(rt, op, problem, inputs), expected):
            complaints.append(f"{size}: wrong")
    rt.check()
    if rt.memory() != planned:
        complaints.append(f"{planned} grew to {rt.memory()}")
    return complaints


def without_rows(op: str, inputs: Any) -> Any:
    first, *others = inputs
    if op == EMBEDDING:
        indices, offsets, weights = others
        none = None if weights is None else weights[:, :0]
        return first, indices[:, :0], offsets[:, :1].contiguous(), none
    if op == DECODE:
        k, v, kv_lens, table, scaling = others
        if table is None:
            k, v = k[:0], v[:0]
        return first[:0], k, v, kv_lens[:, :0], None if table is None else table[:0], scaling
    if op == PROMPTS:
        k, v, starts, scale = others
        return first[:0], k[:0], v[:0], None if starts is None else starts[:1], scale
    if op == ALL_REDUCE and others[2] is not None:
        others[2] = others[2][:0]
    return first[:0], *others


#: operation -> its winner, the largest size, and fields of the problem
SERVED: dict[str, tuple[str, int, dict[str, Any]]] = {
    GATHER: ("push", 2000, {"m": 8, "n": 16, "k": 16}),
    ALL_REDUCE: ("push_two_shot", 2000, {"m": 8, "n": 16, "k": 16, "residual": True}),
    SCATTER: ("push_lamport", 2000, {"m": 8, "n": 16, "k": 16}),
    DECODE: ("fused", 8, {"batch": 8, "kv_len_per_rank": 8}),
}


def serve_ever_new_sizes(fabric: Any, calls: int) -> Any:
    """The runtime's memory and the bytes of the process after 100 calls and at the end; kernels."""
    problems = {op: problem_of(op, **fields) for op, (_, _, fields) in SERVED.items()}
    rt = runtime_of(fabric, *(record_of(fabric, p, SERVED[op][0]) for op, p in problems.items()))
    rt.prepare([problem.for_rows(1, SERVED[op][1]) for op, problem in problems.items()])
    sizes, held = random.Random(0), []
    with torch.backends.mkldnn.flags(enabled=False):  # it keeps code for a thousand sizes
        for call in range(calls):
            # one interpreted call of attention takes a second
            op = DECODE if call % 100 == 0 else (GATHER, ALL_REDUCE, SCATTER)[call % 3]
            problem = sized(problems[op], sizes.randint(1, SERVED[op][1]))
            inputs = operation(op).make_inputs(problem, fabric.rank, 1, fabric.device)
            called(rt, op, problem, inputs)
            if call in (100, calls - 1):
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                held.append((rt.memory(), 4096 * pages))
    rt.check()
    return *held, rt.kernels()


def fail_at(fabric: Any, stage: str) -> Any:
    """What all ranks run, and whether it is right, after the last one has failed at a stage."""
    problem = problem_of()
    rt = runtime_of(fabric, record_of(fabric, problem))
    inputs, expected = tensors_of(fabric, problem)
    push, library = (variants(GATHER)[name] for name in ("push", "baseline"))
    config = push.seed_configs(problem, fabric.hardware)[0]
    targets: dict[str, tuple[Any, str]] = {
        "plan": (type(push), "plan"),
        "compile": (type(push.plan(problem, fabric, config)), "run"),
        "allocate": (type(fabric.workspace), "scratch"),
        "library": (type(library), "plan"),
    }
    fails = fabric.rank == fabric.world_size - 1
    failure = mock.Mock(side_effect=torch.OutOfMemoryError(f"no memory to {stage}"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with (
                mock.patch.object(*targets[stage], failure) if fails else warnings.catch_warnings()
            ):
                rt.prepare([problem])
        except TaxfreeError as error:
            return "error", error.message
    right = torch.equal(called(rt, GATHER, problem, inputs), expected)
    return rt.choice(problem).variant, right


def write_over(fabric: Any, op: str, fields: dict[str, Any], variant: str | None) -> Any:
    """Whether the residual may be the output."""
    problem = largest(op, fields)
    rt = runtime_of(fabric, *([] if variant is None else [record_of(fabric, problem, variant)]))
    right = []
    for seed in (1, 2, 3):
        (x, weight, bias, residual, *rest), expected = tensors_of(fabric, problem, seed)
        out = torch.empty_like(expected)
        total = out[1] if problem.rms_norm else out
        total.copy_(residual)
        called(rt, op, problem, (x, weight, bias, total, *rest), out=out)
        right.append(torch.equal(out, expected))
    return right, rt.choice(problem).variant


def overlap(fabric: Any, what: str) -> str:
    problem = problem_of(ALL_REDUCE, n=K, residual=True)
    rt = runtime_of(fabric)
    (x, weight, _, residual, *_), _ = tensors_of(fabric, problem)
    # at multiples of 16 bytes: others are copied, so that nothing overlaps
    room = x.new_zeros(problem.elements + weight.numel())
    rows, size = (problem.m, problem.n), problem.elements
    arguments: dict[str, Any] = {"x": x, "weight": weight, "residual": residual}
    out = room[:size].view(rows)
    arguments |= {
        "x": {"x": room[88:][: x.numel()].view(x.shape)},
        "weight": {"weight": room[size - 1 :][: weight.numel()].view(K, K).t()},
        "part of the residual": {"residual": room[40:][:size].view(rows)},
        "nothing": {},
    }[what]
    try:
        rt.matmul_all_reduce(**arguments, out=out)
    except UsageError as error:
        return error.message
    return "no error"


def grow_in_vain(fabric: Any) -> list[Any]:
    """A range that no memory suffices for is refused; what was planned before still works."""
    problem = problem_of()
    rt = runtime_of(fabric)
    inputs, expected = tensors_of(fabric, problem)
    found: list[Any] = [torch.equal(called(rt, GATHER, problem, inputs), expected)]
    try:
        rt.prepare({dataclasses.replace(problem, k=1 << 44), dataclasses.replace(problem, m=100)})
    except TaxfreeError as error:
        found.append("even by the library" in error.message)
    return [*found, torch.equal(called(rt, GATHER, problem, inputs), expected)]


def first_call_in_inference_mode(fabric: Any, op: str, fields: dict[str, Any]) -> list[bool]:
    """Calls under inference mode, which are planned there, and later ones under none."""
    fabric = copy.copy(fabric)
    fabric.__dict__.pop("workspace", None)
    problem = largest(op, fields)
    rt = runtime_of(fabric)
    right = []
    for is_inference in (True, False):
        inputs, expected = tensors_of(fabric, problem)
        with torch.inference_mode(is_inference):
            right.append(torch.equal(called(rt, op, problem, inputs), expected))
    return right


def ask_for_buckets(fabric: Any) -> tuple[int, int]:
    """How often the dispatcher is asked for sizes that are served together, and for how many."""
    problem = problem_of(m=RECORDED)
    rt = runtime_of(fabric, record_of(fabric, problem))
    with mock.patch.object(rt._dispatcher, "bounds", wraps=rt._dispatcher.bounds) as bounds:
        rt.prepare([problem.for_rows(1, 2 * RECORDED)])
    return bounds.call_count, len({call.args[1] for call in bounds.call_args_list})


def attend_again_with_others(fabric: Any, what: str) -> str:
    """The error of a call that differs from one before in what a key of arguments cannot hold."""
    problem = problem_of(DECODE, page_size=4, kv_len_per_rank=8, batch=4)
    rt = runtime_of(fabric)
    (q, k, v, kv_lens, table, _), _ = tensors_of(fabric, problem)
    wide = torch.cat([table, table], 1)
    rt.flash_decode(q, k, v, kv_lens, table)
    rt.flash_decode(q[:1], k, v, kv_lens[:, :1].contiguous(), wide[:1, :2])
    arguments = {"q": q, "k": k, "v": v, "kv_lens": kv_lens, "block_table": table}
    arguments |= {
        "table": {"block_table": wide[:, :2]},
        "pages": {"v": v[:2]},
        "lengths": {"kv_lens": kv_lens[:, :1]},
    }[what]
    try:
        rt.flash_decode(**arguments)
    except UsageError as error:
        return error.message
    return "no error"


def call_from_two_threads(fabric: Any) -> Any:
    """What the second of two threads is told, that call at once; then each calls by itself."""
    problem = problem_of()
    rt = runtime_of(fabric, record_of(fabric, problem))
    inputs, expected = tensors_of(fabric, problem)
    rt.prepare([problem])
    told: list[Any] = []

    def call() -> None:
        try:
            told.append(torch.equal(called(rt, GATHER, problem, inputs), expected))
        except UsageError as error:
            told.append(error.message)

    def in_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with rt._calling:
        in_thread()
    in_thread()
    call()
    return told


def log_what_is_met(fabric: Any, path: str) -> Any:
    from taxfree._runtime.dispatch import Dispatcher
    from taxfree._runtime.runtime import Runtime
    from taxfree_tuning_db import Table

    recorded, other = problem_of(), problem_of(m=6)
    table = Table(user=[record_of(fabric, recorded)])
    unrecorded = UnrecordedProblems(Path(path)) if fabric.rank == 0 else None
    for _ in range(2):
        rt = Runtime(fabric, Dispatcher(table, fabric.hardware), unrecorded=unrecorded)
        served, attention = problem_of(m=4), problem_of(DECODE, batch=3, kv_len_per_rank=70)
        for problem, calls in (
            (recorded, 1), (served, 1), (other, 3), (problem_of(ALL_REDUCE), 2), (attention, 1),
        ):  # fmt: skip
            op = type(problem).__module__.split(".")[-2]
            for _ in range(calls):
                called(rt, op, problem, tensors_of(fabric, problem)[0])
        inputs, expected = tensors_of(fabric, other)
        rt.call(other, inputs, torch.empty_like(expected))
        if unrecorded is not None:
            unrecorded.write()
    unprepared = Runtime(fabric, Dispatcher(table, fabric.hardware), False, unrecorded=unrecorded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for problem in (recorded, other):  # the first lacks no record
            called(unprepared, GATHER, problem, tensors_of(fabric, problem)[0])
    unprepared._retire()
    return True


def hold_memory(fabric: Any) -> Any:
    """Bytes that the device's allocator gave out for two plans, and those that are reported."""
    rt = runtime_of(fabric)
    before = torch.cuda.memory_allocated()
    reported = rt.memory().workspace_bytes
    problems = [problem_of(GATHER, n=512, k=768), problem_of(ALL_REDUCE, n=512, residual=True)]
    rt.prepare([problem.for_rows(1, 4096) for problem in problems])
    return torch.cuda.memory_allocated() - before, rt.memory().workspace_bytes - reported


def call_on_streams(fabric: Any) -> list[bool]:
    """Calls that take turns on three streams, each ordered after the last by the runtime alone."""
    problem = problem_of(m=64, n=256, k=768)
    rt = runtime_of(fabric, record_of(fabric, problem))
    given = [tensors_of(fabric, problem, seed) for seed in range(6)]
    rt.prepare([problem])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for call in range(60):
        inputs, _ = given[call % len(given)]
        with torch.cuda.stream(streams[call % 3]):
            outs.append(called(rt, GATHER, problem, inputs))
    rt.check()
    return [torch.equal(out, given[call % 6][1]) for call, out in enumerate(outs)]


def replay_with_other_sizes(fabric: Any) -> list[bool]:
    """A graph is replayed while eager calls of larger sizes make the workspace grow."""
    problem = problem_of(ALL_REDUCE, m=8, n=256, residual=True)
    larger = dataclasses.replace(problem, m=4000)
    rt = runtime_of(fabric, record_of(fabric, problem))
    (x, weight, *rest), expected = tensors_of(fabric, problem)
    rt.prepare([problem])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = called(rt, ALL_REDUCE, problem, (x, weight, *rest))
    right = []
    for _ in range(3):
        inputs, other = tensors_of(fabric, larger)
        right.append(torch.equal(called(rt, ALL_REDUCE, larger, inputs), other))
        out.fill_(float("nan"))
        graph.replay()
        right.append(torch.equal(out, expected))
    rt.check()
    return right


def compile_with_graphs(fabric: Any) -> list[bool]:
    """``torch.compile`` captures the calls in graphs of its own, whose memory is theirs."""
    problem = problem_of(ALL_REDUCE, m=8, n=256)
    rt = runtime_of(fabric, record_of(fabric, problem))
    (x, weight, *_), _ = tensors_of(fabric, problem)
    rt.prepare([problem])

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rt.matmul_all_reduce(x * 1, weight) * 2

    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    right = []
    for seed in range(6):
        (x, weight, *_), expected = tensors_of(fabric, problem, seed)
        torch.compiler.cudagraph_mark_step_begin()
        right.append(torch.equal(compiled(x, weight).clone(), expected * 2))
    rt.check()
    return right


def capture_in_private_pools(fabric: Any) -> list[bool]:
    """Two graphs, each in a pool of its own."""
    problems = [problem_of(ALL_REDUCE, m=m, n=256, residual=True) for m in (8, 24)]
    rt = runtime_of(fabric, *(record_of(fabric, problem) for problem in problems))
    rt.prepare(problems)
    captured = []
    for problem in problems:
        inputs, expected = tensors_of(fabric, problem)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = called(rt, ALL_REDUCE, problem, inputs)
        captured.append((graph, out, expected, inputs))
    right = []
    for graph, out, expected, _ in captured * 3:
        graph.replay()
        right.append(torch.equal(out, expected))
    rt.check()
    return right


# -- tests -------------------------------------------------------------------------------------


class TestSizes:
    @pytest.mark.dealt("op")
    @pytest.mark.parametrize(("op", "fields", "variant"), list(served_by_each_variant()))
    def test_a_variant_serves_all_sizes_below_that_of_its_plan(
        self, ranks: Ranks, op: str, fields: dict[str, Any], variant: str
    ) -> None:
        for complaints in run(ranks, call_all_sizes, op=op, fields=fields, variant=variant):
            assert complaints == []

    @on_every_fabric
    @pytest.mark.parametrize(("op", "fields"), CASES)
    def test_so_does_the_library(self, ranks: Ranks, op: str, fields: dict[str, Any]) -> None:
        for complaints in run(ranks, call_all_sizes, op=op, fields=fields, variant=None):
            assert complaints == []

    @pytest.mark.timeout(900)
    def test_ever_new_sizes_take_no_memory_and_few_kernels(
        self, ranks: Ranks, sample: Sample
    ) -> None:
        calls = 500 if sample.is_part else 10_000
        for early, late, kernels in run(ranks, serve_ever_new_sizes, calls=calls):
            assert late[0] == early[0]
            assert late[1] - early[1] < 32 << 20  # of Python's own objects, and its allocator's
            assert set(kernels) == set(SERVED)
            assert max(kernels.values()) <= 8

    @pytest.mark.gpu
    @pytest.mark.parametrize("fabric", ["cuda"], indirect=True)
    def test_what_is_reported_is_what_is_held(self, ranks: Ranks) -> None:
        for held, reported in run(ranks, hold_memory):
            assert abs(held - reported) <= 1 << 20  # the allocator rounds

    def test_a_range_that_makes_no_sense_is_refused(self) -> None:
        problem = problem_class(GATHER)(m=1, n=N, k=K)
        with pytest.raises(Exception, match="sizes from 3 to 2"):
            problem.for_rows(3, 2)


class TestPlanning:
    @on_every_fabric
    @pytest.mark.parametrize("stage", ["plan", "compile", "allocate", "library"])
    def test_a_failure_on_one_rank_ends_alike_on_all(self, ranks: Ranks, stage: str) -> None:
        first, *others = run(ranks, fail_at, stage=stage)
        assert all(each == first for each in others)
        variant, right = first
        if stage == "allocate":  # the library has no memory either
            assert variant == "error"
            assert "cannot run" in right
            assert "no memory to allocate" in right
        else:
            assert right
            assert variant == ("push" if stage == "library" else "baseline")

    def test_a_range_that_fits_no_memory_leaves_earlier_plans_alone(self, ranks: Ranks) -> None:
        assert run(ranks, grow_in_vain) == [[True] * 3] * ranks.few

    @pytest.mark.parametrize(("op", "fields"), CASES)
    def test_inference_mode_leaves_no_mark_on_what_stays(
        self, ranks: Ranks, op: str, fields: dict[str, Any]
    ) -> None:
        found = run(ranks, first_call_in_inference_mode, op=op, fields=fields)
        assert found == [[True, True]] * ranks.few

    def test_each_bucket_of_a_range_is_asked_for_once(self, ranks: Ranks) -> None:
        for asked, buckets in run(ranks, ask_for_buckets):
            assert asked == buckets > 3


class TestArguments:
    @pytest.mark.parametrize("what", ["table", "pages", "lengths"])
    def test_what_was_checked_once_is_checked_where_it_may_differ(
        self, ranks: Ranks, what: str
    ) -> None:
        assert "no error" not in run(ranks, attend_again_with_others, what=what)

    @pytest.mark.parametrize(
        ("op", "fields", "variant"),
        [case for case in served_by_each_variant() if case[1].get("residual")]
        + [(op, fields, None) for op, fields in CASES if fields.get("residual")],
    )
    def test_the_output_may_be_the_residual(
        self, ranks: Ranks, op: str, fields: dict[str, Any], variant: str | None
    ) -> None:
        for right, ran in run(ranks, write_over, op=op, fields=fields, variant=variant):
            assert right == [True] * 3
            assert ran == (variant or "baseline")

    @pytest.mark.parametrize("what", ["x", "weight", "part of the residual"])
    def test_an_output_that_overlaps_another_tensor_is_refused(
        self, ranks: Ranks, what: str
    ) -> None:
        assert all("out overlaps an input" in said for said in run(ranks, overlap, what=what))
        assert run(ranks, overlap, what="nothing") == ["no error"] * ranks.few


class TestOrder:
    @on_every_fabric
    def test_two_threads_cannot_call_at_once(self, ranks: Ranks) -> None:
        for told in run(ranks, call_from_two_threads):
            assert told == ["two threads call the same runtime at once", True, True]

    @pytest.mark.gpu
    @pytest.mark.parametrize("fabric", ["cuda"], indirect=True)
    @pytest.mark.parametrize(
        "task",
        [call_on_streams, replay_with_other_sizes, compile_with_graphs, capture_in_private_pools],
    )
    def test_streams_and_graphs_are_right(self, ranks: Ranks, task: Callable[..., Any]) -> None:
        assert all(all(right) for right in run(ranks, task))


def test_problems_without_a_record_are_collected(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "problems.yaml"
    run(ranks, log_what_is_met, path=str(path))
    entries = yaml.safe_load(path.read_text())
    assert [(each["op"], each.get("m"), each["calls"]) for each in entries] == [
        (GATHER, 6, 9), (ALL_REDUCE, 5, 4), (DECODE, None, 2),
    ]  # fmt: skip
    assert (entries[-1]["batch"], entries[-1]["kv_len_per_rank"]) == (3, 70)
    for entry in entries:
        fields = {name: value for name, value in entry.items() if name not in ("op", "calls")}
        problem = recorded_problem(entry["op"], fields)
        assert dataclasses.asdict(problem) == fields
