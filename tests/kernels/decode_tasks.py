"""What rank workers run for the tests of flash_decode alone; the rest is in ``tasks``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import operation
from tests.kernels.tasks import Case, Inputs


def lengths_change(
    fabric: Fabric, case: Case, lengths: Sequence[Sequence[Sequence[int]]]
) -> list[str]:
    """Complaints of calls of one plan on the same tensors, whose lengths change in between.

    Args:
        lengths: of each call: keys that each rank holds of each sequence.
    """
    plan, inputs = case.plan(fabric), Inputs(fabric, case, seed=4, integers=False)
    found = []
    for each in lengths:
        inputs.tensors[3].copy_(torch.tensor(each, dtype=torch.int32))
        inputs.changed()
        error = float((inputs.run(plan).double() - inputs.exact).abs().max())
        if not error <= 0.01 * any(chain(*each)):  # without keys, zeros
            found.append(f"{case} with {each}: off by {error:.2e}")
    fabric.pool.check()
    return found


def chained(fabric: Fabric, case: Case, replays: int) -> list[str]:
    """Complaints of captured calls, each right behind another or behind what writes its inputs.

    Kernels bring the inputs of every second call, one after the other to the same place.
    """
    plan = case.plan(fabric)
    sets = [Inputs(fabric, case, seed=seed, integers=True) for seed in range(3)]
    place = [None if tensor is None else tensor.clone() for tensor in sets[0].tensors]
    exact = [each.exact.to(place[0].dtype) for each in sets for _ in range(2)]
    outputs = [torch.empty_like(each) for each in exact]

    def calls() -> None:
        for index, each in enumerate(sets):
            for target, tensor in zip(place, each.tensors, strict=True):
                if tensor is not None:
                    torch.add(tensor, 0, out=target)
            plan(*place, outputs[2 * index])
            plan(*each.tensors, outputs[2 * index + 1])

    calls()
    torch.cuda.synchronize()
    fabric.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    found = []
    for _ in range(replays):
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        fabric.pool.check()
        wrong = [int((out != right).sum()) for out, right in zip(outputs, exact, strict=True)]
        found += [f"{case.variant}: {wrong} values wrong"] * any(wrong)
    return found


def reference_error(fabric: Fabric, case: Case) -> float:
    """How far the operation's reference, which sees no peer, is from what the ranks hold."""
    problem, reference = case.problem(fabric.world_size), operation(case.op).reference
    worst = 0.0
    for integers in (True, False):
        exact = Inputs(fabric, case, seed=3, integers=integers).exact
        found = reference(problem, fabric.rank, 3, fabric.device, integers=integers)
        worst = max(worst, float((found - exact).abs().max()))
    return worst
