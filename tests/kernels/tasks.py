"""What rank workers run for the tests of the kernels: each function takes the open fabric."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import operator
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from taxfree_kernels.errors import KernelError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.open import open_fabric
from taxfree_kernels.fp8 import dequantised, fp8_dtype, quantised, scale_of, silu_and_mul
from taxfree_kernels.interpreter import is_interpreting
from taxfree_kernels.launch import compiling
from taxfree_kernels.quantise import quantise, silu_and_mul_quantise
from taxfree_kernels.variant import SCALES, Plan, Ready, operation, problem_class, variants
from tests.ranks import OP


@dataclass(frozen=True)
class Case:
    """A variant on a problem.

    Args:
        fields: of the problem, but for its world size.
        config: meta-parameters that differ from the variant's default.
        padded: give the weight rows that are longer than what is used of them.
        op: the operation.
    """

    variant: str
    fields: Mapping[str, Any]
    config: Mapping[str, Any] | None = None
    padded: bool = False
    op: str = OP

    def problem(self, world_size: int) -> Any:
        return problem_class(self.op)(**self.fields, world_size=world_size)

    def made(self, fabric: Fabric) -> Plan:
        """A plan that cannot be called yet."""
        variant, problem = variants(self.op)[self.variant], self.problem(fabric.world_size)
        default = variant.seed_configs(problem, fabric.hardware)[0]
        return variant.plan(problem, fabric, default | dict(self.config or {}))

    def plan(self, fabric: Fabric) -> Ready:
        return Ready(self.made(fabric))

    def tensors(self, fabric: Fabric, seed: int, integers: bool) -> tuple[Any, ...]:
        """A rank's own tensors."""
        tensors = operation(self.op).make_inputs(
            self.problem(fabric.world_size), fabric.rank, seed, fabric.device, integers=integers
        )
        if not self.padded or len(tensors) == 1:
            return tensors
        a, weight, *others = tensors
        return a, _padded(weight), *others


def private(fabric: Fabric, timeout_s: float = 30.0, heap_bytes: int = 1 << 20) -> Fabric:
    """A fabric among the same ranks with a heap of its own."""
    return open_fabric(fabric.name, fabric.group, heap_bytes, timeout_s)


def everybodys(fabric: Fabric, value: Any) -> list[Any]:
    values: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(values, value, fabric.group)
    return values


class Inputs:
    """One set of inputs of a case, and the result in float64 from what the ranks really hold."""

    def __init__(self, fabric: Fabric, case: Case, seed: int, integers: bool) -> None:
        problem = case.problem(fabric.world_size)
        found = operation(case.op)
        self._empty = partial(found.empty_output, problem, fabric.device)
        self._result = partial(found.result, problem)
        self.tensors = case.tensors(fabric, seed, integers)
        exact = partial(_EXACT[case.op], fabric, problem, *self.tensors)
        self._find_exact = exact
        if integers and getattr(problem, "out_scales", "none") != "none":
            self._find_exact = lambda: _in_fp8(problem, exact(), *self.tensors)
        self.exact = self._find_exact()

    def changed(self) -> None:
        """The tensors hold something else now, on all ranks; collective."""
        self.exact = self._find_exact()

    def run(self, plan: Ready) -> torch.Tensor:
        out = self._empty().fill_(float("nan"))
        assert plan(*self.tensors, out) is out
        return self._result(out)

    def relative_error(self, out: torch.Tensor) -> float:
        norm = float(self.exact.norm())
        return float((out.double() - self.exact).norm()) / norm if norm else 0.0


