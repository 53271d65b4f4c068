"""Inputs and the float64 reference of flash_decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.fp8 import dequantised_cache, fp8_dtype
from taxfree_kernels.inputs import cache_in_fp8, random_rows
from taxfree_kernels.variant import Operation

_CHUNK_ELEMENTS = 1 << 24  # keys that the reference converts to float64 at a time
#: The least difference between a query's dot product with its target key and those with other keys.
#: All other weights are then exactly 0 in float32, and the result is the target key's value.
_SHARPNESS = 64


def make_inputs(
    problem: FlashDecode, rank: int, seed: int, device: torch.device, integers: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """The tensors of one rank.

    Random inputs fill the cache, because they are timed. Integer inputs have varied lengths: a rank
    may hold no key of a sequence, and one sequence may be empty.

    Returns:
        q [batch, q_heads, head_dim], the same on all ranks;
        k [batch, kv_len_per_rank, kv_heads, head_dim] and v [..., v_head_dim]; when paged,
        [pages, page_size, kv_heads, ...];
        kv_lens int32 [world_size, batch], the same on all ranks: keys that each rank holds;
        block_table int32 [batch, pages_per_sequence], or None;
        scaling float32 [2]: the factor of logits, and their soft cap. Plans also accept None: a
        factor of head_dim**-0.5, and no cap;
        of a cache in fp8 its scales, of keys and of values: float32 [1] or [kv_heads].
    """
    lengths = _lengths(problem, seed, integers)
    k, v, table, *scales = _cache(problem, rank, seed, device, integers)
    codes = random_rows((problem.rows, problem.head_dim), seed, device, problem.dtype, integers)
    q = codes.view(problem.batch, problem.q_heads, problem.head_dim)
    if integers:
        q = _look_for_one_key_each(problem, rank, seed, lengths, q, k, table)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    scale, cap = (1.0, 65536.0) if integers else (problem.head_dim**-0.5, 2.0)
    scaling = torch.tensor([scale, cap], dtype=torch.float32, device=device)
    return q, k, v, kv_lens, table, scaling, *scales


def reference(
    problem: FlashDecode, rank: int, seed: int, device: torch.device, integers: bool = False
) -> torch.Tensor:
    """out float64 [batch, q_heads, v_head_dim], from the same inputs as :func:`make_inputs`."""
    attention = Attention64(problem, device)
    for peer in range(problem.world_size):
        attention.add(peer, *make_inputs(problem, peer, seed, device, integers))
    return attention.result


def empty_output(problem: FlashDecode, device: torch.device) -> torch.Tensor:
    """out [batch, q_heads, v_head_dim], uninitialised."""
    size = (problem.batch, problem.q_heads, problem.v_head_dim)
    return torch.empty(size, dtype=getattr(torch, problem.dtype), device=device)


class Attention64:
    """Attention in float64 over the caches of one rank after another, a chunk of keys at a time."""

    def __init__(self, problem: FlashDecode, device: torch.device) -> None:
        self._problem = problem
        heads = (problem.batch, problem.kv_heads, problem.group_size)
        self._top = torch.full(heads, -torch.inf, dtype=torch.float64, device=device)
        self._total = torch.zeros(heads, dtype=torch.float64, device=device)
        self._sum = torch.zeros(*heads, problem.v_head_dim, dtype=torch.float64, device=device)

    def add(self, rank: int, *tensors: Any) -> None:
        """Add the keys that a rank holds; tensors as :func:`make_inputs` returns them."""
        q, k, v, kv_lens, table, scaling, *scales = tensors
        problem, (k_scale, v_scale) = self._problem, scales or (None, None)
        scale, cap = scaling.double()
        queries = q.double().view(*self._top.shape, problem.head_dim)
        own_lens, later = kv_lens[rank], kv_lens[rank + 1 :].sum(0)
        chunk = max(1, _CHUNK_ELEMENTS // (problem.batch * problem.kv_heads * problem.head_dim))
        for begin in range(0, problem.kv_len_per_rank, chunk):
            positions = torch.arange(
                begin, min(begin + chunk, problem.kv_len_per_rank), device=kv_lens.device
            )
            seen = positions < own_lens[:, None]
            if problem.window:
                seen &= positions >= own_lens[:, None] - (problem.window - later[:, None])
            logits = (
                torch.einsum(
                    "bhgd,bnhd->bhgn", queries, _keys(problem, k, table, positions, k_scale)
                )
                * scale
            )
            if problem.soft_cap:
                logits = cap * torch.tanh(logits / cap)
            logits = logits.masked_fill(~seen[:, None, None, :], -torch.inf)
            top = torch.maximum(self._top, logits.amax(-1))
            finite = torch.where(top == -torch.inf, 0.0, top)
            kept = torch.exp(self._top - finite)
            weights = torch.exp(logits - finite[..., None])
            self._sum = self._sum * kept[..., None] + torch.einsum(
                "bhgn,bnhd->bhgd", weights, _keys(problem, v, table, positions, v_scale)
            )
            self._total = self._total * kept + weights.sum(-1)
            self._top = top

    @property
    def result(self) -> torch.Tensor:
        """float64 [batch, q_heads, v_head_dim]; zeros where a sequence has no key."""
        total = torch.where(self._total > 0, self._total, 1.0)
        return (self._sum / total[..., None]).flatten(1, 2)


def _keys(
    problem: FlashDecode,
    cache: torch.Tensor,
    table: torch.Tensor | None,
    positions: torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """Keys or values at `positions` of every sequence, float64 [batch, positions, kv_heads, .]."""
    bits = cache if scale is None else cache.view(torch.uint8)  # fp8 cannot be indexed everywhere
    if table is None:
        found = bits[:, positions]
    else:
        pages = table[:, positions // problem.page_size].long()
        found = bits[pages, positions % problem.page_size]
    if scale is None:
        return found.double()
    return dequantised_cache(found.view(cache.dtype), scale)


# -- parts of the inputs ------------------------------------------------------------------------


def _lengths(problem: FlashDecode, seed: int, integers: bool) -> list[list[int]]:
    """The number of keys of each sequence on each rank."""
    size = (problem.world_size, problem.batch)
    if not integers:
        return [[problem.kv_len_per_rank] * problem.batch] * problem.world_size
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, problem.kv_len_per_rank + 1, size, generator=generator, device="cpu")
    lengths[torch.rand(size, generator=generator, device="cpu") < 0.25] = 0
    lengths[torch.rand(size, generator=generator, device="cpu") < 0.25] = problem.kv_len_per_rank
    empty = seed % (problem.batch + 1)
    if empty < problem.batch:
        lengths[:, empty] = 0
    rows: list[list[int]] = lengths.tolist()
    return rows


def _cache(
    problem: FlashDecode, rank: int, seed: int, device: torch.device, integers: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, *tuple[torch.Tensor, ...]]:
    """Keys, values, block table and scales of a rank; pages lie in random order."""
    own_seed = 1000 * seed + 10 * (rank + 1)
    lead, table = (problem.batch, problem.kv_len_per_rank), None
    if problem.page_size:
        lead = problem.batch * problem.pages_per_sequence, problem.page_size
        order = torch.randperm(lead[0], generator=torch.Generator().manual_seed(own_seed))
        by_sequence = order.view(problem.batch, problem.pages_per_sequence)
        table = by_sequence.to(device=device, dtype=torch.int32)
    k, v = (
        random_rows(
            (*lead, problem.kv_heads, dim), own_seed + which, device, problem.dtype, integers
        )
        for which, dim in ((1, problem.head_dim), (2, problem.v_head_dim))
    )
    if problem.kv_scales == "none":
        return k, v, table
    (k8, k_scale), (v8, v_scale) = (
        cache_in_fp8(each, problem.kv_scales, fp8_dtype(device), integers, factor)
        for each, factor in ((k, 1), (v, 2))
    )
    return k8, v8, table, k_scale, v_scale


def _look_for_one_key_each(
    problem: FlashDecode,
    rank: int,
    seed: int,
    lengths: list[list[int]],
    codes: torch.Tensor,
    k: torch.Tensor,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """Queries that each match one key; if the key is on this rank, it is written to the cache.

    The target keys of a group's query heads are spread evenly over the sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(
        0, 1 << 30, (problem.batch, problem.kv_heads), generator=generator, device="cpu"
    )
    q = codes.clone()
    for sequence in range(problem.batch):
        lens = [by_sequence[sequence] for by_sequence in lengths]
        total = sum(lens)
        visible = min(total, problem.window or total)
        distinct = min(problem.group_size, visible)
        first = sum(lens[:rank])
        for head in range(problem.q_heads if visible else 0):
            group, member = divmod(head, problem.group_size)
            member %= distinct
            code = codes[sequence, group * problem.group_size + member]
            q[sequence, head] = code
            offset = int(shift[sequence, group]) + member * (visible // distinct)
            position = total - visible + offset % visible - first
            if not 0 <= position < lens[rank]:
                continue
            if table is None:
                k[sequence, position, group] = code.to(k.dtype)
            else:
                page, within = divmod(position, problem.page_size)
                k[int(table[sequence, page]), within, group] = code.to(k.dtype)
    return q * _SHARPNESS


def vendor_kernel(problem: FlashDecode, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """torch's attention over the rank's own keys; None if torch lacks a feature of the problem."""
    if problem.page_size or problem.soft_cap or problem.window:
        return None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> torch.Tensor:
        if problem.kv_scales != "none":  # torch has no attention to fp8
            *_, k_scale, v_scale, _ = others
            k, v = (dequantised_cache(*each, q.dtype) for each in ((k, k_scale), (v, v_scale)))
        return scaled_dot_product_attention(
            q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
        )

    return attend


def first_variants(problem: FlashDecode) -> tuple[str, ...]:
    """By the shipped tables of one, two, four and eight H200s."""
    return ("fused", "splits", "fine_wait")


OPERATION = Operation(
    name="flash_decode",
    problem=FlashDecode,
    interpolated_fields=("batch", "kv_len_per_rank"),
    ignored_fields=("dtype",),
    make_inputs=make_inputs,
    reference=reference,
    empty_output=empty_output,
    first_variants=first_variants,
    family_fields=("q_heads", "kv_heads", "head_dim", "v_head_dim"),
    vendor_kernel=vendor_kernel,
)
