"""Collectives beside matmuls in compiled code, on two ranks."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.ranks import Ranks

WIDTH, HIDDEN, ROWS = 32, 64, 4


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(nn.functional.silu(self.up(x)))
        return x + y if self.bias is None else x + (y + self.bias)


def ours_run() -> Any:
    """A table by which our variants run everything that can be rewritten."""
    from taxfree._runtime.runtime import Runtime

    return mock.patch.object(Runtime, "_runs_library", return_value=False)


def compile_mlp(
    fabric: Any,
    scattered: bool,
    dtype: str,
    micro_pipeline: bool = False,
    layers: bool = False,
    is_tuned: bool = True,
    recomputed: str = "nothing",
    folder: str = "",
    dim: int = 0,
) -> Any:
    """Relative errors of the output and the gradients against eager PyTorch, and what ran.

    Args:
        dim: of the rows that are scattered.
        recomputed: by a checkpoint: "all", or what is "not selected" to be kept.
        layers: that call the operations; else PyTorch's collectives are found.
        is_tuned: for our variants; else nothing is on record.
        folder: for a table of records; none is used if it is empty.
    """
    from torch._inductor import config
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )  # fmt: skip

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh
    from tests.models.records import tuned

    world = fabric.world_size
    mesh = new_mesh()
    torch.manual_seed(0)
    model = MLP(bias=not scattered).to(getattr(torch, dtype))
    rows = Shard(dim) if scattered else Replicate()
    plan = {
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
    }
    with tuned(fabric, folder) if folder else nullcontext():
        rt = taxfree.enable(mesh)  # before there are layers: they stay PyTorch's
    parallelize_module(model, mesh, plan)
    if layers:
        taxfree.enable(mesh, model)
    x = torch.randn(ROWS * world, 3, WIDTH).to(getattr(torch, dtype))
    x = x.movedim(0, dim).chunk(world, dim)[fabric.rank] if scattered else x

    def results(function: Any) -> list[torch.Tensor]:
        model.zero_grad()
        own = x.clone().requires_grad_()
        y = function(own)
        (y.float() ** 2).sum().backward()
        weights = [model.up.weight.grad.to_local(), model.down.weight.grad.to_local()]
        return [each.float() for each in (y.detach(), own.grad, *weights)]

    expected = results(model)
    report.clear()
    torch.compiler.reset()
    with (
        rt,
        config.patch(_micro_pipeline_tp=micro_pipeline, fx_graph_cache=False),
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
        ours_run() if is_tuned else nullcontext(),
    ):
        before = taxfree.report().problems
        function: Any = model
        if recomputed != "nothing":
            options: dict[str, Any] = {"use_reentrant": False}
            if recomputed == "not selected":
                kept = [torch.ops.aten.mm.default]
                options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
            function = partial(checkpoint, model, **options)
        found = results(torch.compile(function, fullgraph=True))
        rt.check()
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        after = taxfree.report()
        ran = [each for each, kinds in after.problems.items() if kinds != before.get(each)]
        return errors, after.layers, ran


class LlamaNorm(nn.Module):
    """As Transformers' models have it: cast before the product with the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Norms(nn.Module):
    """Two sums that are normalized; the first is also the residual of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.between = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.norm, self.last = LlamaNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = h + self.first(x)
        return self.last(h + self.second(self.between(self.norm(h))))


def compile_norms(fabric: Any, what: str, folder: str) -> Any:
    """The largest relative error of a row against float64, what was found, and the problems.

    Args:
        what: "layers" that call the operations, or their "training".
    """
    from torch._inductor import config
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )  # fmt: skip

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh
    from tests.models.records import tuned

    mesh = new_mesh()
    torch.manual_seed(0)
    model = Norms().bfloat16()
    h, x = torch.randn(2, 3, WIDTH).bfloat16(), torch.randn(2, 3, HIDDEN).bfloat16()
    h.requires_grad_(what == "training")
    wide = h.detach().double().requires_grad_()
    expected = copy.deepcopy(model).double()(wide, x.double())
    upstream = torch.randn(h.shape).bfloat16()
    expected.backward(upstream.double())
    row, column = RowwiseParallel(), ColwiseParallel()
    plan = {"first": row, "second": row, "between": column}
    with tuned(fabric, folder):
        rt = taxfree.enable(mesh)
    parallelize_module(model, mesh, plan)
    taxfree.enable(mesh, model)
    report.clear()
    torch.compiler.reset()
    x = x.chunk(fabric.world_size, -1)[fabric.rank]
    with rt, torch.set_grad_enabled(h.requires_grad), config.patch(fx_graph_cache=False):
        y = torch.compile(model, fullgraph=True)(h, x)
        pairs = [(y.detach(), expected.detach())]
        if h.requires_grad:
            y.backward(upstream)
            pairs.append((h.grad, wide.grad))
        rt.check()
        errors = [float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) for a, b in pairs]
        return max(errors), taxfree.report().layers, rt.stats()


def add_what_is_a_ranks_own(fabric: Any) -> Any:
    """By what follows a sum: the error of compiled code against PyTorch's own; and what ran.

    The all-reduce is the model's own; the variant that runs adds on the rank that has the rows.
    """
    import torch.distributed._functional_collectives as collectives
    from torch._inductor import config

    import taxfree
    from taxfree.models import report
    from tests.taxfree.runtime_tasks import problem_of, record_of, runtime_of

    fields = {"m": ROWS, "n": WIDTH, "k": WIDTH, "weight_layout": "kn", "dtype": "bfloat16"}
    problems = [
        problem_of("matmul_all_reduce", **fields, **follows)
        for follows in ({}, {"residual": True}, {"bias": True})
    ]
    rt = runtime_of(fabric, *(record_of(fabric, each, "two_shot") for each in problems))
    mesh = dist.device_mesh.DeviceMesh.from_group(fabric.group, "cpu")
    taxfree.enable(mesh)
    torch.manual_seed(fabric.rank)
    x, weight, own = (torch.randn(rows, WIDTH).bfloat16() for rows in (ROWS, WIDTH, ROWS))
    errors = {}
    report.clear()
    for name, follows in {
        "residual": lambda y: y + own,
        "bias": lambda y: y + own[0],
        "norm": lambda y: nn.functional.rms_norm(y, (WIDTH,), own[0]),
        "broadcast": lambda y: y + own.expand(2, ROWS, WIDTH),
    }.items():

        def model(x: torch.Tensor, follows: Any = follows) -> Any:
            return follows(collectives.all_reduce(x @ weight, "sum", fabric.group))

        torch.compiler.reset()
        with torch.no_grad(), config.patch(fx_graph_cache=False):
            expected, found = model(x).double(), torch.compile(model)(x).double()
        errors[name] = float((found - expected).norm() / expected.norm())
    rt.check()
    return errors, taxfree.report().layers


def split_unevenly(fabric: Any) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
    """Matmuls of a user's own whose n or k differ between ranks: errors, and what ran."""
    import torch.distributed._functional_collectives as functional
    from torch._inductor import config

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    mesh, ranks, rank = new_mesh(), fabric.world_size, fabric.rank
    group, generator = mesh.get_group(), torch.Generator().manual_seed(1)
    x, w, v = (
        torch.randn(size, generator=generator).bfloat16() for size in ((4, 33), (33, 32), (33, 35))
    )
    own_x, own_w = (each.tensor_split(ranks, dim)[rank] for each, dim in ((x, 1), (w, 0)))
    rows, own_v = x.chunk(ranks)[rank], v.tensor_split(ranks, 1)[rank]
    cases = {
        "sum": (lambda: functional.all_reduce(own_x @ own_w, "sum", group), x @ w),
        "scatter": (
            lambda: functional.reduce_scatter_tensor(own_x @ own_w, "sum", 0, group),
            (x @ w).chunk(ranks)[rank],
        ),
        "gather": (lambda: functional.all_gather_tensor(rows, 0, group) @ own_v, x @ own_v),
    }
    report.clear()
    torch.compiler.reset()
    errors = {}
    with ours_run(), taxfree.enable(mesh), torch.no_grad(), config.patch(fx_graph_cache=False):
        for name, (call, expected) in cases.items():
            y = torch.compile(call)()
            errors[name] = float((y - expected).norm() / expected.norm())
    return errors, taxfree.report().layers


