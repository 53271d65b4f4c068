"""The calls of a runtime, one contract for all operations: right, compiled, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from taxfree.errors import UsageError
from taxfree_kernels.fp8 import dequantised
from taxfree_kernels.reduction.fused import parts_of
from taxfree_kernels.signature import signatures
from taxfree_kernels.variant import KV_SCALES, SCALES
from tests.ranks import Ranks, on_every_fabric
from tests.taxfree.runtime_tasks import OP, K, M, N, problem_of, record_of, runtime_of, tensors_of

ALL_REDUCE, SCATTER, DECODE = "matmul_all_reduce", "matmul_reduce_scatter", "flash_decode"
PROMPTS, EMBEDDING = "attention", "embedding_all_to_all"
NORM = "matmul_all_reduce_rms_norm"
PAGED = {"page_size": 5, "soft_cap": True, "window": 30, "dtype": "bfloat16"}

#: operation, what differs from its usual problem, the recorded winner; without one, the baseline
CALLED = [
    *((OP, {"gather_dim": dim, "bias": bias}, "push") for dim in (0, 1) for bias in (False, True)),
    (OP, {"gather_dim": 0, "m": 1}, "push"),  # of two ranks, one has no rows
    *(
        (
            OP,
            {"x_dtype": "fp8", "scales": each, "gather_dim": dim, "bias": bool(dim), "k": 256},
            "push",
        )
        for each in SCALES
        for dim in (0, 1)
    ),
    *((ALL_REDUCE, {"bias": adds, "residual": adds}, "push") for adds in (False, True)),
    *(
        (ALL_REDUCE, {"bias": adds, "residual": adds, "rms_norm": True}, "push")
        for adds in (False, True)
    ),
    *((ALL_REDUCE, {"x_dtype": "fp8", "scales": each}, "push") for each in SCALES),
    (
        ALL_REDUCE,
        {"x_dtype": "fp8", "scales": "channel", "residual": True, "rms_norm": True},
        "push",
    ),
    *(
        (ALL_REDUCE, {"fp8_wire": True, "rms_norm": normed, **factors}, "push_two_shot")
        for normed in (False, True)
        for factors in ({}, {"x_dtype": "fp8", "scales": "channel"})
    ),
    *((SCATTER, {"x_dtype": "fp8", "scales": each}, "push") for each in SCALES),
    *(
        (SCATTER, {"fp8_wire": True, **factors}, "push")
        for factors in ({}, {"x_dtype": "fp8", "scales": "channel"})
    ),
    (SCATTER, {}, "push"),
    (SCATTER, {"m": 1}, "push"),
    (SCATTER, {"scatter_dim": 1, "n": 48}, "push"),
    (DECODE, {}, "persistent"),
    (DECODE, PAGED, "persistent"),
    *((DECODE, {"kv_scales": each, "kv_heads": 3}, "fused") for each in KV_SCALES),
    (PROMPTS, {}, "flash"),
    (PROMPTS, {"kv_scales": "head", "kv_heads": 2, "dtype": "bfloat16"}, "flash"),
    (PROMPTS, {"causal": False, "packed": True, "batch": 3, "dtype": "bfloat16"}, "flash"),
    (PROMPTS, {"packed": True, "batch": 3}, "baseline"),
    (EMBEDDING, {"mode": "mean"}, "push"),
    (EMBEDDING, {"shard_dim": 1, "weighted": True, "dtype": "float32"}, "push"),
    (EMBEDDING, {"dtype": "bfloat16"}, "baseline"),
    ("stencil", {"across": 2, "rows": 7}, "persistent"),
    ("stencil", {"rows": 6, "columns": 4, "depth": 3, "steps": 2}, "copies"),
    (OP, {}, "baseline"),
    (ALL_REDUCE, {}, "baseline"),
    (ALL_REDUCE, {"residual": True, "rms_norm": True}, "baseline"),
    (SCATTER, {}, "baseline"),
]


def method_of(op: str, problem: Any, inputs: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The runtime's method for a problem, and its arguments."""
    if op == OP:
        a_shard, weight, bias, *scales = inputs
        options = {"gather_dim": problem.gather_dim, "m": problem.m}
        if scales:
            options |= {"dtype": getattr(torch, problem.dtype)}
            return f"scaled_{op}", (a_shard, weight, *scales, bias), options
        return op, (a_shard, weight, bias), options
    if op == SCATTER:
        x, weight, *scales = inputs
        scaled, kind = ("scaled_", {"dtype": getattr(torch, problem.dtype)}) if scales else ("", {})
        kind |= {"fp8_wire": True} if problem.fp8_wire else {}
        return scaled + op, (x, weight, *scales, problem.scatter_dim), kind
    if op == DECODE:
        *tensors, scaling = inputs[:6]
        options = {"scale": float(scaling[0]), "window": problem.window or None}
        options |= {"soft_cap": float(scaling[1]) if problem.soft_cap else None}
        options |= dict(zip(("k_scale", "v_scale"), inputs[6:], strict=False))
        return op, tuple(tensors), options
    if op == PROMPTS:
        q, k, v, starts, _, *scales = inputs
        options = {"causal": problem.causal, "cu_seqlens": starts}
        return op, (q, k, v), options | dict(zip(("k_scale", "v_scale"), scales, strict=False))
    if op == EMBEDDING:
        return op, inputs, {"shard_dim": problem.shard_dim, "mode": problem.mode}
    if op == "stencil":
        return op, (*inputs, problem.steps), {"across": problem.across}
    x, weight, bias, residual, norm_weight, eps, *scales = inputs
    factors, kind = (x, weight, *scales), {"dtype": getattr(torch, problem.dtype)} if scales else {}
    kind |= {"fp8_wire": True} if problem.fp8_wire else {}
    scaled = "scaled_" if scales else ""
    if not problem.rms_norm:
        return scaled + op, (*factors, bias, residual), kind
    return scaled + NORM, (*factors, norm_weight, bias, residual, float(eps)), kind


