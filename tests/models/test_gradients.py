"""Gradients of the operations: against float64 and DTensor, eager, compiled and recomputed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from taxfree_kernels.variant import op_of
from tests.ranks import Ranks
from tests.sample import Sample
from tests.taxfree.runtime_tasks import problem_of, record_of, runtime_of

GATHER, ALL_REDUCE, SCATTER = "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"
EMBEDDING = "embedding_all_to_all"

#: operation, what differs from its usual problem
CASES: list[tuple[str, dict[str, Any]]] = [
    (GATHER, {"m": 6, "bias": True}),
    (GATHER, {"m": 5}),  # the last rank has fewer rows
    (GATHER, {"m": 5, "gather_dim": 1, "bias": True}),
    (ALL_REDUCE, {"m": 5, "bias": True, "residual": True}),
    (SCATTER, {"m": 6}),
    (SCATTER, {"m": 5}),
    (SCATTER, {"m": 5, "scatter_dim": 1}),
]
HOW = ["eager", "compiled", "recomputed"]


def called(rt: Any, problem: Any, tensors: tuple[Any, ...]) -> torch.Tensor:
    """The runtime's own result for tensors in the order of its method's arguments."""
    op = op_of(problem)
    if op == GATHER:
        result = rt.all_gather_matmul(*tensors, gather_dim=problem.gather_dim, m=problem.m)
    elif op == SCATTER:
        result = rt.matmul_reduce_scatter(*tensors, problem.scatter_dim)
    else:
        result = rt.matmul_all_reduce(*tensors)
    assert isinstance(result, torch.Tensor)
    return result


def expected_of(problem: Any, everyone: list[list[Any]]) -> list[torch.Tensor]:
    """The results of all ranks in one process, as autograd sees them."""
    world_size = problem.world_size
    if op_of(problem) == GATHER:
        a = torch.cat([tensors[0] for tensors in everyone], problem.gather_dim)
        return [a @ w if bias is None else a @ w + bias for _, w, bias in everyone]
    total = torch.stack([tensors[0] @ tensors[1] for tensors in everyone]).sum(0)
    if op_of(problem) == SCATTER:
        size = -(-total.shape[problem.scatter_dim] // world_size)
        padding = size * world_size - total.shape[problem.scatter_dim]
        padded = torch.nn.functional.pad(total, (0, 0, 0, padding))
        return list(padded.split(size, problem.scatter_dim))
    for added in everyone[0][2:]:
        total = total if added is None else total + added
    return [total] + [0 * total] * (world_size - 1)  # all ranks have it; it counts once


def tensors_of(fabric: Any, problem: Any, dtype: torch.dtype) -> list[Any]:
    """Random tensors of this rank; what ranks share is the same on all of them."""
    from taxfree_kernels.variant import operation

    inputs = operation(op_of(problem)).make_inputs(problem, fabric.rank, 1, fabric.device)
    tensors: list[Any] = [None if t is None else t.to(dtype) for t in inputs[:4]]
    return tensors


def run_with(how: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    from torch.utils.checkpoint import checkpoint

    def recomputed(*tensors: Any) -> torch.Tensor:
        result = checkpoint(function, *tensors, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result

    found = recomputed if "recomputed" in how else function
    torch.compiler.reset()
    return torch.compile(found, fullgraph=True, backend="aot_eager") if "compiled" in how else found


def differentiate(
    fabric: Any, op: str, fields: dict[str, Any], how: str, dtype: str, variant: str
) -> tuple[float, bool, list[str]]:
    """The largest relative error of a gradient, whether forward is right, and what ran."""
    import torch.distributed as dist

    problem = problem_of(op, **fields, dtype=dtype)
    rt = runtime_of(fabric, *([record_of(fabric, problem)] if variant == "push" else []))
    own = tensors_of(fabric, problem, getattr(torch, dtype))
    everyone: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(everyone, own)
    exact = [
        [None if t is None else t.double().requires_grad_() for t in each] for each in everyone
    ]
    results = expected_of(problem, exact)
    upstream = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).double()
                for i, y in enumerate(results)]  # fmt: skip
    sum((y * dy).sum() for y, dy in zip(results, upstream, strict=True)).backward()

    for tensor in own:
        if tensor is not None:
            tensor.requires_grad_()
    y = run_with(how, lambda *tensors: called(rt, problem, tensors))(*own)
    same = op == ALL_REDUCE
    y.backward(upstream[0 if same else fabric.rank].to(y.dtype))
    errors = []
    for at, tensor in enumerate(own):
        if tensor is None:
            continue
        shared = same and at >= 2
        wanted = exact[0 if shared else fabric.rank][at].grad
        assert tensor.grad.dtype == tensor.dtype
        errors.append(float((tensor.grad.double() - wanted).norm() / wanted.norm().clamp(min=1e-9)))
    wanted = results[0 if same else fabric.rank].detach()
    is_right = bool((y.detach().double() - wanted).norm() < 0.02 * wanted.norm().clamp(min=1))
    rt.check()
    kinds = sorted({kind for kinds in rt.stats().values() for kind in kinds})
    return max(errors), is_right, kinds


def refuse(fabric: Any) -> list[str]:
    """What is said where there is no formula, or no place for a gradient."""
    from tests.taxfree.runtime_tasks import tensors_of as integers
    from tests.taxfree.test_runtime_calls import method_of

    told = []
    for fields in ({"rms_norm": True, "residual": True}, {}):
        op = ALL_REDUCE if fields else "flash_decode"
        problem = problem_of(op, **fields)
        rt = runtime_of(fabric)
        name, (first, *rest), options = method_of(op, problem, integers(fabric, problem)[0])
        for compiled in (False, True):
            torch.compiler.reset()
            method = getattr(rt, name)
            if compiled:
                method = torch.compile(method, fullgraph=True, backend="aot_eager")
            try:
                method(first.requires_grad_(), *rest, **options)
                told.append("no error")
            except Exception as error:
                told.append(str(error))
    return told


def run(ranks: Ranks, task: str, **arguments: Any) -> list[Any]:
    return ranks.run(2, f"{__name__}:{task}", **arguments)


def check_against_float64(ranks: Ranks, op: str, fields: dict[str, Any], how: str) -> None:
    for error, is_right, _ in run(
        ranks, "differentiate", op=op, fields=fields, how=how, dtype="bfloat16", variant="baseline"
    ):
        assert is_right
        assert error < 0.01


@pytest.mark.parametrize(("op", "fields"), CASES)
def test_gradients_equal_those_in_float64(ranks: Ranks, op: str, fields: dict[str, Any]) -> None:
    check_against_float64(ranks, op, fields, "compiled recomputed")


def test_gradients_are_right_however_they_are_called(ranks: Ranks, sample: Sample) -> None:
    for (op, fields), how in sample.of(list(itertools.product(CASES, HOW))):
        check_against_float64(ranks, op, fields, how)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("op", "fields"), [CASES[1], CASES[3], CASES[5]])
def test_gradients_pass_through_fused_variants(
    ranks: Ranks, op: str, fields: dict[str, Any], dtype: str
) -> None:
    for error, is_right, kinds in run(
        ranks, "differentiate", op=op, fields=fields, how="eager", dtype=dtype, variant="push"
    ):
        assert is_right
        assert error < (0.01 if dtype == "bfloat16" else 0.002)
        assert "exact" in kinds


def test_operations_without_a_formula_refuse_gradients(ranks: Ranks) -> None:
    for told in run(ranks, "refuse"):
        assert len(told) == 4
        assert all("an input requires a gradient" in each for each in told)


# -- of embeddings: of the tables alone, by torch's own bags ------------------------------------


def differentiate_tables(fabric: Any, fields: dict[str, Any], how: str) -> tuple[float, bool, bool]:
    """The relative error of the gradient, whether a second one is the same, and forward is right.

    A bag that is out of order is left out.
    """
    import torch.distributed as dist

    from taxfree_kernels.variant import operation

    problem = problem_of(EMBEDDING, **fields)
    rt, made = runtime_of(fabric, record_of(fabric, problem)), operation(EMBEDDING)
    tensors = made.make_inputs(problem, fabric.rank, 1, fabric.device, integers=True)
    everyone: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(everyone, tensors)
    tables = torch.cat([each[0] for each in everyone], problem.shard_dim).double().requires_grad_()
    results = []
    for _, indices, offsets, weights in everyone:
        pooled = [
            torch.nn.functional.embedding_bag(
                indices[table, : begins[-1]], tables[table], begins, mode=problem.mode,
                include_last_offset=True,
                per_sample_weights=None
                if weights is None
                else weights[table, : begins[-1]].double(),
            )
            for table, begins in enumerate(offsets)
        ]  # fmt: skip
        results.append(torch.stack(pooled, 1))
    upstream = [
        torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed, y in enumerate(results)
    ]
    sum((y * dy.double()).sum() for y, dy in zip(results, upstream, strict=True)).backward()
    exact = tables.grad.tensor_split(
        [problem.tables * rank // fabric.world_size for rank in range(1, fabric.world_size)]
    ) if problem.shard_dim == 0 else tables.grad.chunk(fabric.world_size, 1)  # fmt: skip

    weight, *bags = tensors
    options = {"shard_dim": problem.shard_dim, "mode": problem.mode}
    call = run_with(how, lambda *each: rt.embedding_all_to_all(*each, **options))
    found = []
    for _ in range(2):
        leaf = weight.clone().requires_grad_()
        y = call(leaf, *bags)
        y.backward(upstream[fabric.rank].to(y.dtype))
        found.append(leaf.grad)
    wanted = exact[fabric.rank]
    assert (found[0].shape, found[0].dtype) == (weight.shape, weight.dtype)
    error = float((found[0].double() - wanted).norm() / wanted.norm().clamp(min=1e-9))
    is_right = torch.equal(y.detach().double(), results[fabric.rank].detach().to(y.dtype).double())
    return error, torch.equal(*found), is_right


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "mean"},
        {"shard_dim": 1, "weighted": True},
        {"batch": 5, "tables": 1, "dtype": "bfloat16"},  # a rank owns none
        {"shard_dim": 1, "mode": "mean", "dtype": "float32"},
        {"bag": 128, "rows": 1, "dtype": "bfloat16"},  # a row that all ask for
    ],
)
def test_tables_get_the_gradient_of_their_rows(ranks, fields, how):
    task = f"{__name__}:differentiate_tables"
    for error, is_same_again, is_right in ranks.run(2, task, fields=fields, how=how):
        assert error < 5e-3
        assert is_same_again
        assert is_right
