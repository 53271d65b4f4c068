"""Models that PyTorch's tensor parallelism has parallelised, on taxfree."""

from __future__ import annotations

import contextlib
import copy
import itertools
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.ranks import Ranks
from tests.sample import Sample

STEPS = 20


def opened(model: Any, is_sequence_parallel: bool) -> tuple[Any, Any]:
    """The mesh of all ranks, and a model that is parallelised on it."""
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.models import llama
    from tests.models.meshes import new_mesh

    mesh = new_mesh()
    return mesh, parallelize_module(model, mesh, llama.plan(is_sequence_parallel))


def losses_of(model: Any, steps: int) -> list[float]:
    """The loss of each step on the same few tokens."""
    from tests.models.llama import VOCABULARY

    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(fabric: Any, is_sequence_parallel: bool, steps: int, folder: str) -> Any:
    """The losses of PyTorch's tensor parallelism and of ours, and what ours ran.

    Args:
        folder: for a table of records; none is used if it is empty.
    """
    import taxfree
    from taxfree.models import report
    from tests.models.llama import Llama
    from tests.models.records import tuned

    torch.manual_seed(0)
    model = Llama(bias=is_sequence_parallel).bfloat16()
    _, library = opened(copy.deepcopy(model), is_sequence_parallel)
    mesh, ours = opened(model, is_sequence_parallel)
    report.clear()
    with tuned(fabric, folder) if folder else nullcontext(), taxfree.enable(mesh, ours) as rt:
        taxfree.enable(mesh, ours)  # again changes nothing
        found = losses_of(library, steps), losses_of(ours, steps)
        rt.check()
        return *found, taxfree.report().layers, rt.stats()


def compare(fabric: Any, what: str) -> Any:
    """Errors of one step against DTensor's, what ran, and an error's text."""
    from torch.distributed.tensor import DTensor

    import taxfree
    from taxfree.models import report
    from tests.models.llama import VOCABULARY, Llama

    torch.manual_seed(0)
    model = Llama(bias=True)
    model = model if what == "float32" else model.half()
    is_sequence_parallel = what != "replicated"
    _, library = opened(copy.deepcopy(model), is_sequence_parallel)
    mesh, ours = opened(model, is_sequence_parallel)
    if what == "weight":
        weight = ours.blocks[0].mlp.down.weight
        weight._local_tensor = weight._local_tensor.as_subclass(Quantized)
    report.clear()
    tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(2))
    with taxfree.enable(mesh, ours):
        torch.compiler.reset()
        function = ours
        if what == "compiled":
            function = torch.compile(ours, fullgraph=True, backend="aot_eager")
        elif what == "layers":  # each compiled for itself, by one and the same code
            for module in ours.modules():
                if isinstance(module, torch.nn.Linear):
                    module.compile(backend="aot_eager")
        elif what == "recomputed":
            function = partial(checkpoint, ours, use_reentrant=False)
        for each in (library, function):
            (each(tokens).float() ** 2).mean().backward()
    errors = {}
    for (name, parameter), other in zip(ours.named_parameters(), library.parameters(), strict=True):
        grads = [each.grad for each in (parameter, other)]
        found, wanted = (
            (grad.full_tensor() if isinstance(grad, DTensor) else grad).double() for grad in grads
        )
        if not name.endswith("k.bias"):  # softmax does not depend on it: its gradient is noise
            errors[name] = float((found - wanted).norm() / wanted.norm())
    return errors, taxfree.report().layers


def blocks_compiled_one_by_one(fabric: Any) -> tuple[int, dict[str, dict[str, int]]]:
    """The graphs of four equal blocks, each compiled for itself, and what was reported."""
    from torch._dynamo.utils import counters
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    class Block(torch.nn.Sequential):  # frames of PyTorch's own modules are compiled in parts
        def forward(self, x: Any) -> Any:
            return super().forward(x)

    blocks = [Block(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)]
    model = torch.nn.Sequential(*blocks).bfloat16()
    mesh = new_mesh()
    parallelize_module(model, mesh, {"*.0": ColwiseParallel(), "*.1": RowwiseParallel()})
    report.clear()
    with taxfree.enable(mesh, model):
        torch.compiler.reset()
        before = counters["stats"]["unique_graphs"]
        for block in model:
            block.compile(backend="eager", fullgraph=True, dynamic=False)
        with torch.no_grad():
            model(torch.ones(2, 8, dtype=torch.bfloat16))
        graphs = counters["stats"]["unique_graphs"] - before
        return graphs, {name: dict(ran) for name, ran in taxfree.report().layers.items()}