def joined(result: Any) -> torch.Tensor:
    """The one tensor of a result; of a norm and its sum, both."""
    return torch.stack(result) if isinstance(result, tuple) else result


# -- what runs on the ranks --------------------------------------------------------------------


def call(fabric: Any, op: str, fields: dict[str, Any], variant: str) -> Any:
    """Whether calls are right: plain, with an output, compiled, and without memory."""
    problem = problem_of(op, **fields)
    records = [] if variant == "baseline" else [record_of(fabric, problem, variant)]
    rt = runtime_of(fabric, *records)
    right = []
    for seed in (1, 2, 3):
        inputs, expected = tensors_of(fabric, problem, seed)
        name, arguments, options = method_of(op, problem, inputs)
        method: Callable[..., Any] = getattr(rt, name)
        right.append(torch.equal(joined(method(*arguments, **options)), expected))
    out = torch.full_like(expected, float("nan"))
    given = joined(method(*arguments, **options, out=out))
    right += [torch.equal(given, expected), torch.equal(out, expected)]
    right.append(name.endswith(NORM) or given is out)

    def model(arguments: Any, out: torch.Tensor) -> Any:
        method(*arguments, **options)  # unused, and yet the peers expect it
        method(*arguments, **options, out=out)
        return joined(method(*arguments, **options)), out * 2

    out.fill_(float("nan"))
    torch.compiler.reset()  # it would count the model of each problem as one more of the same
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result, twice = compiled(arguments, out)
    right += [torch.equal(each, expected) for each in (result, out, twice / 2)]
    with FakeTensorMode() as mode:
        given = arguments, options
        faked, others = tree_map_only(torch.Tensor, mode.from_tensor, given)
        right.append(joined(method(*faked, **others)).shape == expected.shape)
    rt.check()
    return right, rt.choice(problem).variant, list(rt.stats().values())


def call_quantising(fabric: Any, fields: dict[str, Any], variant: str) -> list[bool]:
    """Whether calls whose norm is in fp8 are right: plain, compiled, and without memory."""
    problem = problem_of(ALL_REDUCE, rms_norm=True, residual=True, **fields)
    records = [] if variant == "baseline" else [record_of(fabric, problem, variant)]
    rt = runtime_of(fabric, *records)
    inputs, expected = tensors_of(fabric, problem)
    given = {"out_scales": problem.out_scales}
    if problem.out_scales == "tensor":
        *first, given["out_scale"] = inputs[:7]
        inputs = (*first, *inputs[7:])
    name, arguments, options = method_of(ALL_REDUCE, problem, inputs)
    method = getattr(rt, f"{name}_quantise")

    def call(arguments: Any, options: Any) -> Any:
        return method(*arguments, **options)

    def found(results: Any) -> torch.Tensor:
        values, scale, total = results
        return torch.stack([dequantised(values, scale), total.double()])

    options |= given
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    right = [torch.equal(found(each(arguments, options)), expected) for each in (call, compiled)]
    with FakeTensorMode() as mode:
        faked = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, options))
        shapes = [each.shape for each in call(*faked)]
    right.append(shapes == [each.shape for each in call(arguments, options)])
    rt.check()
    signature = signatures()[f"{name}_quantise"]
    x, weight, bias, residual, norm_weight, eps, *scales = inputs
    kind = [getattr(torch, problem.dtype), False] if scales else []
    tensors = (x, weight, *scales, bias, residual, *kind, norm_weight, float(eps))
    named = problem.out_scales, options.get("out_scale")
    assert signature.library is not None
    arguments_of_op = signature.named((*tensors, *named))
    packed = signature.library(fabric.world_size, rt.group_name, **arguments_of_op)
    parts = parts_of(packed, problem.n, named[0], torch.float8_e4m3fn, named[1])
    right.append(torch.allclose(found(parts), expected, rtol=0.1))  # the norm is rounded otherwise
    return right


