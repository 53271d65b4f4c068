"""Groups that span nodes, on ranks of one machine that are told to be several."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from taxfree.errors import UsageError
from taxfree_kernels.errors import PeerTimeout
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.nodes import NodesFabric
from taxfree_kernels.variant import op_of, operation_names, operation_shapes, variants
from taxfree_tuning_db import Database
from tests.ranks import Ranks, replies_of_survivors, start_group
from tests.taxfree.runtime_tasks import problem_of, record_of, tensors_of

OPS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
HEAP_BYTES = 4 << 20
M, N, K = 48, 32, 32  # rows that 2, 4 and 8 ranks share
ROWS = {"all_gather_matmul": {"gather_dim": 0}}


def run(ranks: Ranks, world_size: int, scenario: str, **arguments: Any) -> list[Any]:
    return ranks.run(world_size, f"{__name__}:on_rank", scenario=scenario, **arguments)


def on_rank(fabric: Any, scenario: str, **arguments: Any) -> Any:
    return globals()[scenario](fabric, **arguments)


# -- what runs on the ranks --------------------------------------------------------------------


@contextlib.contextmanager
def on_nodes(*sizes: int) -> Iterator[None]:
    """This rank is on one of nodes of so many ranks: a, b, c, ..."""
    names = "".join(name * size for name, size in zip("abcdefgh", sizes, strict=False))
    with mock.patch.dict(os.environ, {"TAXFREE_NODE": names[dist.get_rank()]}):
        yield


def init(folder: str, *records: Any, **arguments: Any) -> Any:
    import taxfree

    path = Path(folder, "tuning.sqlite")
    if dist.get_rank() == 0:
        with Database(path) as database:
            for record in records:
                database.put(record)
    with mock.patch("taxfree._runtime.startup.shipped_records", return_value=()):
        return taxfree.init(**{"db": path, "heap_bytes": HEAP_BYTES} | arguments)


def rail_record(problem: Any, nodes: int, chunks: int, device: Hardware = KNOWN["cpu"]) -> Any:
    """A record that the rail has won on ranks of several nodes."""
    hardware = dataclasses.replace(device, nodes=nodes)
    record = record_of(mock.Mock(hardware=hardware), problem, "rail")
    winner = dataclasses.replace(record.winner, config={"CHUNKS": chunks})
    return dataclasses.replace(record, winner=winner)


def called(rt: Any, problem: Any, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a call on this rank, and what it must be."""
    tensors, expected = tensors_of(rt._fabric, problem, seed)
    out = torch.full_like(expected, float("nan"))
    return rt.call(problem, tensors, out), expected


