"""The operations as torch ops, so that ``torch.compile`` and graph capture see them.

They are registered when this module is imported, which ``taxfree.init`` does. Each takes the name
of a process group, as torch's own fused ops do, and runs on that group's runtime. The ops signal
peers, so the compiler must neither drop nor reorder them: they are registered with ordered effects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from taxfree._runtime import gradients
from taxfree._runtime.runtime import runtime_of
from taxfree.errors import UsageError

_library = Library("taxfree", "DEF")


def _register(
    schema: str, run: Callable[..., torch.Tensor], shape: Callable[..., torch.Tensor]
) -> None:
    """Define an op by its implementation and its fake (meta) function."""
    name = schema[: schema.index("(")]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    if not gradients.register(name, _library):
        _library.impl(name, functools.partial(_without_gradient, name), "Autograd")
    torch.library.register_fake(f"taxfree::{name}", shape, lib=_library)
    # Imported late because it is slow. Its enum has moved between versions of torch.
    from torch._higher_order_ops import effects

    kinds = getattr(effects, "_EffectType", None) or effects.EffectType
    effects._register_effectful_op(getattr(torch.ops.taxfree, name).default, kinds.ORDERED)


def _without_gradient(name: str, *arguments: Any) -> Any:
    """Refuse inputs that require gradients, also while code is compiled; else run the op."""
    tensors = (each for each in arguments if isinstance(each, torch.Tensor))
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise UsageError("an input requires a gradient", "call under torch.no_grad()")
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.taxfree, name)(*arguments)


def _all_gather_matmul(
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gather_dim: int,
    m: int | None,
    group_name: str,
) -> torch.Tensor:
    return runtime_of(group_name).all_gather_matmul(a_shard, weight, bias, gather_dim, m)


def _all_gather_matmul_shape(
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gather_dim: int,
    m: int | None,
    group_name: str,
) -> torch.Tensor:
    rows = a_shard.shape[0]
    if m is None:
        m = rows if gather_dim == 1 else rows * runtime_of(group_name).world_size
    return a_shard.new_empty(m, weight.shape[1])


_register(
    "all_gather_matmul(Tensor a_shard, Tensor weight, Tensor? bias, int gather_dim, int? m, "
    "str group_name) -> Tensor",
    _all_gather_matmul,
    _all_gather_matmul_shape,
)


def _matmul_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    group_name: str,
) -> torch.Tensor:
    return runtime_of(group_name).matmul_all_reduce(x, weight, bias, residual)


def _matmul_all_reduce_shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    group_name: str,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


_register(
    "matmul_all_reduce(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
    "str group_name) -> Tensor",
    _matmul_all_reduce,
    _matmul_all_reduce_shape,
)


def _matmul_all_reduce_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    group_name: str,
) -> torch.Tensor:
    out = _matmul_all_reduce_rms_norm_shape(x, weight)
    runtime_of(group_name).matmul_all_reduce_rms_norm(
        x, weight, norm_weight, bias, residual, eps, out
    )
    return out  # one tensor: what an op returns may not share memory


def _matmul_all_reduce_rms_norm_shape(
    x: torch.Tensor, weight: torch.Tensor, *others: object
) -> torch.Tensor:
    return x.new_empty(2, x.shape[0], weight.shape[1])


_register(
    "matmul_all_reduce_rms_norm(Tensor x, Tensor weight, Tensor norm_weight, Tensor? bias, "
    "Tensor? residual, float eps, str group_name) -> Tensor",
    _matmul_all_reduce_rms_norm,
    _matmul_all_reduce_rms_norm_shape,
)


def _matmul_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, scatter_dim: int, group_name: str
) -> torch.Tensor:
    return runtime_of(group_name).matmul_reduce_scatter(x, weight, scatter_dim)


def _matmul_reduce_scatter_shape(
    x: torch.Tensor, weight: torch.Tensor, scatter_dim: int, group_name: str
) -> torch.Tensor:
    (m, _), (_, n), world_size = x.shape, weight.shape, runtime_of(group_name).world_size
    if scatter_dim == 1:
        return x.new_empty(m, n // world_size)
    return x.new_empty(-(-m // world_size), n)


_register(
    "matmul_reduce_scatter(Tensor x, Tensor weight, int scatter_dim, str group_name) -> Tensor",
    _matmul_reduce_scatter,
    _matmul_reduce_scatter_shape,
)


def _flash_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
    group_name: str,
) -> torch.Tensor:
    return runtime_of(group_name).flash_decode(
        q, k, v, kv_lens, block_table, scale, soft_cap, window
    )


def _flash_decode_shape(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[3])


_register(
    "flash_decode(Tensor q, Tensor k, Tensor v, Tensor kv_lens, Tensor? block_table, "
    "float? scale, float? soft_cap, int? window, str group_name) -> Tensor",
    _flash_decode,
    _flash_decode_shape,
)
