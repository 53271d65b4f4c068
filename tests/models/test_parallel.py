"""Models that PyTorch's tensor parallelism has parallelised, on taxfree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.ranks import Ranks

STEPS = 50


def opened(model: Any, is_sequence_parallel: bool) -> tuple[Any, Any]:
    """The mesh of all ranks, and a model that is parallelised on it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.models import llama

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
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


def train(fabric: Any, is_sequence_parallel: bool, bias: bool, steps: int) -> Any:
    """The losses of PyTorch's tensor parallelism and of ours, and what ours ran."""
    import taxfree
    from taxfree.models import report
    from tests.models.llama import Llama

    torch.manual_seed(0)
    model = Llama(bias).bfloat16()
    _, library = opened(copy.deepcopy(model), is_sequence_parallel)
    mesh, ours = opened(model, is_sequence_parallel)
    report.clear()
    with taxfree.enable(mesh, ours) as rt:
        taxfree.enable(mesh, ours)  # again changes nothing
        found = losses_of(library, steps), losses_of(ours, steps)
        rt.check()
        return *found, taxfree.report().layers, str(taxfree.report())


def run(ranks: Ranks, task: str, **arguments: Any) -> list[Any]:
    return ranks.run(2, f"{__name__}:{task}", **arguments)


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_training_has_the_loss_curve_of_the_library(
    ranks: Ranks, is_sequence_parallel: bool
) -> None:
    bias = is_sequence_parallel
    for library, ours, layers, text in run(
        ranks, "train", is_sequence_parallel=is_sequence_parallel, bias=bias, steps=STEPS
    ):
        assert ours == pytest.approx(library, rel=0.03, abs=0.03)
        assert ours[-1] < 0.5 * ours[0]
        row = "matmul_reduce_scatter" if is_sequence_parallel else "matmul_all_reduce"
        assert layers["blocks.0.mlp.down"] == layers["blocks.0.attention.o"] == {row: STEPS}
        column = (
            "all_gather_matmul" if is_sequence_parallel else "matmul; backward matmul_all_reduce"
        )
        assert layers["blocks.0.mlp.up"] == layers["head"] == {column: STEPS}
        assert "library" not in text.partition("problem")[0]