def call_badly_quantising(fabric: Any, options: dict[str, Any]) -> str:
    problem = problem_of(ALL_REDUCE, rms_norm=True, residual=True)
    rt = runtime_of(fabric)
    inputs, _ = tensors_of(fabric, problem)
    _, arguments, _ = method_of(ALL_REDUCE, problem, inputs)
    if "out_scale" in options:
        options["out_scale"] = torch.full((1,), options["out_scale"], device=fabric.device)
    try:
        rt.matmul_all_reduce_rms_norm_quantise(*arguments, **options)
    except UsageError as error:
        return error.message
    return "no error"


def call_with_another_eps(fabric: Any) -> float:
    """How large a norm is beside the one with the usual eps."""
    problem = problem_of(ALL_REDUCE, rms_norm=True, residual=True)
    rt = runtime_of(fabric, record_of(fabric, problem))
    inputs, expected = tensors_of(fabric, problem)
    _, (*tensors, _), _ = method_of(ALL_REDUCE, problem, inputs)
    normed, _ = rt.matmul_all_reduce_rms_norm(*tensors, eps=1e6)
    return float(normed.abs().max() / expected[0].abs().max())


def call_with_defaults(fabric: Any) -> float:
    """The error of attention without a scale, on random data."""
    from taxfree_kernels.variant import operation

    problem, found = problem_of(DECODE), operation(DECODE)
    rt = runtime_of(fabric, record_of(fabric, problem, "persistent"))
    q, k, v, kv_lens, _, _ = found.make_inputs(problem, fabric.rank, 1, fabric.device)
    expected = found.reference(problem, fabric.rank, 1, fabric.device)
    return float((rt.flash_decode(q, k, v, kv_lens).double() - expected).abs().max())


def windows(fabric: Any) -> bool:
    """Whether a window that leaves out no key is like none."""
    problem = problem_of(DECODE)
    rt = runtime_of(fabric, record_of(fabric, problem, "persistent"))
    inputs, expected = tensors_of(fabric, problem)
    _, arguments, options = method_of(DECODE, problem, inputs)
    return torch.equal(rt.flash_decode(*arguments, **options | {"window": 1 << 40}), expected)


def call_badly(fabric: Any, method: str, what: str) -> str:
    op = ALL_REDUCE if method == NORM else method
    problem = problem_of(op)
    rt = runtime_of(fabric)
    inputs, _ = tensors_of(fabric, problem)
    names = NAMES.get(op, ("x", "weight"))
    tensors = dict(zip(names, inputs, strict=False))
    spoil, _ = BAD[method, what]
    arguments = tensors | spoil(*tensors.values())
    positional = [arguments.pop(name) for name in names]
    if op == OP:
        arguments["gather_dim"] = 1
    try:
        getattr(rt, method)(*positional, **arguments)
    except UsageError as error:
        return error.message
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


NAMES = {DECODE: ("q", "k", "v", "kv_lens"), PROMPTS: ("q", "k", "v")}