class Quantized(torch.Tensor):
    """A weight of a type of its own, as quantisation makes them."""


def scatter_odd_rows(fabric: Any) -> Any:
    """Whether rows that do not divide evenly are right, and what ran."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    mesh = new_mesh()
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(8, 4).bfloat16(), torch.randn(3, 8).bfloat16()
    expected = linear(x).chunk(fabric.world_size)[fabric.rank]
    parallelize_module(linear, mesh, RowwiseParallel(output_layouts=Shard(0)))
    report.clear()
    with taxfree.enable(mesh, linear):
        y = linear(x.chunk(fabric.world_size, 1)[fabric.rank])
    return torch.allclose(y, expected, atol=0.05), taxfree.report().layers


def run_uneven_features(fabric: Any) -> Any:
    """By layout: the loss, the input's gradient and logits before and after enable; what ran."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )  # fmt: skip

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    mesh = new_mesh()
    words = 51
    targets = torch.tensor([words - 1, (words + 1) // 2 - 1, 0])
    styles = {
        "loss": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "gathered": ColwiseParallel(output_layouts=Replicate()),
        "rows": ColwiseParallel(input_layouts=Shard(0)),
        "columns": RowwiseParallel(input_layouts=Replicate()),
    }
    found = {}
    for what, style in styles.items():
        torch.manual_seed(0)
        sizes = (words, 16) if what == "columns" else (16, words)
        layer = torch.nn.Sequential(torch.nn.Linear(*sizes, bias=False).bfloat16())
        parallelize_module(layer, mesh, {"0": style})
        whole = torch.randn(4 if what == "rows" else 3, sizes[0]).bfloat16()
        results = []
        for is_ours in (False, True):
            report.clear()
            x = (whole.chunk(2)[fabric.rank] if what == "rows" else whole).clone().requires_grad_()
            with taxfree.enable(mesh, layer) if is_ours else nullcontext(), loss_parallel():
                y = layer(x)
                if what == "loss":
                    loss = torch.nn.functional.cross_entropy(y.float(), targets)
                    y = loss.full_tensor() if isinstance(loss, DTensor) else loss
                y.float().square().sum().backward()
            results += [y.detach(), x.grad]
        before, grad, after, other = results
        found[what] = (
            torch.equal(before, after) and torch.equal(grad, other),
            report.report().layers,
        )
    return found


def enable_other_sizes(fabric: Any) -> Any:
    """What is said of a layer that has as many features as ranks have a number of their own."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    mesh = new_mesh()
    layer = parallelize_module(torch.nn.Linear(8, 8 + 4 * fabric.rank), mesh, ColwiseParallel())
    report.clear()
    with taxfree.enable(mesh, layer):
        return report.report().layers["Linear"]


def shard_further(fabric: Any) -> dict[str, Any]:
    """By when `enable` comes: the losses beside those of PyTorch, and what ran."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    import taxfree
    from taxfree.models import report
    from tests.models import llama

    # groups of their own: a runtime on the workers' group may be another test's
    ranks = range(fabric.world_size)
    alone = [dist.new_group([rank]) for rank in ranks][fabric.rank]
    groups, names = [alone, dist.new_group()], ("data", "tensor")
    meshes = DeviceMesh.from_group(groups, "cpu", [[*ranks]], mesh_dim_names=names)
    mesh, found = meshes["tensor"], {}
    for when in ("never", "before", "after"):
        torch.manual_seed(0)
        model = parallelize_module(llama.Llama().bfloat16(), mesh, llama.plan(False))
        report.clear()
        with contextlib.ExitStack() as runtimes:
            if when == "before":
                runtimes.enter_context(taxfree.enable(mesh, model))
            for each in (*model.blocks, model):
                fully_shard(each, mesh=meshes["data"])
            if when == "after":
                runtimes.enter_context(taxfree.enable(mesh, model))
            found[when] = losses_of(model, 2), report.report().layers
    return found


def call_twice_enabled(fabric: Any) -> Any:
    """What ran while enabled, after closing, enabled again, and in a copy."""
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    mesh = new_mesh()
    model = torch.nn.Sequential(torch.nn.Linear(8, 4).bfloat16())
    parallelize_module(model, mesh, {"0": RowwiseParallel()})
    x, told = torch.ones(3, 8 // fabric.world_size).bfloat16(), []

    def call(model: Any) -> None:
        report.clear()
        with torch.no_grad():
            model(x)
        told.append(taxfree.report().layers["0"])

    with taxfree.enable(mesh):
        call(model)
    call(model)
    with taxfree.enable(mesh):
        call(model)
        call(copy.deepcopy(model))
    return told


class Scaled(torch.nn.Linear):
    """A layer that computes something else than its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * torch.nn.functional.linear(x, self.weight, self.bias)


def deviate(fabric: Any) -> dict[str, tuple[float, Any]]:
    """By deviation of a layer: the error of its output against PyTorch's, and what ran."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    found = {}
    for what in ("subclass", "forward", "hook before", "hook between", "autocast", "frozen"):
        outputs = []
        for is_ours in (False, True):
            torch.manual_seed(0)
            layer = (Scaled if what == "subclass" else torch.nn.Linear)(8, 4).bfloat16()
            if what == "forward":
                layer.forward = partial(Scaled.forward, layer)
            if what == "hook before":
                layer.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
            mesh = new_mesh()
            parallelize_module(layer, mesh, ColwiseParallel())
            if what == "hook between":
                layer.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
            layer.weight.requires_grad_(what != "frozen")
            report.clear()
            x = torch.randn(3, 8).bfloat16().requires_grad_()
            with (
                taxfree.enable(mesh, layer) if is_ours else nullcontext(),
                torch.autocast("cpu", torch.float16, enabled=what == "autocast"),
            ):
                y = layer(x)
                y.float().sum().backward()
            outputs.append(torch.cat((y.detach().float().flatten(), x.grad.float().flatten())))
        error = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
        found[what] = (
            float(error),
            taxfree.report().layers["Linear" if what != "subclass" else "Scaled"],
        )
    return found


def enable_badly(fabric: Any) -> list[str]:
    """What is said to wrong arguments, and what is reported where there is no layer."""
    from torch.distributed.device_mesh import init_device_mesh

    import taxfree
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    told = []
    mesh = new_mesh()
    for arguments in (
        (init_device_mesh("cpu", (1, fabric.world_size)),),
        ("tp",),
        (mesh, torch.nn.Linear(8, 4)),
    ):
        try:
            taxfree.enable(*arguments)
        except taxfree.UsageError as error:
            told.append(error.message)
    report.clear()
    with taxfree.enable(mesh):
        return [*told, *taxfree.report().layers["all layers"]]


def run(ranks: Ranks, task: str, **arguments: Any) -> list[Any]:
    return ranks.run(2, f"{__name__}:{task}", **arguments)


def check_training(ranks: Ranks, world_size: int, **arguments: Any) -> list[Any]:
    """Train, compare with the library, and return the calls of each rank by problem."""
    is_sequence_parallel, steps = arguments["is_sequence_parallel"], arguments["steps"]
    row = "matmul_reduce_scatter" if is_sequence_parallel else "matmul_all_reduce"
    column = "all_gather_matmul" if is_sequence_parallel else "matmul; backward matmul_all_reduce"
    problems = []
    for library, ours, layers, calls in ranks.run(world_size, f"{__name__}:train", **arguments):
        assert ours == pytest.approx(library, rel=0.03, abs=0.03)
        assert ours[-1] < ours[0]
        assert layers["blocks.0.mlp.down"] == layers["blocks.0.attention.o"] == {row: steps}
        assert layers["blocks.0.mlp.up"] == layers["head"] == {column: steps}
        assert not any("library" in ran for each in layers.values() for ran in each)
        problems.append(calls)
    return problems


def test_training_has_the_loss_curve_of_the_library(ranks: Ranks, sample: Sample) -> None:
    trainings = list(itertools.product((2, 4), (False, True)))
    for world_size, is_sequence_parallel in sample.one_of(trainings):
        check_training(
            ranks, world_size, is_sequence_parallel=is_sequence_parallel, steps=STEPS, folder=""
        )


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_training_runs_fused_variants(
    ranks: Ranks, tmp_path: Path, is_sequence_parallel: bool
) -> None:
    for calls in check_training(
        ranks, 2, is_sequence_parallel=is_sequence_parallel, steps=3, folder=str(tmp_path)
    ):
        assert len(calls) >= 4
        assert {kind for kinds in calls.values() for kind in kinds} <= {"exact", "neighbour"}


@pytest.mark.dealt("what")
@pytest.mark.parametrize("what", ["replicated", "sequence", "compiled", "layers", "recomputed"])
def test_gradients_are_those_of_dtensor(ranks: Ranks, what: str) -> None:
    for errors, layers in run(ranks, "compare", what=what):
        assert max(errors.values()) < 0.01, errors
        assert not any("library" in ran for each in layers.values() for ran in each)


@pytest.mark.parametrize(
    ("what", "layer", "reason"),
    [
        ("float32", "head", "float32"),
        ("weight", "blocks.0.mlp.down", "the weight is a Quantized"),
    ],
)
def test_what_is_not_served_runs_the_library_and_is_counted(
    ranks: Ranks, what: str, layer: str, reason: str
) -> None:
    for errors, layers in run(ranks, "compare", what=what):
        assert max(errors.values()) < 0.01, errors
        assert layers[layer] == {f"library: {reason}": 1}


def test_rows_that_do_not_divide_evenly_run_the_library(ranks: Ranks) -> None:
    for is_right, layers in run(ranks, "scatter_odd_rows"):
        assert is_right
        assert layers == {"Linear": {"library: 3 rows are not divisible by 2 ranks": 1}}


def test_features_that_do_not_divide_evenly_run_the_library(ranks: Ranks) -> None:
    for found in run(ranks, "run_uneven_features"):
        for is_same, layers in found.values():
            assert is_same, found
            assert layers == {"0": {"library: 51 features are not divisible by 2 ranks": 1}}


def test_sizes_that_differ_between_ranks_run_the_library(ranks: Ranks) -> None:
    for ran in run(ranks, "enable_other_sizes"):
        assert ran == {"library: its sizes differ between ranks": 0}


def test_equal_blocks_share_compiled_code(ranks: Ranks) -> None:
    for graphs, layers in ranks.run(2, f"{__name__}:blocks_compiled_one_by_one"):
        assert graphs == 1
        assert layers["0.1"] == {"matmul_all_reduce": 1}


def test_one_rank_runs_the_library(ranks: Ranks) -> None:
    ((_, layers),) = ranks.run(1, f"{__name__}:blocks_compiled_one_by_one")
    assert layers["0.1"] == {"library: there is one rank": 1}


def test_fsdp_may_come_before_or_after(ranks: Ranks) -> None:
    for found in run(ranks, "shard_further"):
        expected, _ = found.pop("never")
        for losses, layers in found.values():
            assert losses == pytest.approx(expected, rel=0.03)
            assert layers["blocks.0.mlp.down"] == {"matmul_all_reduce": 2}


def test_models_of_a_mesh_are_found_and_survive_the_runtime(ranks: Ranks) -> None:
    served, library = {"matmul_all_reduce": 1}, {"library: the runtime is closed": 1}
    for told in run(ranks, "call_twice_enabled"):
        assert told == [served, library, served, served]


def test_layers_that_deviate_are_right(ranks: Ranks) -> None:
    served, own = "matmul; backward matmul_all_reduce", "has a forward of its own"
    for found in run(ranks, "deviate"):
        assert all(error < 0.01 for error, _ in found.values()), found
        assert {what: ran for what, (_, ran) in found.items()} == {
            "subclass": {f"library: Scaled {own}": 1},
            "forward": {f"library: Linear {own}": 1},
            "hook before": {served: 1},
            "hook between": {"library: it has hooks between those of its style": 1},
            "autocast": {"library: bfloat16, under autocast to float16": 1},
            "frozen": {served: 1},
        }


def test_wrong_arguments_and_the_wrong_order_are_told(ranks: Ranks) -> None:
    for told in run(ranks, "enable_badly"):
        assert told == [
            "the mesh has 2 dimensions",
            "'tp' is no DeviceMesh",
            "the model has no linear layer on this mesh",
            "library: none was parallelised on the mesh when taxfree.enable was called",
        ]