def compare(fabric: Any) -> list[bool]:
    """Values that are the same, that differ, and that one rank alone compares."""
    from taxfree._runtime.collectives import all_find_differing

    group, rank = dist.new_group(list(range(fabric.world_size))), fabric.rank
    found = [all_find_differing(group, each, 20.0) for each in ("same", f"of rank {rank}")]
    return [*found, rank == 0 and all_find_differing(group, "alone", 0.1)]


def add_to_a_layer(fabric: Any) -> dict[str, float]:
    """By addend: the error of a compiled layer against the eager one."""
    from torch._inductor import config
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    import taxfree
    from tests.models.meshes import new_mesh

    mesh = new_mesh()
    torch.manual_seed(0)
    layer = parallelize_module(nn.Linear(HIDDEN, WIDTH).bfloat16(), mesh, RowwiseParallel())
    x, more = torch.randn(ROWS, HIDDEN // 2).bfloat16(), torch.randn(3, ROWS, WIDTH).bfloat16()
    addends = {
        "broadcast over the sum": more[0, 0],
        "the sum is broadcast": more,
        "rows": more[0, :1],
        "columns": more[0, :, :1],
        "scalar": 1.5,
    }
    with (
        taxfree.enable(mesh, layer), ours_run(), torch.no_grad(),
        config.patch(fx_graph_cache=False),
    ):  # fmt: skip
        expected = {name: (layer(x) + each).double() for name, each in addends.items()}
        torch.compiler.reset()
        found = torch.compile(lambda x: {name: layer(x) + each for name, each in addends.items()})(
            x
        )
    return {
        name: float((y - expected[name]).norm() / expected[name].norm())
        for name, y in found.items()
    }


class Heads(nn.Module):
    """Three linear layers on the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HIDDEN)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q(x), self.k(x), self.v(x)), -1)


def compile_heads(fabric: Any, is_training: bool, folder: str) -> Any:
    """Relative errors against eager PyTorch, what was found, and the problems."""
    from torch._inductor import config
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        parallelize_module,
    )  # fmt: skip

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh
    from tests.models.records import tuned

    mesh = new_mesh()
    torch.manual_seed(0)
    heads = Heads()
    model = nn.Sequential(heads).bfloat16()  # a root's hooks would be compiled apart
    with tuned(fabric, folder) if folder else nullcontext():
        rt = taxfree.enable(mesh)
    gather = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    parallelize_module(
        model, mesh, {"0": gather, **{f"0.{each}": ColwiseParallel() for each in "qkv"}}
    )
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(fabric.rank)).bfloat16()

    def results(function: Any) -> list[torch.Tensor]:
        model.zero_grad()
        own = x.clone().requires_grad_(is_training)
        with torch.set_grad_enabled(is_training):
            y = function(own)
        if not is_training:
            return [y]
        (y.float() ** 2).sum().backward()
        weights = [each.weight.grad.to_local() for each in (heads.q, heads.k, heads.v)]
        return [y.detach(), own.grad, *weights]

    expected = results(model)
    report.clear()
    torch.compiler.reset()
    with rt, config.patch(fx_graph_cache=False), nullcontext() if folder else ours_run():
        found = results(torch.compile(model, fullgraph=True))
        rt.check()
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        return errors, taxfree.report().layers, rt.stats()


def call_fused_ops(fabric: Any, folder: str) -> Any:
    """Whether PyTorch's fused ops are right in each dimension, and what ran."""
    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh
    from tests.models.records import tuned

    mesh = new_mesh()
    name = mesh.get_group().group_name
    right = []
    with tuned(fabric, folder) if folder else nullcontext(), taxfree.enable(mesh):
        report.clear()
        for dim, count, wants_a in ((0, 1, False), (1, 1, False), (2, 1, False), (0, 3, False),
                                    (1, 1, True), (2, 2, True)):  # fmt: skip
            a = torch.randint(-3, 4, (2, 4, 6)).bfloat16()
            weights = [
                torch.randint(-3, 4, (12 if dim == 2 else 6, 8)).bfloat16() for _ in range(count)
            ]
            gathered, ys = torch.ops.symm_mem.fused_all_gather_matmul(
                a, weights, dim, name, return_A=wants_a
            )
            shards: list[Any] = [None] * fabric.world_size
            torch.distributed.all_gather_object(shards, a)
            full = torch.cat(shards, dim)
            right += [torch.equal(y, full @ w) for y, w in zip(ys, weights, strict=True)]
            right.append(torch.equal(gathered, full) if wants_a else gathered is None)
        for dim in range(3):
            x = torch.randint(-3, 4, (2, 4, 6)).bfloat16()
            w = torch.randint(-3, 4, (6, 8)).bfloat16()
            y = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", dim, name)
            products: list[Any] = [None] * fabric.world_size
            torch.distributed.all_gather_object(products, x @ w)
            wanted = sum(products).chunk(fabric.world_size, dim)[fabric.rank]
            right.append(torch.equal(y, wanted))
        return right, taxfree.report().layers


def call_own_op_of_pytorch(fabric: Any) -> tuple[bool, Any, Any]:
    """Whether an op is right on an enabled group whose record says that PyTorch's is the fastest.

    The op is PyTorch's: it comes to the runtime, which calls it. Here its fallback for CPUs runs.
    """
    from torch.distributed.device_mesh import DeviceMesh

    import taxfree
    from taxfree.models import report
    from taxfree_kernels.all_gather_matmul.torch_fused import TorchFused
    from tests.taxfree.runtime_tasks import problem_of, record_of, runtime_of

    problems = [
        problem_of(m=8, n=n, k=6, gather_dim=0, weight_layout="kn", dtype="bfloat16")
        for n in (8, 16)
    ]
    x = torch.randint(-3, 4, (8 // fabric.world_size, 6)).bfloat16()
    weights = [torch.randint(-3, 4, (6, 8)).bfloat16() for _ in range(2)]
    shards: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(shards, x)
    full = torch.cat(shards)
    with mock.patch.object(TorchFused, "unsupported_reason", return_value=None):
        records = [record_of(fabric, each, "torch_fused") for each in problems]
        rt = runtime_of(fabric, *records)
        mesh = DeviceMesh.from_group(fabric.group, "cpu")
        taxfree.enable(mesh)
        report.clear()
        name = fabric.group.group_name
        _, one = torch.ops.symm_mem.fused_all_gather_matmul(x, weights[:1], 0, name, return_A=False)
        *two, again = torch.ops.taxfree.all_gather_matmuls(x, weights, [None, None], True, name)
        _, three = torch.ops.symm_mem.fused_all_gather_matmul(x, weights, 0, name, return_A=False)
        found = [*one, *two, *three]
        is_right = torch.equal(again, full) and all(
            torch.equal(y, full @ w)
            for y, w in zip(found, [weights[0], *weights, *weights], strict=True)
        )
        return is_right, taxfree.report().layers, rt.stats()


def gather_once(fabric: Any, variant: str) -> tuple[bool, Any]:
    """Whether one gather serves several weights by a variant; "new": that nothing else names."""
    from taxfree import fingerprints
    from taxfree_kernels.all_gather_matmul.one_shot import OneShot
    from taxfree_kernels.variant import variants
    from tests.taxfree.runtime_tasks import problem_of, record_of, runtime_of

    class New(OneShot):
        name = "new"

    op = "all_gather_matmul"
    known = mock.patch.dict(variants(op), new=New())
    versions = mock.patch.dict(fingerprints.versions(op), new=1)
    problem = problem_of(m=8, n=24, k=6, gather_dim=0, weight_layout="kn", dtype="bfloat16")
    x = torch.randint(-3, 4, (8 // fabric.world_size, 6)).bfloat16()
    weights = [torch.randint(-3, 4, (6, n)).bfloat16() for n in (8, 16)]
    biases = [None, torch.randint(-3, 4, (16,)).bfloat16()]
    shards: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(shards, x)
    full = torch.cat(shards)
    with known, versions:
        rt = runtime_of(fabric, record_of(fabric, problem, variant))
        name = fabric.group.group_name
        call = partial(torch.ops.taxfree.all_gather_matmuls, x, weights, biases, True, name)
        found, stats = call(), rt.stats()
        with mock.patch("taxfree._runtime.runtime.joint_problem", side_effect=AssertionError):
            found += call()  # its plan is found by its tensors' layout
        wanted = [full @ weights[0], full @ weights[1] + biases[1], full]
        return all(map(torch.equal, found, 2 * wanted)), stats


def keys_of_caches(fabric: Any) -> list[Any]:
    """Inductor's keys of the pass: at first, with another record, and after the runtime's end."""
    import taxfree
    from taxfree.models.inductor import _PASS
    from tests.models.meshes import new_mesh
    from tests.taxfree.runtime_tasks import problem_of, record_of

    keys = []
    with taxfree.enable(new_mesh()) as rt:
        keys += [_PASS.uuid(), _PASS.uuid()]
        rt._dispatcher.add([record_of(fabric, problem_of(m=8, n=8, k=6), "push")])
        keys.append(_PASS.uuid())
    return [*keys, _PASS.uuid()]


def compile_again(fabric: Any) -> list[Any]:
    """What is reported of a graph that is compiled, and that comes from Inductor's cache then."""
    import torch.distributed._functional_collectives as collectives
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    mesh, told = new_mesh(), []
    x = torch.ones(4, 4).bfloat16()
    with taxfree.enable(mesh), torch.no_grad(), fresh_cache():
        for _ in range(2):
            report.clear()
            torch.compiler.reset()
            # without a kernel, whose headers a fresh cache would compile for ten seconds
            torch.compile(lambda x: collectives.all_reduce(x @ x, "sum", mesh.get_group()))(x)
            told.append(report.report().layers)
        return [*told, counters["inductor"]["fxgraph_cache_hit"] > 0]


def call_after_the_end(fabric: Any) -> Any:
    """Errors of compiled code with two runtimes, one, and none; and of code compiled afterwards."""
    import torch.distributed._functional_collectives as collectives
    from torch._inductor import config

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    mesh, group = new_mesh(), new_mesh().get_group()
    torch.manual_seed(0)
    x = torch.randn(6, WIDTH).bfloat16()
    square, bias = torch.randn(WIDTH, WIDTH).bfloat16(), torch.randn(WIDTH).bfloat16()

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_gather_tensor(x, 0, group)

    def models(rt: Any) -> list[Any]:
        return [
            lambda x: collectives.all_reduce(x @ square, "sum", group) * 2,
            lambda x: collectives.reduce_scatter_tensor(x @ square, "sum", 0, group) * 2,
            lambda x: torch.addmm(bias, gathered(x), square) * 2,
            lambda x: torch.stack((torch.addmm(bias, y := gathered(x), square), y @ square, y)),
            lambda x: rt.matmul_all_reduce_rms_norm(x, square, bias, bias, x)[0] * 2,
            lambda x: rt.matmul_reduce_scatter(x[:5], square) * 2,
            lambda x: rt.matmul_reduce_scatter(x, square, 1) * 2,
            lambda x: rt.all_gather_matmul(x[:, : WIDTH // 2].contiguous(), square, bias, 1) * 2,
        ]

    report.clear()
    torch.compiler.reset()
    with torch.no_grad(), config.patch(fx_graph_cache=False), ours_run():
        first = taxfree.enable(mesh)
        eager = models(first)
        compiled = [torch.compile(each) for each in eager]
        expected = [each(x) for each in eager]

        def errors() -> float:
            ys = [each(x) for each in compiled]
            return max(float((y - z).norm() / z.norm()) for y, z in zip(ys, expected, strict=True))

        found = [errors()]
        second = taxfree.init(group)
        found.append(errors())
        second.close()
        found.append(errors())
        calls = sum(kinds["baseline"] for kinds in first.stats().values())
        patterns = report.report().layers
        first.close()
        found.append(errors())
        compiled = [torch.compile(each) for each in models(None)[:4]]
        expected = expected[:4]
        torch.compiler.reset()
        found.append(errors())
        return found, calls, report.report().layers == patterns


def schedule_last_nodes_first(fabric: Any) -> list[int]:
    """Columns of a graph's two operations as they are called, if each node comes when it can."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    import taxfree

    def last_first(nodes: list[Any], *_: Any) -> list[Any]:
        left, done = list(nodes), []
        while left:
            made = {name for each in left for name in each.get_buffer_names()}
            done.append(
                next(
                    each
                    for each in reversed(left)
                    if not {dep.name for dep in each.unmet_dependencies} & made
                )
            )
            left.remove(done[-1])
        return done

    x, narrow, wide = (torch.ones(4, n).bfloat16() for n in (4, 8, 16))
    torch.compiler.reset()
    with (
        taxfree.init() as rt,
        config.patch(fx_graph_cache=False),
        mock.patch("torch._inductor.memory.reorder_for_peak_memory", last_first),
    ):
        both = torch.compile(
            lambda *weights: [rt.matmul_all_reduce(x, each) * 2 for each in weights]
        )
        with torch.no_grad():
            _, (code,) = run_and_get_code(both, narrow, wide)
    sizes = dict(re.findall(r"assert_size_stride\((arg\d_1), \(4, (\d+)\)", code))
    called = re.findall(r"matmul_all_reduce\.compiled\(\w+, (arg\d_1)", code)
    return [int(sizes[each]) for each in called]


def move_rows(fabric: Any) -> list[str]:
    """The code of a forward and a backward of which ours scatter rows of the second dimension."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )  # fmt: skip

    import taxfree
    from taxfree._runtime.runtime import Runtime
    from tests.models.meshes import new_mesh

    def gathers(runtime: Runtime, name: str, *_: Any, **__: Any) -> bool:
        return "gather" in name

    mesh, rows = new_mesh(), Shard(1)
    plan = {
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
    }
    model = parallelize_module(MLP(bias=False).bfloat16(), mesh, plan)
    x = torch.randn(2, ROWS, WIDTH).bfloat16().requires_grad_()
    torch.compiler.reset()
    with (
        taxfree.enable(mesh, model),
        mock.patch.object(Runtime, "_runs_library", gathers),
        config.patch(fx_graph_cache=False),
    ):
        compiled = torch.compile(model)
        return run_and_get_code(lambda: compiled(x).sum().backward())[1]


def meet(fabric: Any) -> list[tuple[str, int]]:
    """What a layer with a residual behind it meets without a record, and how often."""
    from torch._inductor import config
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    import taxfree
    from tests.models.meshes import new_mesh

    mesh = new_mesh()
    layer = parallelize_module(nn.Linear(8, 4).bfloat16(), mesh, RowwiseParallel())
    x, residual = torch.ones(3, 8 // fabric.world_size).bfloat16(), torch.ones(3, 4).bfloat16()
    torch.compiler.reset()
    with taxfree.enable(mesh, layer) as rt, torch.no_grad(), config.patch(fx_graph_cache=False):
        rt._collect_met()
        torch.compile(lambda: residual + layer(x))()
        counted: Any = rt._met
        return [(str(problem), calls) for problem, calls in counted._counted()]


def gather_symbols(fabric: Any) -> tuple[list[bool], Any]:
    """Whether rows whose number is a symbol are right, gathered for a matmul and for themselves."""
    import torch.distributed._functional_collectives as collectives
    from torch._inductor import config

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    mesh = new_mesh()
    weight = torch.arange(32).view(4, 8).bfloat16()

    def gathered(x: torch.Tensor) -> Any:
        rows = collectives.all_gather_tensor(x, 0, mesh.get_group())
        return rows @ weight, rows + 1

    torch.compiler.reset()
    report.clear()
    right = []
    with taxfree.enable(mesh), torch.no_grad(), config.patch(fx_graph_cache=False):
        compiled = torch.compile(gathered, dynamic=True, fullgraph=True)
        for rows in (3, 5):
            x = torch.full((rows, 4), fabric.rank + 1.0).bfloat16()
            right.append(all(map(torch.equal, compiled(x), gathered(x))))
    return right, taxfree.report().layers["compiled all_gather_into_tensor"]


def run(ranks: Ranks, task: str, **arguments: Any) -> list[Any]:
    return ranks.run(2, f"{__name__}:{task}", **arguments)


def test_a_cached_graph_is_of_the_table_that_decided_it(ranks: Ranks) -> None:
    found = run(ranks, "keys_of_caches")
    for first, again, tuned, closed in found:
        assert first == again
        assert len({first, tuned, closed}) == 3
    assert found[0] == found[1]  # ranks share a cache


def test_code_from_a_cache_is_reported(ranks: Ranks) -> None:
    for first, again, is_hit in run(ranks, "compile_again"):
        assert is_hit
        assert first["compiled all_reduce"] == {"library: no variant of ours is faster": 1}
        assert again == first


def test_compiled_code_runs_the_library_when_the_runtime_is_closed(ranks: Ranks) -> None:
    for errors, calls, is_forgotten in run(ranks, "call_after_the_end"):
        assert max(errors) < 0.01, errors
        assert calls == 4 + 8 + 8  # eager by methods; compiled code, before and after the second
        assert is_forgotten


def test_operations_are_called_in_the_order_of_the_graph(ranks: Ranks) -> None:
    """Ranks may schedule what lies between in other ways."""
    for columns in run(ranks, "schedule_last_nodes_first"):
        assert columns == [8, 16]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        # library and ours of the sum with residual and norm, with the residual, and alone
        ([(28.8, 20.7), (26.0, 18.6), (25.0, 18.5)], "norm"),  # within 3 %
        ([(27.8, 20.7), (23.2, 13.5), (21.7, 13.6)], "residual"),
        ([(515.3, 465.1), (524.8, 433.1), (510.1, 407.3)], "alone"),
        ([(27.8, 20.7), None, (21.7, 13.6)], "norm"),
        ([(23.2, 13.5), (21.7, 13.6)], "residual"),  # the library runs the one with the norm
    ],
)
def test_a_sum_takes_along_what_was_measured_to_save_the_most(times: Any, chosen: str) -> None:
    from taxfree.models import inductor

    names = ["norm", "residual", "alone"][-len(times) :]
    norm: Any = object()
    candidates = [
        inductor._Behind(each, None, None, norm if each == "norm" else None) for each in names
    ]
    with (
        mock.patch.object(inductor, "_asked", side_effect=times),
        mock.patch.object(inductor._Behind, "called", return_value=(None, ())),
    ):
        assert inductor._fastest(candidates, None, None, "0").last == chosen


def weigh_moved_bytes(fabric: Any) -> list[bool]:
    """Whether the library runs a sum that a record says to be 1 us faster, by the bytes moved."""
    from tests.taxfree.runtime_tasks import problem_of, record_of, runtime_of

    problem = problem_of("matmul_reduce_scatter", dtype="bfloat16")
    runtime = runtime_of(fabric, record_of(fabric, problem))
    x = torch.empty(problem.m, problem.k, dtype=torch.bfloat16)
    given = "matmul_reduce_scatter", x, x.new_empty(problem.n, problem.k).t(), 0
    return [runtime._runs_library(*given, moved_bytes=moved) for moved in (0, 1 << 20, 1 << 22)]


def test_what_an_operation_moves_in_addition_must_be_won_back(ranks: Ranks) -> None:
    for found in run(ranks, "weigh_moved_bytes"):
        assert found == [False, False, True]


def test_what_the_library_runs_in_a_graph_is_met_once(ranks: Ranks) -> None:
    for counted in run(ranks, "meet"):
        assert [calls for _, calls in counted] == [1, 1]
        assert ["residual=True" in problem for problem, _ in counted] == [True, False]


def test_an_all_reduce_takes_the_bias_and_the_residual_along(ranks: Ranks) -> None:
    for errors, layers, problems in run(
        ranks, "compile_mlp", scattered=False, dtype="bfloat16", layers=True
    ):
        assert max(errors) < 0.01
        assert layers["compiled matmul_all_reduce"] == {
            "with bias, residual": 1,  # forward
            "with residual": 1,  # backward: the gradient that passes beside the layer
        }
        assert any("bias=True" in each and "residual=True" in each for each in problems), problems


@pytest.mark.dealt("recomputed")
@pytest.mark.parametrize(
    ("recomputed", "scattered"), [("all", False), ("all", True), ("not selected", True)]
)
def test_a_checkpoint_computes_operations_again(
    ranks: Ranks, recomputed: str, scattered: bool
) -> None:
    for errors, _, problems in run(
        ranks, "compile_mlp", scattered=scattered, dtype="bfloat16", layers=True,
        recomputed=recomputed,
    ):  # fmt: skip
        assert max(errors) < 0.01
        assert len(problems) >= 2


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_where_the_library_is_faster_the_graph_has_no_operation_of_ours(
    ranks: Ranks, scattered: bool, layers: bool
) -> None:
    for errors, ran, problems in run(
        ranks, "compile_mlp", scattered=scattered, dtype="bfloat16", layers=layers, is_tuned=False
    ):
        assert max(errors) < 0.01
        compiled = {what for name, kinds in ran.items() if "compiled" in name for what in kinds}
        assert compiled
        assert all(what.startswith("library: ") for what in compiled), compiled
        assert problems == []


def test_what_follows_the_collectives_of_others_may_differ_by_rank(ranks: Ranks) -> None:
    for errors, ran in run(ranks, "add_what_is_a_ranks_own"):
        assert max(errors.values()) < 0.01, errors
        assert ran == {"compiled all_reduce": {"matmul_all_reduce": len(errors)}}


def test_matmuls_whose_sizes_differ_between_ranks_stay_pytorchs(ranks: Ranks) -> None:
    for errors, ran in run(ranks, "split_unevenly"):
        assert max(errors.values()) < 0.02, errors
        compiled = {what for name, kinds in ran.items() if "compiled" in name for what in kinds}
        assert compiled == {"library: the sizes of matmuls differ between ranks"}


def test_a_rank_that_compares_alone_finds_no_difference(ranks: Ranks) -> None:
    assert run(ranks, "compare") == [[False, True, False]] * 2


def test_a_layers_sum_may_be_broadcast(ranks: Ranks) -> None:
    for errors in run(ranks, "add_to_a_layer"):
        assert max(errors.values()) < 0.02, errors


def test_an_all_reduce_takes_the_norm_along(ranks: Ranks, tmp_path: Path) -> None:
    for error, ran, problems in run(ranks, "compile_norms", what="layers", folder=str(tmp_path)):
        assert error < 0.02
        assert ran["compiled matmul_all_reduce"] == {"with residual, RMSNorm": 2}
        assert ran["first"] == {"matmul_all_reduce": 1}
        (problem,) = problems
        assert "rms_norm=True" in problem
        assert problems[problem] == {"exact": 2}


def test_a_norm_that_the_backward_looks_into_stays(ranks: Ranks, tmp_path: Path) -> None:
    for error, ran, _ in run(ranks, "compile_norms", what="training", folder=str(tmp_path)):
        assert error < 0.05
        assert not any("RMSNorm" in each for each in ran["compiled matmul_all_reduce"])


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_gathered_and_scattered_forward_and_backward(ranks: Ranks, dim: int) -> None:
    for errors, layers, _ in run(ranks, "compile_mlp", scattered=True, dtype="float16", dim=dim):
        assert max(errors) < 0.002
        assert layers["compiled reduce_scatter_tensor"] == {"matmul_reduce_scatter": 2}
        gathers = layers["compiled all_gather_into_tensor"]
        assert sum(gathers.values()) >= 2
        assert all(what.startswith("all_gather_matmul") for what in gathers), gathers


def test_moved_rows_can_be_written_where_they_are_computed(ranks: Ranks) -> None:
    """A copy whose rows are found by division is a kernel of its own."""
    for codes in run(ranks, "move_rows"):
        assert sum("matmul_reduce_scatter.compiled" in code for code in codes) == 2
        assert not any("div_floor_integer" in code for code in codes)


def test_gathered_rows_may_be_a_symbol(ranks: Ranks) -> None:
    for right, ran in run(ranks, "gather_symbols"):
        assert right == [True, True]
        assert ran == {"all_gather_matmul for 1 weight and the gathered rows": 1}


def test_what_is_not_served_is_counted(ranks: Ranks) -> None:
    for errors, layers, _ in run(ranks, "compile_mlp", scattered=False, dtype="float32"):
        assert max(errors) < 1e-5
        assert set(layers["compiled all_reduce"]) == {"library: float32"}


@pytest.mark.parametrize("is_tuned", [False, True])
def test_the_micro_pipeline_pass_of_pytorch_calls_the_operations(
    ranks: Ranks, tmp_path: Path, is_tuned: bool
) -> None:
    for errors, layers, _ in run(
        ranks, "compile_mlp", scattered=True, dtype="bfloat16", micro_pipeline=True,
        folder=str(tmp_path) if is_tuned else "",
    ):  # fmt: skip
        assert max(errors) < 0.01
        ran = layers["symm_mem::fused_matmul_reduce_scatter"]
        assert ran["matmul_reduce_scatter" if is_tuned else "library: no record of ours"] == 2
        assert "symm_mem::fused_all_gather_matmul" in layers


@pytest.mark.parametrize("is_tuned", [False, True])
def test_fused_ops_of_pytorch_run_in_each_dimension(
    ranks: Ranks, tmp_path: Path, is_tuned: bool
) -> None:
    none = "library: no record of ours"
    ran = "all_gather_matmul for" if is_tuned else f"{none} for"
    one = (
        {"all_gather_matmul": 2, f"{none} for 1 weight": 1}
        if is_tuned
        else {f"{none} for 1 weight": 3}
    )
    for right, layers in run(ranks, "call_fused_ops", folder=str(tmp_path) if is_tuned else ""):
        assert all(right)
        assert layers == {
            "symm_mem::fused_all_gather_matmul": {
                **one,
                f"{ran} 3 weights": 1,
                f"{ran} 1 weight and the gathered rows": 1,
                "library: columns are gathered for 2 weights and the gathered rows": 1,
            },
            "symm_mem::fused_matmul_reduce_scatter": {none: 3},
        }


@pytest.mark.parametrize(("is_training", "is_tuned"), [(False, False), (True, True)])
def test_several_matmuls_use_one_gather(
    ranks: Ranks, tmp_path: Path, is_training: bool, is_tuned: bool
) -> None:
    folder = str(tmp_path) if is_tuned else ""
    for errors, layers, stats in run(
        ranks, "compile_heads", is_training=is_training, folder=folder
    ):
        assert max(errors) < 0.01
        ran = "all_gather_matmul for 3 weights" + " and the gathered rows" * is_training
        assert layers["compiled all_gather_into_tensor"] == {ran: 1}
        (gather,) = [each for each in stats if "AllGatherMatmul" in each]
        assert stats[gather] == {"exact" if is_tuned else "baseline": 1}


@pytest.mark.parametrize("variant", ["new", "overlap"])
def test_one_gather_for_several_weights_runs_by_any_variant_that_can(
    ranks: Ranks, variant: str
) -> None:
    for is_right, stats in run(ranks, "gather_once", variant=variant):
        assert is_right
        assert list(stats.values()) == [{"exact": 1}]


def test_an_op_of_pytorch_that_a_record_prefers_runs_once(ranks: Ranks) -> None:
    for is_right, layers, stats in run(ranks, "call_own_op_of_pytorch"):
        assert is_right
        assert layers == {
            "symm_mem::fused_all_gather_matmul": {
                "all_gather_matmul": 1,
                "library: no record of ours for 2 weights": 1,
            }
        }
        assert list(stats.values()) == [{"exact": 1}, {"exact": 2}]