def every_operation(fabric: Any, folder: str, nodes: int, chunks: int) -> Any:
    """Each operation by the rail, a smaller size by the same plan, and one without a record."""
    world_size = dist.get_world_size()
    problems = [problem_of(op, m=M, n=N, k=K, **ROWS.get(op, {})) for op in OPS]
    records = [rail_record(problem, nodes, chunks) for problem in problems]
    found = []
    with on_nodes(*[world_size // nodes] * nodes), init(folder, *records) as rt:
        for problem in problems:
            smaller = dataclasses.replace(problem, m=M - 8)
            for each in (problem, smaller, dataclasses.replace(problem, n=2 * N)):
                for seed in (1, 2):
                    y, expected = called(rt, each, seed)
                    found.append((torch.equal(y, expected), rt.choice(each).variant))
        rt.check()
        inside = {problem.partition("(")[0] for problem in rt._fabric.node.stats()}
    return found, inside


def by_the_library(fabric: Any, folder: str) -> dict[str, tuple[str, bool]]:
    """A small problem of each operation without a record."""
    found = {}
    with on_nodes(2, 2), init(folder) as rt:
        for op in operation_names():
            problem = operation_shapes(op).tiny(dist.get_world_size())[0]
            y, expected = called(rt, problem)
            found[op] = rt.choice(problem).variant, torch.equal(y, expected)
    return found


def with_a_group_of_its_own(fabric: Any, folder: str) -> bool:
    """One rank is in more groups than the others."""
    own = None
    if dist.get_rank() == 1:
        own = dist.new_group([1], use_local_synchronization=True)
    with on_nodes(2, 2), init(folder) as rt:
        problem = problem_of("matmul_all_reduce", m=M, n=N, k=K)
        y, expected = called(rt, problem)
    if own is not None:
        dist.destroy_process_group(own)
    return torch.equal(y, expected)


def sums_with_all(fabric: Any, folder: str) -> Any:
    """Bias, residual (also as the output) and RMSNorm; ragged rows; the same bits everywhere."""
    made = {"bias": True, "residual": True, "rms_norm": True}
    problems = [
        problem_of("matmul_all_reduce", m=13, n=N, k=K, **{name: made[name] for name in names})
        for names in ((), ("bias",), ("bias", "residual"), ("residual", "rms_norm"))
    ]
    right = []
    with on_nodes(2, 2), init(folder, *[rail_record(each, 2, 2) for each in problems]) as rt:
        for problem in problems:
            y, expected = called(rt, problem)
            right += [torch.equal(y, expected), rt.choice(problem).variant == "rail"]
        (x, weight, bias, residual, *_), expected = tensors_of(rt._fabric, problems[2])
        right.append(
            torch.equal(rt.matmul_all_reduce(x, weight, bias, residual, residual), expected)
        )
        torch.manual_seed(dist.get_rank())
        y = rt.matmul_all_reduce(torch.randn(13, K).half(), torch.randn(N, K).half().t())
        everyone = [torch.empty_like(y) for _ in range(4)]
        dist.all_gather(everyone, y)
        right.append(all(torch.equal(y, other) for other in everyone))
    return right


def through_autograd(fabric: Any, folder: str) -> Any:
    """As a torch op, whose gradients go by the rail, too."""
    problems = [problem_of(op, m=M, n=N, k=K, **ROWS.get(op, {})) for op in OPS[1:]]
    with on_nodes(2, 2), init(folder, *[rail_record(each, 2, 1) for each in problems]) as rt:
        (a, weight, _), expected = tensors_of(rt._fabric, problems[1])
        shard = a.requires_grad_()
        y = rt.all_gather_matmul(shard, weight)
        y.sum().backward()
        columns = weight.float().sum(1)
        dist.all_reduce(columns)
        right = torch.equal(y, expected), torch.equal(shard.grad.float(), columns.expand_as(shard))
    return right


def refusals(fabric: Any, folder: str) -> Any:
    said = []
    with on_nodes(3, 1), pytest.raises(UsageError) as uneven:
        init(folder)
    said.append((uneven.value.message, uneven.value.hint))
    with (
        mock.patch.dict(os.environ, {"TAXFREE_NODE": "abab"[dist.get_rank()]}),
        pytest.raises(UsageError) as mixed,
    ):
        init(folder)
    said.append((mixed.value.message, mixed.value.hint))
    return said


def in_a_graph(fabric: Any, folder: str) -> Any:
    """Captured right after it was prepared, on nodes of one GPU; replayed with other inputs."""
    world_size, right = dist.get_world_size(), []
    problems = [problem_of(op, m=16 * world_size, n=64, k=64, **ROWS.get(op, {})) for op in OPS]
    records = [rail_record(each, world_size, 2, fabric.hardware) for each in problems]
    with on_nodes(*[1] * world_size), init(folder, *records, heap_bytes=64 << 20) as rt:
        rt.prepare(problems)
        for problem in problems:
            tensors, expected = tensors_of(rt._fabric, problem)
            out, graph = torch.empty_like(expected), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                rt.call(problem, tensors, out)
            for seed in (1, 2):
                others, expected = tensors_of(rt._fabric, problem, seed)
                for tensor, other in zip(tensors, others, strict=True):
                    if tensor is not None:
                        tensor.copy_(other)
                graph.replay()
                right += [torch.equal(out, expected), rt.choice(problem).variant == "rail"]
        rt.check()
    return right


def order_of_chunks(fabric: Any, folder: str) -> Any:
    """What a rank queues for a sum in three chunks of rows, and what it waits for."""
    from taxfree_kernels.matmul_all_reduce import rail

    said: list[str] = []

    class Watched:
        def __init__(self, name: str, work: Any) -> None:
            self.name, self.work = name, work
            said.append(name)

        def wait(self) -> None:
            said.append(f"wait for {self.name}")
            self.work.wait()

    def watched(name: str, queue: Any) -> Any:
        return lambda *arguments, **named: Watched(name, queue(*arguments, **named))

    problem = problem_of("matmul_all_reduce", m=M, n=N, k=K)
    with on_nodes(2, 2), init(folder, rail_record(problem, 2, 4)) as rt:
        called(rt, problem)
        nodes, in_node = rt._fabric, rt._fabric.sum_in_node
        with (
            mock.patch.object(rail, "all_reduce", watched("rail", rail.all_reduce)),
            mock.patch.object(nodes, "share_in_node", watched("share", nodes.share_in_node)),
            mock.patch.object(nodes, "sum_in_node", lambda *a: (said.append("sum"), in_node(*a))),
        ):
            y, expected = called(rt, problem, 2)
    return torch.equal(y, expected), said


def autotuned(fabric: Any, folder: str) -> Any:
    """What is met without a record is tuned on the ranks of both nodes; the next start finds it."""
    import taxfree
    from taxfree_tune.tuning import in_ranks

    problem = problem_of("matmul_all_reduce", m=M, n=N, k=K)
    with on_nodes(2, 2), mock.patch.object(in_ranks, "TRIALS", 3):
        with init(folder) as rt:
            with taxfree.autotune("60s") as tuned:
                before = torch.equal(*called(rt, problem)), rt.choice(problem).kind
            ours = [each for each in tuned if each.problem == problem]
            tried = {m.variant for m in (ours[0].record.winner, *ours[0].record.runners_up)}
            after = torch.equal(*called(rt, problem, 2)), rt.choice(problem).kind
        with init(folder) as again:
            later = again.choice(problem).kind
    return before, after, later, tried, ours[0].record.hardware.gpu


def lose(fabric: Any, folder: str, first: int, is_by_rail: bool = True) -> Any:
    """The ranks from the first one on die; the others say who, in this call and in later ones."""
    problem = problem_of("matmul_all_reduce", m=M, n=N, k=K)
    with on_nodes(2, 2):
        rt = init(folder, *[rail_record(problem, 2, 2)] * is_by_rail, timeout_s=3)
        y, expected = called(rt, problem)
        assert torch.equal(y, expected)
        dist.barrier()
        if dist.get_rank() >= first:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        said = []
        while len(said) < 2:
            try:
                called(rt, problem)
            except PeerTimeout as error:
                said.append(str(error))
        rt._release()
    return said


# -- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "world_size", "chunks"), [(2, 4, 1), (4, 4, 2), (2, 8, 4), (2, 2, 1)]
)
def test_operations_by_the_rail_are_right(
    ranks: Ranks, tmp_path: Path, nodes: int, world_size: int, chunks: int
) -> None:
    for found, inside in run(
        ranks, world_size, "every_operation", folder=str(tmp_path), nodes=nodes, chunks=chunks
    ):  # fmt: skip
        assert all(right for right, _ in found)
        variants = [variant for _, variant in found]
        assert variants == ["rail", "rail", "rail", "rail", "baseline", "baseline"] * len(OPS)
        is_alone = nodes == world_size
        assert inside == (set() if is_alone else {"MatmulReduceScatter", "AllGatherMatmul"})


def test_ranks_may_be_in_different_numbers_of_groups(ranks: Ranks, tmp_path: Path) -> None:
    assert run(ranks, 4, "with_a_group_of_its_own", folder=str(tmp_path)) == [True] * 4


def test_sums_take_all_that_a_sum_can(ranks: Ranks, tmp_path: Path) -> None:
    for right in run(ranks, 4, "sums_with_all", folder=str(tmp_path)):
        assert right == [True] * len(right)


@pytest.mark.gpu
@pytest.mark.parametrize("fabric", ["cuda"], indirect=True)
def test_a_captured_rail_sees_the_inputs_of_each_replay(ranks: Ranks, tmp_path: Path) -> None:
    for right in run(ranks, ranks.few, "in_a_graph", folder=str(tmp_path)):
        assert right == [True] * len(right)


def test_the_rail_runs_beside_the_next_chunk(ranks: Ranks, tmp_path: Path) -> None:
    beside = ["sum", "rail", "wait for rail", "share"]
    expected = ["sum", "rail", *beside * 3, "wait for rail", "share", *["wait for share"] * 4]
    for right, said in run(ranks, 4, "order_of_chunks", folder=str(tmp_path)):
        assert right
        assert said == expected


def test_gradients_go_by_the_rail(ranks: Ranks, tmp_path: Path) -> None:
    assert run(ranks, 4, "through_autograd", folder=str(tmp_path)) == [(True, True)] * 4


def test_the_library_serves_every_operation(ranks: Ranks, tmp_path: Path) -> None:
    for found in run(ranks, 4, "by_the_library", folder=str(tmp_path)):
        assert found == dict.fromkeys(operation_names(), ("baseline", True))


def test_uneven_and_unordered_nodes_are_refused_with_the_reason(
    ranks: Ranks, tmp_path: Path
) -> None:
    for uneven, mixed in run(ranks, 4, "refusals", folder=str(tmp_path)):
        assert uneven[0] == "the group's nodes have different numbers of ranks: a 3, b 1"
        assert "give each node as many ranks" in uneven[1]
        assert mixed[0] == "the group's ranks are not in the order of its nodes: a [0, 2]; b [1, 3]"
        assert "node by node" in mixed[1]


def test_a_group_that_spans_nodes_is_tuned_on_its_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for before, after, later, tried, gpu in run(ranks, 4, "autotuned", folder=str(tmp_path)):
        assert before == (True, "baseline")
        assert after == (True, "exact")
        assert later == "exact"
        assert "rail" in tried
        assert tried <= {"rail", "baseline"}
        assert gpu == "CPU, 2 nodes"


@pytest.mark.parametrize("is_by_rail", [True, False])
def test_who_loses_a_node_names_it(tmp_path: Path, is_by_rail: bool) -> None:
    with contextlib.closing(start_group(4, "host")) as group:
        found = replies_of_survivors(
            group, f"{__name__}:on_rank", 120.0, [0, 1], scenario="lose", first=2,
            is_by_rail=is_by_rail,
            folder=str(tmp_path),
        )  # fmt: skip
    assert found.keys() == {0, 1}
    for rank, said in found.items():
        assert len(said) == 2
        for message in said:
            assert message.startswith(f"rank {rank} of node a lost node b (ranks 2 to 3): ")


def test_a_node_that_lost_a_rank_is_named_by_the_others(tmp_path: Path) -> None:
    with contextlib.closing(start_group(4, "host")) as group:
        found = replies_of_survivors(
            group, f"{__name__}:on_rank", 120.0, [0, 1, 2], scenario="lose", first=3,
            folder=str(tmp_path),
        )  # fmt: skip
    assert found.keys() == {0, 1, 2}
    assert found[1][0].startswith("rank 1 of node a lost node b (ranks 2 to 3): ")
    assert found[2][0].startswith(("in node b: rank 0 ", "rank 2 lost a rank of its node b: "))


def test_no_kernel_of_one_node_serves_several() -> None:
    from taxfree_kernels.variant import unsupported_reason, variants

    hardware = dataclasses.replace(KNOWN["h200"], nodes=2)
    for op in OPS:
        problem = problem_of_one_node(op)
        serving = {
            name
            for name, variant in variants(op).items()
            if unsupported_reason(variant, problem, hardware) is None
        }
        assert serving == {"baseline", "rail"}
        assert variants(op)["rail"].unsupported_reason(problem, KNOWN["h200"]) is not None
        assert op_of(problem) == op
    assert NodesFabric.name == "nodes"


@pytest.mark.parametrize(
    ("said", "is_lost"),
    [
        ("Application timeout caused pair closure", True),
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer", True),
        ("out of memory", False),
    ],
)
def test_an_error_of_the_library_means_a_lost_node(said, is_lost):
    fabric = object.__new__(NodesFabric)
    with mock.patch.object(NodesFabric, "_loss", lambda self, why: PeerTimeout(why)):
        assert (fabric.loss(RuntimeError(said)) is not None) is is_lost


@pytest.mark.parametrize("op", ROWS)
def test_a_rail_prepares_what_it_calls_inside_a_node(op):
    prepared: list[Any] = []
    nodes = mock.Mock(ranks_per_node=2, prepare=lambda problem, most: prepared.append(problem))
    plan = object.__new__(variants(op)["rail"].plan_class)
    plan._problem, plan._nodes, plan._chunks = problem_of_one_node(op), nodes, 1
    plan.connect()
    (inside,) = prepared
    assert (inside.gather_dim, inside.world_size, inside.m) == (0, 2, 32)


def problem_of_one_node(op: str) -> Any:
    from taxfree_kernels.variant import problem_class

    return problem_class(op)(m=64, n=64, k=64, world_size=4, **ROWS.get(op, {}))