#: (method, what is wrong) -> the arguments that differ, and a part of the message
BAD: dict[tuple[str, str], tuple[Callable[..., dict[str, Any]], str]] = {
    (OP, "dtype"): (
        lambda a, w: {"x": a.float(), "weight": w.float()},
        "not float16 or bfloat16",
    ),
    (OP, "nothing for a tensor"): (lambda a, w: {"x": None}, "torch.Tensor, not NoneType"),
    (OP, "a number for a tensor"): (lambda a, w: {"weight": 3}, "torch.Tensor, not int"),
    (OP, "an array for a tensor"): (lambda a, w: {"x": a.cpu().float().numpy()}, "not ndarray"),
    (OP, "mixed dtypes"): (lambda a, w: {"weight": w.bfloat16()}, "weight is torch.bfloat16"),
    (OP, "vector"): (lambda a, w: {"x": a[0]}, "must be matrices"),
    (OP, "columns"): (lambda a, w: {"x": a[:, :-1].contiguous()}, f"columns, weight {K} rows"),
    (OP, "strides"): (
        lambda a, w: {"weight": w.new_empty(2 * K, 2 * N)[::2, ::2]},
        "neither stride",
    ),
    (OP, "device"): (lambda a, w: {"weight": w.to("meta")}, "weight is on meta"),
    (PROMPTS, "lengths"): (
        lambda q, k, v: {"k": k[:, :-1], "v": v[:, :-1]},
        "only the number of heads may differ",
    ),
    (PROMPTS, "values"): (lambda q, k, v: {"v": v[..., :-1]}, "v [2, 20, 1, 15]"),
    (PROMPTS, "dimensions"): (
        lambda q, k, v: {"k": k[0], "v": v[0]},
        "k is [20, 1, 16], must be [batch, length, heads, head_dim]",
    ),
    (PROMPTS, "a number"): (lambda q, k, v: {"q": q[0, 0, 0, 0]}, "q is [], must be"),
    (PROMPTS, "strides"): (
        lambda q, k, v: {"q": q.transpose(1, 3).contiguous().transpose(1, 3)},
        "the heads of q are not contiguous",
    ),
    (PROMPTS, "groups"): (
        lambda q, k, v: {"k": k.repeat(1, 1, 3, 1), "v": v.repeat(1, 1, 3, 1)},
        "not divisible by kv_heads=3",
    ),
    (PROMPTS, "scale"): (lambda q, k, v: {"scale": 0.0}, "scale is 0.0"),
    (PROMPTS, "packed"): (
        lambda q, k, v: {"cu_seqlens": torch.tensor([0, 20], dtype=torch.int32)},
        "must be [tokens, heads, head_dim]",
    ),
    (PROMPTS, "lengths of 64 bits"): (
        lambda q, k, v: {"q": q[0], "k": k[0], "v": v[0], "cu_seqlens": torch.tensor([0, 20])},
        "cu_seqlens is torch.int64",
    ),
    (PROMPTS, "no lengths"): (
        lambda q, k, v: {
            "q": q[0],
            "k": k[0],
            "v": v[0],
            "cu_seqlens": torch.tensor([], dtype=torch.int32),
        },
        "cu_seqlens is not [batch + 1]",
    ),
    (PROMPTS, "output"): (
        lambda q, k, v: {"out": torch.empty_like(q), "return_lse": True},
        "out holds no log-sum-exps",
    ),
    (ALL_REDUCE, "rows"): (
        lambda x, w: {"x": x[:, :-1]},
        f"x has {K - 1} columns, weight {K} rows",
    ),
    (ALL_REDUCE, "vector"): (lambda x, w: {"x": x[0]}, "must be matrices"),
    (ALL_REDUCE, "bias"): (
        lambda x, w: {"bias": x.new_zeros(N - 1)},
        f"bias is not a contiguous [{N}]",
    ),
    (ALL_REDUCE, "residual"): (
        lambda x, w: {"residual": x.new_zeros(M - 1, N)},
        f"residual is not [{M}, {N}]",
    ),
    (ALL_REDUCE, "dtype"): (
        lambda x, w: {"residual": x.new_zeros(M, N).float()},
        "residual is torch.float32",
    ),
    (SCATTER, "dimension"): (lambda x, w: {"scatter_dim": 2}, "scatter_dim is 2"),
    (SCATTER, "columns"): (
        lambda x, w: {"weight": w.new_zeros(K, N + 1), "scatter_dim": 1},
        f"n={N + 1} is not divisible by 2 ranks",
    ),
    (DECODE, "dtype"): (lambda q, k, v, n: {"q": q.float()}, "not float16 or bfloat16"),
    (DECODE, "q"): (lambda q, k, v, n: {"q": q[0]}, "q is not"),
    (DECODE, "k"): (lambda q, k, v, n: {"k": k[0]}, "4 dimensions"),
    (DECODE, "v"): (lambda q, k, v, n: {"v": v[:, 1:]}, "k is [2, 20, 1, 16], v [2, 19, 1, 16]"),
    (DECODE, "heads"): (
        lambda q, k, v, n: {"q": q[:, :, 1:]},
        "heads of k have 16 values, of q 15",
    ),
    (DECODE, "strides"): (
        lambda q, k, v, n: {"k": k.repeat_interleave(2, 3)[..., ::2]},
        "not contiguous",
    ),
    (DECODE, "group"): (
        lambda q, k, v, n: {"k": k.repeat(1, 1, 2, 1), "v": v.repeat(1, 1, 2, 1)},
        "q_heads=3 is not divisible by kv_heads=2",
    ),
    (DECODE, "batch"): (lambda q, k, v, n: {"k": k[:1], "v": v[:1]}, "k has 1 sequences, q 2"),
    (DECODE, "lengths"): (lambda q, k, v, n: {"kv_lens": n[0]}, "must be int32 [2, 2]"),
    (DECODE, "long lengths"): (
        lambda q, k, v, n: {"kv_lens": n.long()},
        "kv_lens is torch.int64",
    ),
    (DECODE, "table"): (
        lambda q, k, v, n: {"block_table": n.new_zeros(1, 4)},
        "block_table is torch.int32 [1, 4], must be int32 [2, 4]",
    ),
    (DECODE, "scale"): (lambda q, k, v, n: {"scale": 0.0}, "scale is 0.0"),
    (DECODE, "vast scale"): (lambda q, k, v, n: {"scale": 1e39}, "scale is 1e+39"),
    (DECODE, "soft_cap"): (lambda q, k, v, n: {"soft_cap": -1.0}, "soft_cap is -1.0"),
    (DECODE, "vast soft_cap"): (lambda q, k, v, n: {"soft_cap": 1e6}, "at most 65536"),
    (DECODE, "gradient"): (
        lambda q, k, v, n: {"q": q.clone().requires_grad_()},
        "an input requires a gradient",
    ),
    (DECODE, "scales"): (lambda q, k, v, n: {"k_scale": n.float()[:1, 0]}, "v_scale is missing"),
    (DECODE, "no fp8"): (
        lambda q, k, v, n: {"k_scale": n.float()[:1, 0], "v_scale": n.float()[:1, 0]},
        "k is torch.float16, scales are of",
    ),
    (DECODE, "window"): (lambda q, k, v, n: {"window": 0}, "window is 0"),
}


