"""What rank workers run for the tests of flash_decode alone; the rest is in ``tasks``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain

import torch
import triton
import triton.language as tl

from taxfree_kernels.device.peers import Group
from taxfree_kernels.device.sync import gdc_launch_dependents, gdc_wait
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, pdl_options
from taxfree_kernels.variant import Ready, operation
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
    errors = []
    for integers in (True, False):
        exact = Inputs(fabric, case, seed=3, integers=integers).exact
        found = reference(problem, fabric.rank, 3, fabric.device, integers=integers)
        errors.append((found - exact).abs().max())
    return float(torch.stack(errors).max())  # NaN if one is


@triton.jit
def _write_late(
    q_ptr, k_ptr, v_ptr, new_ptr, queries, elements, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Let the next kernel begin; some microseconds later write the queries, a key and a value."""
    gdc_launch_dependents(GROUP)
    gdc_wait(GROUP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(new_ptr + at, mask=at < queries, other=0.0)
    k = tl.load(new_ptr + queries + at, mask=at < elements, other=0.0)
    v = tl.load(new_ptr + queries + elements + at, mask=at < elements, other=0.0)
    delay = at.to(tl.float32)
    for _ in range(4000):
        delay = delay * 0.5 + 1.0
    nothing = tl.where(delay < 1e9, 0.0, 1.0)
    tl.store(q_ptr + at, (q + nothing).to(q.dtype), mask=at < queries)
    tl.store(k_ptr + at, (k + nothing).to(k.dtype), mask=at < elements)
    tl.store(v_ptr + at, (v + nothing).to(v.dtype), mask=at < elements)


def newest_keys(fabric: Fabric, case: Case, steps: int) -> list[str]:
    """Complaints of decode steps in a graph, if the caller promises that the cache is static.

    Before each step a kernel, during which the step's first kernel begins, writes the queries, the
    newest key and its value. Each result must be that of a plan without the promise.
    """
    problem, promised = case.problem(fabric.world_size), copy.copy(fabric)
    promised.static_cache = True
    q, k, v, lens, *others = Inputs(fabric, case, seed=5, integers=False).tensors
    last = problem.kv_len_per_rank - 1
    if problem.page_size:
        place = int(others[0][0, last // problem.page_size]), last % problem.page_size
    else:
        place = 0, last
    news = torch.randn(steps, q.numel() + 2 * k[place].numel(), device=q.device).to(q.dtype)
    outputs = [torch.empty_like(q) for _ in range(2 * steps)]
    group = Group(problem.world_size, fabric.backend)
    constants = {"GROUP": group, "BLOCK": 256}
    programs = -(-max(q.numel(), k[place].numel()) // 256)
    write = Kernel(_write_late, programs, constants, pdl_options({"launch_pdl": True}))

    def run(plan: Ready, outputs: Sequence[torch.Tensor]) -> None:
        for new, out in zip(news, outputs, strict=True):
            write(q, k[place], v[place], new, q.numel(), k[place].numel())
            plan(q, k, v, lens, *others, out)

    run(case.plan(fabric), outputs[:steps])
    plan = case.plan(promised)
    run(plan, outputs[steps:])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(plan, outputs[steps:])
    found = []
    for _ in range(20):
        for out in outputs[steps:]:
            out.fill_(float("nan"))
        graph.replay()
        pairs = zip(outputs[:steps], outputs[steps:], strict=True)
        wrong = [int((out != right).sum()) for right, out in pairs]
        found += [f"{case.variant}: {wrong} values wrong"] * any(wrong)
    return found
