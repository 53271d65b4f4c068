"""The operations as torch ops, so that ``torch.compile`` and graph capture see them.

Registered when this module is imported, which ``taxfree.init`` does. The schema names the process
group, as torch's own fused ops do; each op runs on that group's runtime. They signal peers, so the
compiler must neither drop nor reorder them: they are registered as ordered effects.
"""

from __future__ import annotations

import torch
from torch.library import Library

from taxfree.runtime import runtime_of

_library = Library("taxfree", "DEF")


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


_library.define(
    "all_gather_matmul(Tensor a_shard, Tensor weight, Tensor? bias, int gather_dim, int? m, "
    "str group_name) -> Tensor"
)
_library.impl("all_gather_matmul", _all_gather_matmul, "CompositeExplicitAutograd")
torch.library.register_fake("taxfree::all_gather_matmul", _all_gather_matmul_shape, lib=_library)


def _register_as_ordered(op: torch._ops.OpOverload) -> None:
    from torch._higher_order_ops import effects

    kinds = getattr(effects, "_EffectType", None) or effects.EffectType
    effects._register_effectful_op(op, kinds.ORDERED)


_register_as_ordered(torch.ops.taxfree.all_gather_matmul.default)