def _everybodys_tensor(fabric: Fabric, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [each.to(fabric.device) for each in everybodys(fabric, tensor.cpu())]


def _gathered_matmul(
    fabric: Fabric,
    problem: Any,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *scales: torch.Tensor,
) -> torch.Tensor:
    own, factor = _scaled((a, weight), scales)
    gathered = torch.cat(_everybodys_tensor(fabric, own), dim=problem.gather_dim)
    assert gathered.shape == (problem.m, problem.k)
    return gathered @ factor + (0 if bias is None else bias.double())


def _reduced_matmul(
    fabric: Fabric,
    problem: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: torch.Tensor | None,
    *scales: torch.Tensor,
) -> torch.Tensor:
    scales = scales[problem.norm_inputs - 2 :]
    total = _sum_of_products(fabric, problem, x, weight, *scales)
    replicated = [each for each in (bias, residual, norm_weight, eps) if each is not None]
    for tensor in replicated:
        assert all(torch.equal(tensor, other) for other in _everybodys_tensor(fabric, tensor))
    for addend in (bias, residual):
        if addend is not None:
            total += addend.double()
    if norm_weight is None or eps is None:
        return total
    sizes = (total.square().mean(1) + eps.double()).sqrt()
    return torch.stack([total / sizes[:, None] * norm_weight.double(), total])


def _in_fp8(problem: Any, exact: torch.Tensor, *tensors: Any) -> torch.Tensor:
    """A normalised sum and the sum, the first rounded to the problem's dtype and quantised."""
    normed, total = exact
    given = tensors[6] if problem.out_scales == "tensor" else None
    rounded = normed.to(getattr(torch, problem.dtype))
    quantised_norm = quantised(rounded, problem.out_scales, given, fp8_dtype(normed.device))
    return torch.stack([dequantised(*quantised_norm), total])


def _sum_of_products(
    fabric: Fabric, problem: Any, x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor
) -> torch.Tensor:
    own, factor = _scaled((x, weight), scales)
    total = torch.stack(_everybodys_tensor(fabric, own @ factor)).sum(0)
    assert total.shape == (problem.m, problem.n)
    return total


def _scaled(
    factors: tuple[torch.Tensor, torch.Tensor], scales: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Factors in float64, times the scale of each element."""
    return [
        each.double() * (1 if scale is None else _stretched(scale, each))
        for each, scale in zip(factors, scales or (None, None), strict=True)
    ]


def _stretched(scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The scale of each fp8 element: of all, of its row or column, or of its 128."""
    if scale.dim() == 1:
        return scale.double()
    places = [
        torch.arange(size, device=scale.device)
        // (128 if count == -(-size // 128) else size // count)
        for size, count in zip(values.shape, scale.shape, strict=True)
    ]
    return scale.double()[places[0]][:, places[1]]


def _scattered_matmul(
    fabric: Fabric, problem: Any, x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor
) -> torch.Tensor:
    total = _sum_of_products(fabric, problem, x, weight, *scales)
    if problem.scatter_dim == 1:
        return total.chunk(fabric.world_size, dim=1)[fabric.rank]
    missing = fabric.world_size * problem.shard_rows - problem.m
    padded = torch.nn.functional.pad(total, (0, 0, 0, missing))
    return padded.chunk(fabric.world_size)[fabric.rank]


def _attention(
    fabric: Fabric,
    problem: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_lens: torch.Tensor,
    table: torch.Tensor | None,
    scaling: torch.Tensor,
    *scales: torch.Tensor,
) -> torch.Tensor:
    """By softmax over all visible keys of a sequence at once."""
    if scales:
        k, v = (_all_heads(*each) for each in zip((k, v), scales, strict=True))
    if table is not None:
        k, v = (cache[table.long()].flatten(1, 2) for cache in (k, v))
    caches = [_everybodys_tensor(fabric, each) for each in (k, v)]
    scale, cap = scaling.double()
    results = []
    for sequence, lengths in enumerate(kv_lens.t().tolist()):
        keys, values = (
            torch.cat([own[sequence, :length] for own, length in zip(cache, lengths, strict=True)])[
                -problem.window :
            ]
            .repeat_interleave(problem.group_size, 1)
            .double()
            for cache in caches
        )
        logits = torch.einsum("hd,nhd->hn", q[sequence].double(), keys) * scale
        if problem.soft_cap:
            logits = cap * torch.tanh(logits / cap)
        weights = torch.softmax(logits, 1) if len(keys) else logits
        results.append(torch.einsum("hn,nhd->hd", weights, values))
    return torch.stack(results)


def _all_heads(cache: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A cache in fp8 times its scales, of all or of each head."""
    by_head = scale.double().expand(cache.shape[-2])
    return torch.einsum("...hd,h->...hd", cache.double(), by_head)


def _own_attention(
    fabric: Fabric,
    problem: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor | None,
    scale: torch.Tensor | None,
    *scales: torch.Tensor,
) -> torch.Tensor:
    """Of one sequence and head after the other, with a mask of all pairs."""
    assert scale is None
    if scales:
        k, v = (_all_heads(*each) for each in zip((k, v), scales, strict=True))
    begins = [problem.length * at for at in range(problem.batch + 1)]
    begins = begins if starts is None else starts.tolist()
    q, k, v = (each.flatten(0, -3).double() for each in (q, k, v))
    out = torch.full_like(q, float("nan"))
    for begin, end in pairwise(begins):
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
        for head in range(problem.q_heads):
            of_group = head * problem.kv_heads // problem.q_heads
            logits = q[begin:end, head] @ k[begin:end, of_group].t() * problem.head_dim**-0.5
            if problem.causal:
                logits = logits.masked_fill(hidden, -torch.inf)
            out[begin:end, head] = torch.softmax(logits, 1) @ v[begin:end, of_group]
    return out.view(*([] if problem.packed else [problem.batch]), -1, *q.shape[1:])


def _pooled_rows(
    fabric: Fabric,
    problem: Any,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Of one bag after the other, from whole tables."""
    tables = torch.cat(_everybodys_tensor(fabric, weight), dim=problem.shard_dim).double()
    out = tables.new_zeros(problem.batch, problem.tables, problem.dim)
    for table, begins in enumerate(offsets.tolist()):
        for sample, (begin, end) in enumerate(pairwise(begins)):
            rows = tables[table, indices[table, begin:end].long()]
            if weights is not None:
                rows = rows * weights[table, begin:end, None].double()
            count = max(1, end - begin) if problem.mode == "mean" else 1
            out[sample, table] = rows.sum(0) / count
    return out


def _stencil(fabric: Fabric, problem: Any, u: torch.Tensor) -> torch.Tensor:
    """By shifted copies of the whole domain, in float32: all variants have the same bits."""
    parts = _everybodys_tensor(fabric, u)
    rows = [
        torch.cat(parts[at : at + problem.across], 1) for at in range(0, len(parts), problem.across)
    ]
    u, norms = torch.cat(rows), []
    inner = torch.ones_like(u, dtype=torch.bool)
    for dim, size in enumerate(u.shape):
        places = torch.arange(size, device=u.device).view(
            [-1 if at == dim else 1 for at in range(u.dim())]
        )
        inner &= (places > 0) & (places < size - 1)
    for step in range(1, problem.steps + 1):
        pairs = [u.roll(1, dim) + u.roll(-1, dim) for dim in range(u.dim())]
        total = pairs[0] + pairs[1]
        total = total + pairs[2] if len(pairs) == 3 else total
        last, u = u, torch.where(inner, total * (1 / (2 * len(pairs))), u)
        if problem.norm_every and step % problem.norm_every == 0:
            norms.append((u - last).double().norm() ** 2)
    row, column = divmod(fabric.rank, problem.across)
    part = u.chunk(problem.down)[row].chunk(problem.across, 1)[column].double()
    return torch.cat([part.flatten(), torch.stack(norms)]) if norms else part


#: operation -> the result in float64 of one rank, from what all ranks hold
_EXACT = {
    "attention": _own_attention,
    "embedding_all_to_all": _pooled_rows,
    "flash_decode": _attention,
    "all_gather_matmul": _gathered_matmul,
    "matmul_all_reduce": _reduced_matmul,
    "matmul_reduce_scatter": _scattered_matmul,
    "stencil": _stencil,
}


def _padded(weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype == torch.int32:  # indices of an embedding: contiguous
        return weight
    if weight.stride(0) == 1 and weight.dim() == 2:
        return _padded(weight.t()).t()
    *rows, columns = weight.shape
    wide = weight.new_full((*rows, columns + (3 if weight.dim() == 2 else 8)), float("nan"))
    wide[..., :columns] = weight
    return wide[..., :columns]


def unsupported_reasons(
    fabric: Fabric, fields: Mapping[str, Any], op: str = OP
) -> dict[str, str | None]:
    """Why each variant cannot serve a problem here, or None."""
    problem = problem_class(op)(**fields, world_size=fabric.world_size)
    return {
        name: variant.unsupported_reason(problem, fabric.hardware)
        for name, variant in variants(op).items()
    }


def extreme_configs(fabric: Fabric, case: Case) -> list[dict[str, Any]]:
    """Ends of a variant's space: all first, all last, two drawn, one at its last; and more."""
    variant, problem = variants(case.op)[case.variant], case.problem(fabric.world_size)
    space = variant.space(problem, fabric.hardware)
    first = {parameter: values[0] for parameter, values in space.items()}
    last = {parameter: values[-1] for parameter, values in space.items()}
    draw = random.Random(1)
    drawn = [{k: draw.choice(values) for k, values in space.items()} for _ in range(100)]
    configs = [
        first,
        last,
        *drawn[:2],
        *(first | {parameter: last[parameter]} for parameter in space),
        *drawn,
    ]
    kept = [c for c in configs if variant.illegal_reason(problem, fabric.hardware, c) is None]
    return [config for at, config in enumerate(kept) if config not in kept[:at]]


# -- correctness --------------------------------------------------------------------------------


def complaints(fabric: Fabric, cases: Sequence[Case], random_data: bool = True) -> list[str]:
    """What is wrong on this rank with cases that run one after another on the fabric's pool."""
    found = []
    _share_compilation(fabric, cases)
    for case in cases:
        plan = case.plan(fabric)
        whole = Inputs(fabric, case, seed=1, integers=True)
        out = whole.run(plan)
        wrong = int((out != whole.exact.to(out.dtype)).sum())
        if wrong:
            found.append(f"{case}: {wrong} of {out.numel()} values wrong on integers")
        # steps of a stencil round what integers become; the baseline would be its own bound
        if random_data and case.op != "stencil" and case.variant != "baseline":
            found += _inaccuracy(fabric, case, plan)
        fabric.pool.check()
    return found


def over_fp8_wire(fabric: Fabric, dtype: str) -> list[str]:
    """What is wrong with a sum of partial sums that travelled in fp8, of integers and worse."""
    case = Case(
        "push_two_shot",
        {"m": 18, "n": 176, "k": 64, "dtype": dtype, "fp8_wire": True},
        op="matmul_all_reduce",
    )
    generator = torch.Generator(device=fabric.device).manual_seed(1 + fabric.rank)
    draw = partial(torch.randint, -8, 9, generator=generator, device=fabric.device)
    x, weight = draw((18, 64)).float(), draw((64, 176)).float()
    x[0] = 0  # on all ranks
    x[1 + fabric.rank] = 0
    x[8:12] *= torch.tensor([2.0**-10, 2.0**-5, 2.0**4, 2.0**3], device=fabric.device)[:, None]
    x[12, 1:], weight[0, ::2] = 0, weight[0, ::2] / 2**10  # far below the largest of the row
    if fabric.rank == fabric.world_size - 1:
        weight[1, 3], weight[2, 4] = float("nan"), float("inf")
        x[:16, 1:3] = 0  # 0 * NaN is NaN
    kind = getattr(torch, dtype)
    x, weight = x.to(kind), weight.to(kind)
    out, plan = torch.empty(18, 176, dtype=kind, device=fabric.device), case.made(fabric)
    width = operator.index(plan.kernels(18)[0].constants["TILE"].BLOCK_N)  # once compiled, Triton's
    Ready(plan)(x, weight.t().contiguous().t(), None, None, None, None, out)
    fabric.pool.check()
    element = fp8_dtype(fabric.device)
    total, exact, bound = torch.zeros(3, 18, 176, dtype=torch.float64, device=fabric.device)
    total = total.float()
    for part in _everybodys_tensor(fabric, x.float() @ weight.float()):
        for columns in torch.arange(176, device=fabric.device).split(width):
            own = part[:, columns]
            most = own.nan_to_num(0, float("inf"), -float("inf")).abs().amax(1, keepdim=True)
            least = scale_of(most, torch.finfo(element).max)
            mantissa, exponent = least.frexp()  # a mantissa of 1/2 is of a power of two
            power = torch.ldexp(torch.ones_like(least), exponent - (mantissa == 0.5).int())
            scale = torch.where(least.isinf(), least, power)
            values = (own / scale).to(element).float()
            total[:, columns] += values * scale
            exact[:, columns] += own.double()
            bound[:, columns] += own.double().abs() / 16 + most.double() * 2**-17
    found, seen = [], out.nan_to_num(7777)
    if not torch.equal(seen, total.to(kind).nan_to_num(7777)):
        found.append(f"{int((out != total.to(kind)).sum())} values are not those of torch")
    if not all(torch.equal(seen.cpu(), other) for other in everybodys(fabric, seen.cpu())):
        found.append("ranks differ")
    bound += out.double().abs() * torch.finfo(kind).eps
    is_wrong = (out.double() - exact).abs() > bound
    if is_wrong[exact.isfinite()].any():
        found.append("errors above the bound")
    return found


def errors_by_output(fabric: Fabric, case: Case) -> tuple[list[float], list[float]]:
    """The relative error of each of a case's outputs, and of the baseline's."""
    inputs = Inputs(fabric, case, seed=2, integers=False)
    baseline = Case("baseline", case.fields, op=case.op).plan(fabric)
    found = []
    for plan in (case.plan(fabric), baseline):
        out = inputs.run(plan).double()
        pairs = zip(out, inputs.exact, strict=True)
        found.append([float((own - exact).norm() / exact.norm()) for own, exact in pairs])
    fabric.pool.check()
    return found[0], found[1]


def early_behind_others(fabric: Fabric, case: Case, replays: int) -> list[str]:
    """Complaints of captured calls that are launched early, behind work of others.

    A kernel, a copy and another stream bring one call's input after the other to the same place.
    """
    _share_compilation(fabric, [case])
    plan, inputs = case.plan(fabric), Inputs(fabric, case, seed=1, integers=True)
    source, *others = inputs.tensors
    x, twice = torch.empty_like(source), 2 * source
    here, elsewhere = torch.cuda.Stream(), torch.cuda.Stream()

    def by_a_kernel() -> None:
        torch.mul(source, 3, out=x)

    def by_a_copy() -> None:
        x.copy_(twice)

    def by_another_stream() -> None:
        elsewhere.wait_stream(here)
        with torch.cuda.stream(elsewhere):
            torch.mul(source, -1, out=x)
        here.wait_stream(elsewhere)

    ways = {by_a_kernel: 3, by_a_copy: 2, by_another_stream: -1}
    outputs = {way: inputs.exact.to(source.dtype) for way in ways}
    plan(*inputs.tensors, outputs[by_a_kernel])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=here):
        for way, out in outputs.items():
            way()
            plan(x, *others, out)
    found = []
    for _ in range(replays):
        for out in outputs.values():
            out.fill_(float("nan"))
        graph.replay()
        fabric.pool.check()
        found += [
            f"{case.variant} {way.__name__}: {wrong} values wrong"
            for way, times in ways.items()
            if (wrong := int((outputs[way] != (times * inputs.exact).to(source.dtype)).sum()))
        ]
    return found


def _share_compilation(fabric: Fabric, cases: Sequence[Case]) -> None:
    """Each rank compiles its share into the compiler's cache; nothing to do where there is none."""
    if not fabric.has_graphs:
        return
    fused = [case for case in cases if variants(case.op)[case.variant].fused]
    for case in fused[fabric.rank :: fabric.world_size]:
        tensors = case.tensors(fabric, seed=1, integers=True)
        out = operation(case.op).empty_output(case.problem(fabric.world_size), fabric.device)
        with compiling():
            case.made(fabric).run(*tensors, out)
    fabric.barrier()


def _inaccuracy(fabric: Fabric, case: Case, plan: Ready) -> list[str]:
    inputs = Inputs(fabric, case, seed=2, integers=False)
    baseline = Case("baseline", case.fields, padded=case.padded, op=case.op).plan(fabric)
    allowed = 1.25 * inputs.relative_error(inputs.run(baseline))
    allowed += case.problem(fabric.world_size).permitted_error
    error = inputs.relative_error(inputs.run(plan))
    if error <= allowed:
        return []
    return [f"{case}: relative error {error:.2e}, {allowed:.2e} is allowed"]


def back_to_back(
    fabric: Fabric,
    cases: Sequence[Case],
    generations: int,
    first_generation: int = 0,
    seed: int = 0,
) -> list[str]:
    """Complaints of calls that take turns on one pool, with delays and without a barrier."""
    with private(fabric) as own:
        plans = [case.plan(own) for case in cases]
        inputs = [
            Inputs(own, cases[call % len(cases)], seed=call, integers=True)
            for call in range(generations)
        ]
        own.pool.reset(first_generation)
        outputs = []
        late = random.Random(seed)  # the same on every rank
        # One rank lags so far behind that only its peers' waits for it keep them from overtaking.
        lags = own.rank == (seed - 1) % own.world_size
        with shaken(seed * 100 + own.rank, 0.2 if lags else 0.004):
            for call in range(generations):
                if late.randrange(own.world_size) == own.rank:
                    time.sleep(0.02)
                outputs.append(inputs[call].run(plans[call % len(plans)]))
        own.pool.check()
        return [
            f"call {call} of {cases[call % len(cases)].variant}: {wrong} values wrong"
            for call, out in enumerate(outputs)
            if (wrong := int((out != inputs[call].exact.to(out.dtype)).sum()))
        ]


@contextlib.contextmanager
def shaken(seed: int, most_s: float) -> Iterator[None]:
    """Within the context, programs pause at random after an atomic, as between wait and use.

    Compiled kernels do not: the soak has pauses for them.
    """
    if not is_interpreting():
        yield
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    draw, original = random.Random(seed), builder.create_atomic_rmw

    def create_atomic_rmw(*arguments: Any) -> Any:
        result = original(*arguments)
        if draw.random() < 0.2:
            time.sleep(most_s * draw.random())
        return result

    builder.create_atomic_rmw = create_atomic_rmw
    try:
        yield
    finally:
        del builder.create_atomic_rmw


def bits_of_calls(fabric: Fabric, case: Case, calls: int) -> list[bytes]:
    """The outputs of calls on the same random inputs, with other delays each time."""
    with private(fabric) as own:
        plan, inputs = case.plan(own), Inputs(own, case, seed=3, integers=False)
        found = []
        for call in range(calls):
            with shaken(10 * call + own.rank, 0.01):
                found.append(inputs.run(plan).view(torch.int16).cpu().numpy().tobytes())
        own.pool.check()
        return found


# -- the host fabric ----------------------------------------------------------------------------


def _peek(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def layout(fabric: Fabric) -> dict[str, Any]:
    """Where two objects lie in a heap, and what is read there through every rank's base."""
    with private(fabric) as own:
        first = own.pool.slots(8, torch.int32)[0]
        second = own.pool.slots(8, torch.uint8)[0]
        own_base = int(own.heap_bases[own.rank])
        offset = first.data_ptr() - own_base
        first.copy_(torch.arange(8) + 100 * own.rank)
        own.barrier()
        seen = [_peek(int(base) + offset, 8) for base in own.heap_bases]
        own.barrier()
        return {
            "offset": offset,
            "same slot": second.data_ptr() == first.data_ptr(),
            "seen": seen,
            "bases": own.heap_bases.tolist(),
            "rank": own.rank,
        }


def writes_into_peers(fabric: Fabric) -> list[int]:
    """Every rank writes one word into each peer's heap; what then stands in this rank's own."""
    with private(fabric) as own:
        words = own.pool.slots(own.world_size, torch.int32)[0]
        words.fill_(-1)
        own.barrier()
        offset = words.data_ptr() - int(own.heap_bases[own.rank])
        for peer, base in enumerate(own.heap_bases.tolist()):
            at = base + offset + 4 * own.rank
            ctypes.c_int32.from_address(at).value = 10 * own.rank + peer
        own.barrier()
        return words.tolist()


def two_heaps(fabric: Fabric) -> list[list[int]]:
    """Two fabrics of the same ranks: what each holds after every rank wrote to both."""
    with private(fabric) as one, private(fabric) as other:
        views = [each.pool.slots(4, torch.int32)[0] for each in (one, other)]
        for value, view in enumerate(views):
            view.fill_(value + 1)
        fabric.barrier()
        return [view.tolist() for view in views]


def allocations(fabric: Fabric, sizes: Sequence[int]) -> tuple[list[int], str, int]:
    """Offsets of allocations in a heap, the error of one too many, and what is then left."""
    from taxfree_kernels.fabric.host import HostFabric

    with HostFabric(fabric.group, 1 << 14) as own:
        base = int(own.heap_bases[own.rank])
        offsets = [own.heap.empty(size, torch.uint8).data_ptr() - base for size in sizes]
        left = own.heap.free_bytes
        try:
            own.heap.empty(left + 1, torch.uint8)
        except KernelError as error:
            message = f"{type(error).__name__}: {error.message}"
        assert own.heap.free_bytes == left
        return offsets, message, left


def on_subgroup(fabric: Fabric, members: Sequence[Sequence[int]], case: Case) -> dict[str, Any]:
    """A call on groups that are parts of the world, all at the same time."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    own_group = next(
        (g for g, ranks in zip(groups, members, strict=True) if fabric.rank in ranks), None
    )
    if own_group is None:
        return {}
    with open_fabric("host", own_group, 1 << 20, 30.0) as own:
        offset = own.pool.slots(1, torch.int32)[0].data_ptr() - int(own.heap_bases[own.rank])
        own.pool.slots(1, torch.int32)[0].fill_(1000 + fabric.rank)
        own.barrier()
        seen = [_peek(base + offset, 1)[0] - 1000 for base in own.heap_bases.tolist()]
        own.barrier()
        return {
            "rank": own.rank,
            "world ranks seen": seen,
            "complaints": complaints(own, [case] * 3),
        }


def heaps_mapped(fabric: Fabric) -> tuple[set[str], int, int]:
    """Names of the heaps' memory files, how many are mapped with two more fabrics, and after."""
    gc.collect()
    before = len(_mapped_heaps())
    with private(fabric) as one, private(fabric) as other:
        names = _mapped_heaps()
        more = len(names) - before
    del one, other
    gc.collect()
    return set(names), more, len(_mapped_heaps()) - before


def _mapped_heaps() -> list[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in maps if "memfd:taxfree-heap" in line]


# -- fp8 -----------------------------------------------------------------------------------------


def quantised_otherwise(fabric: Fabric) -> list[str]:
    """What the kernels quantise otherwise than the reference."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for k, dtype in ((300, torch.bfloat16), (64, torch.float16), (1, torch.float32)):
        x = 10 * torch.randn(8, k + 8, generator=generator)
        x[1], x[2], x[3, 0], x[4, 0] = 0.0, 1e-40, float("nan"), float("inf")
        x = x.to(dtype).to(fabric.device)[:, :k]
        for scales in SCALES:
            statics = (
                [None, torch.tensor([0.01], device=x.device)] if scales == "tensor" else [None]
            )
            for static in statics:
                name = f"{scales} {dtype} k={k} static={static is not None}"
                if _share_otherwise(quantise(x, scales, static), quantised(x, scales, static)):
                    found.append(name)
                if k % 2:
                    continue
                share = _share_otherwise(
                    silu_and_mul_quantise(x, scales, static),
                    quantised(silu_and_mul(x), scales, static),
                )
                if share > (0.01 if x.is_cuda else 0):  # exponentials may differ in their last bit
                    found.append(f"silu {name}: {share}")
    return found


def scales_under_another_default(fabric: Fabric) -> set[torch.dtype]:
    """The dtypes of scales where 16 bits are torch's default, as engines set it."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        x = torch.ones(2, 256, device=fabric.device)
        return {quantise(x, scales)[1].dtype for scales in SCALES}
    finally:
        torch.set_default_dtype(torch.float32)


def _share_otherwise(own: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    """The share of values or of scales that differ, whichever is larger."""
    shares = []
    for one, other in zip(own, wanted, strict=True):
        assert one.shape == other.shape
        differs = one.float().cpu().nan_to_num(-3) != other.float().cpu().nan_to_num(-3)
        shares.append(float(differs.float().mean()))
    return max(shares)
