"""How users call attention."""

from __future__ import annotations

import dataclasses

import torch

from taxfree_kernels.arguments import (
    by_sequence,
    cache_dtype,
    require,
    require_integers,
    require_normal,
)
from taxfree_kernels.attention.plans import elements_with_lse
from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.signature import Signature

_QUERIES_AT_ONCE = 256  # the largest block of queries that a kernel takes


def _problem(
    fabric: Fabric,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Attention:
    """See :meth:`taxfree.Runtime.attention`."""
    packed = cu_seqlens is not None
    shape = "[tokens, heads, head_dim]" if packed else "[batch, length, heads, head_dim]"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require(tensor.dim() == 4 - packed, f"{name} is {list(tensor.shape)}, must be {shape}")
        require(tensor.stride(-1) == 1, f"the heads of {name} are not contiguous")
        # Kernels multiply the tokens of a block by this in 32 bits.
        require(
            (_QUERIES_AT_ONCE - 1) * tensor.stride(-3) < 1 << 31,
            f"the tokens of {name} are {tensor.stride(-3)} elements apart",
        )
    require(k.shape == v.shape, f"k is {list(k.shape)}, v {list(v.shape)}")
    require(
        k.shape[:-2] == q.shape[:-2] and k.shape[-1] == q.shape[-1],
        f"q is {list(q.shape)}, k {list(k.shape)}: only the number of heads may differ",
    )
    dtype, kv_scales = cache_dtype(fabric, q, k, v, k_scale, v_scale)
    batch = q.shape[0]
    if cu_seqlens is not None:
        require(cu_seqlens.dim() == 1 and len(cu_seqlens) > 0, "cu_seqlens is not [batch + 1]")
        require_integers(fabric, "cu_seqlens", cu_seqlens, (len(cu_seqlens),))
        batch = len(cu_seqlens) - 1
    require_normal("scale", scale)
    return Attention(
        batch=batch, length=q.shape[-3], q_heads=q.shape[-2], kv_heads=k.shape[-2],
        head_dim=q.shape[-1], causal=causal, packed=packed, dtype=dtype,
        world_size=fabric.world_size, kv_scales=kv_scales,
    )  # fmt: skip


ATTENTION = Signature(
    "attention",
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, bool causal, float? scale, "
    "Tensor? k_scale, Tensor? v_scale",
    by_size={
        "q": lambda q: (by_sequence(q), q.dim() == 3 and len(q)), "k": by_sequence,
        "v": by_sequence,
        "cu_seqlens": lambda begins: None if begins is None else (begins.dtype, begins.device),
    },
    sizes=lambda _, q, cu_seqlens, **others: (
        (*q.shape[:2], -1)[:2]
        if cu_seqlens is None
        else (cu_seqlens.numel() - 1, *q.shape[:1])
    ),
    fits=lambda fabric, batch, q, k, v, cu_seqlens, **others: (
        q.shape[:1] == k.shape[:1] == v.shape[:1]
        and (cu_seqlens is None or (cu_seqlens.dim() == 1 and cu_seqlens.is_contiguous()))
    ),
    problem=_problem,
    inputs=lambda _, q, k, v, cu_seqlens, causal, scale, *scales: (
        q, k, v, cu_seqlens,
        None if scale is None else torch.tensor(scale, dtype=torch.float32, device="cpu"),
        *(scales if scales[0] is not None else ()),
    ),
    shape=lambda _, batch, q, **others: q.shape,
)  # fmt: skip

ATTENTION_LSE = dataclasses.replace(
    ATTENTION,
    name="attention_lse",
    shape=lambda _, batch, q, **others: (elements_with_lse(q),),
)

SIGNATURES = (ATTENTION, ATTENTION_LSE)
