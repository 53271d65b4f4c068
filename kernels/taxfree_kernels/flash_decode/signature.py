"""How users call flash_decode."""

from __future__ import annotations

import torch

from taxfree_kernels.arguments import (
    aligned,
    by_row,
    by_sequence,
    cache_dtype,
    is_normal,
    require,
    require_integers,
    require_normal,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.signature import Signature

_KEYS_AT_ONCE = 128  # the largest block of keys that a kernel takes
_LARGEST_SOFT_CAP = 65536.0  # beyond, too few digits of the kernels' tanh are left


def _problem(
    fabric: Fabric,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> FlashDecode:
    """See :meth:`taxfree.Runtime.flash_decode`."""
    require(q.dim() == 3, "q is not [batch, q_heads, head_dim]")
    require(k.dim() == 4 and v.dim() == 4, "k and v do not have 4 dimensions")
    require(k.shape[:3] == v.shape[:3], f"k is {list(k.shape)}, v {list(v.shape)}")
    require(k.shape[3] == q.shape[2], f"heads of k have {k.shape[3]} values, of q {q.shape[2]}")
    require(k.stride(3) == 1 and v.stride(3) == 1, "the heads of k or v are not contiguous")
    dtype, kv_scales = cache_dtype(fabric, q, k, v, k_scale, v_scale)
    batch, capacity, page_size = q.shape[0], k.shape[1], 0
    require_integers(fabric, "kv_lens", kv_lens, (fabric.world_size, batch))
    if block_table is not None:
        page_size = capacity
        require(block_table.dim() == 2, "block_table is not [batch, pages]")
        capacity *= block_table.shape[1]
        require_integers(fabric, "block_table", block_table, (batch, block_table.shape[1]))
    else:
        require(k.shape[0] == batch, f"k has {k.shape[0]} sequences, q {batch}")
    for name, cache in (("k", k), ("v", v)):
        furthest = (cache.shape[2] - 1) * cache.stride(2)
        require(furthest < 1 << 31, f"the heads of {name} are {cache.stride(2)} elements apart")
        # Kernels add these products of 32 bits to 64-bit addresses: of a page, or of a block of it.
        keys = page_size if page_size else min(cache.shape[1], _KEYS_AT_ONCE)
        furthest = (keys - 1) * cache.stride(1)
        require(furthest < 1 << 31, f"the keys of {name} are {cache.stride(1)} elements apart")
    require_normal("scale", scale)
    require(
        soft_cap is None or (is_normal(soft_cap) and soft_cap <= _LARGEST_SOFT_CAP),
        f"soft_cap is {soft_cap}, must be positive and at most {_LARGEST_SOFT_CAP}",
    )
    require(window is None or window > 0, f"window is {window}, must be positive")
    if window is not None and window >= fabric.world_size * capacity:
        window = None  # it leaves out no key
    return FlashDecode(
        batch=batch, q_heads=q.shape[1], kv_heads=k.shape[2], head_dim=q.shape[2],
        kv_len_per_rank=capacity, v_head_dim=v.shape[3], page_size=page_size,
        soft_cap=soft_cap is not None, window=window or 0, dtype=dtype,
        world_size=fabric.world_size, kv_scales=kv_scales,
    )  # fmt: skip


FLASH_DECODE = Signature(
    "flash_decode",
    "Tensor q, Tensor k, Tensor v, Tensor kv_lens, Tensor? block_table, float? scale, "
    "float? soft_cap, int? window, Tensor? k_scale, Tensor? v_scale",
    by_size={
        "q": by_row, "k": by_sequence, "v": by_sequence, "block_table": by_sequence,
        "kv_lens": lambda lens: (lens.dtype, lens.device),
    },
    sizes=lambda _, q, k, block_table, **others: (
        q.shape[0] if q.dim() == 3 else -1,
        k.shape[1] if block_table is None else k.shape[1] * block_table.shape[1],
    ),
    fits=lambda fabric, batch, k, v, kv_lens, block_table, **others: (
        kv_lens.shape == (fabric.world_size, batch)
        and kv_lens.is_contiguous()
        and (k if block_table is None else block_table).shape[0] == batch
        and v.shape[0] == k.shape[0]
        and (block_table is None or block_table.is_contiguous())
    ),
    problem=_problem,
    inputs=lambda on_device, q, k, v, kv_lens, table, scale, soft_cap, window, *scales: (
        aligned(q), k, v, kv_lens, table,
        None
        if scale is None and soft_cap is None
        else on_device(scale or q.shape[2] ** -0.5, soft_cap or 0.0),
        *(scales if scales[0] is not None else ()),
    ),
    shape=lambda _, batch, q, v, **others: (batch, q.shape[1], v.shape[3]),
)  # fmt: skip

SIGNATURES = (FLASH_DECODE,)