# -- tests -------------------------------------------------------------------------------------


def run(ranks: Ranks, task: str, **arguments: Any) -> list[Any]:
    return ranks.run(ranks.few, f"{__name__}:{task}", **arguments)


@on_every_fabric
@pytest.mark.dealt("op")
@pytest.mark.parametrize(("op", "fields", "variant"), CALLED)
def test_calls_are_right_and_counted_also_in_compiled_code(
    ranks: Ranks, op: str, fields: dict[str, Any], variant: str
) -> None:
    for right, chosen, stats in run(ranks, "call", op=op, fields=fields, variant=variant):
        assert all(right), right
        assert chosen == variant
        assert stats == [{"baseline" if variant == "baseline" else "exact": 7}]


@on_every_fabric
@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({"out_scales": "channel"}, "push"),
        ({"out_scales": "tensor", "dtype": "bfloat16"}, "baseline"),
        ({"out_scales": "block", "x_dtype": "fp8", "scales": "channel"}, "push_two_shot"),
        ({"out_scales": "tensor", "x_dtype": "fp8", "scales": "tensor"}, "push"),
    ],
)
def test_a_norm_in_fp8_is_right_also_in_compiled_code(
    ranks: Ranks, fields: dict[str, Any], variant: str
) -> None:
    for right in run(ranks, "call_quantising", fields=fields, variant=variant):
        assert all(right), right


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_scales": "row"}, "not one of tensor, channel, block"),
        ({"out_scales": "tensor"}, "no float32 [1]"),
        ({"out_scales": "block", "out_scale": 1.0}, "are found"),
    ],
)
def test_scales_of_a_result_that_no_format_has_are_refused(
    ranks: Ranks, options: dict[str, Any], message: str
) -> None:
    for said in run(ranks, "call_badly_quantising", options=options):
        assert message in said


def test_the_eps_of_a_call_counts(ranks: Ranks) -> None:
    assert all(size < 0.1 for size in run(ranks, "call_with_another_eps"))


def test_the_scale_of_attention_has_a_default(ranks: Ranks) -> None:
    assert all(error < 0.01 for error in run(ranks, "call_with_defaults"))


def test_a_vast_window_leaves_out_no_key(ranks: Ranks) -> None:
    assert all(run(ranks, "windows"))


@pytest.mark.parametrize(("method", "what"), BAD)
def test_what_does_not_fit_is_refused(ranks: Ranks, method: str, what: str) -> None:
    _, message = BAD[method, what]
    assert all(message in said for said in run(ranks, "call_badly", method=method, what=what))
