"""How users call embedding_all_to_all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taxfree_kernels.arguments import aligned, require, require_integers
from taxfree_kernels.embedding_all_to_all.gradient import gradient
from taxfree_kernels.embedding_all_to_all.problem import EmbeddingAllToAll
from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.signature import Signature
from taxfree_kernels.variant import ITEM_BYTES

_DTYPES = {getattr(torch, name): name for name in ITEM_BYTES}


def _problem(
    fabric: Fabric,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    shard_dim: int,
    mode: str,
) -> EmbeddingAllToAll:
    """See :meth:`taxfree.Runtime.embedding_all_to_all`."""
    require(weight.dim() == 3, f"weight is {list(weight.shape)}, must be [tables, rows, dim]")
    require(weight.dtype in _DTYPES, f"weight is {weight.dtype}, not {', '.join(ITEM_BYTES)}")
    require(weight.device == fabric.device, f"weight is on {weight.device}, not {fabric.device}")
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        raise PlanError(
            "weight is not contiguous and aligned to 16 bytes",
            "copy it once: weight.clone(memory_format=torch.contiguous_format)",
        )
    require(offsets.dim() == 2, f"offsets is {list(offsets.shape)}, must be [tables, batch + 1]")
    require(indices.dim() == 2, f"indices is {list(indices.shape)}, must be [tables, capacity]")
    tables, batch = offsets.shape[0], offsets.shape[1] - 1
    capacity = indices.shape[1]
    require(
        batch > 0 and capacity > 0 and capacity % batch == 0,
        f"there is room for {capacity} indices of a table, must be a multiple of batch={batch}",
    )
    require_integers(fabric, "indices", indices, (tables, capacity))
    require_integers(fabric, "offsets", offsets, (tables, batch + 1))
    if per_sample_weights is not None:
        require(
            per_sample_weights.shape == indices.shape
            and per_sample_weights.dtype == torch.float32
            and per_sample_weights.device == fabric.device,
            f"per_sample_weights must be float32 {list(indices.shape)} on {fabric.device}",
        )
    problem = EmbeddingAllToAll(
        batch=batch, bag=capacity // batch, tables=tables, rows=weight.shape[1],
        dim=weight.shape[2], shard_dim=shard_dim, mode=mode,
        weighted=per_sample_weights is not None, dtype=_DTYPES[weight.dtype],
        world_size=fabric.world_size,
    )  # fmt: skip
    held = len(problem.tables_of(fabric.rank))
    require(weight.shape[0] == held, f"weight has {weight.shape[0]} tables, the rank holds {held}")
    return problem


class _Embedding(Signature):
    """Of two arguments, what calls of all sizes have in common is how much room a bag has."""

    def key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        _, indices, offsets, *_ = arguments
        room = divmod(indices.shape[-1], max(1, offsets.shape[-1] - 1))
        return (*super().key(arguments), room)


def _but_columns(matrix: torch.Tensor | None) -> Any:
    return None if matrix is None else (matrix.shape[:1], matrix.dtype, matrix.device)


EMBEDDING_ALL_TO_ALL = _Embedding(
    "embedding_all_to_all",
    "Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int shard_dim, "
    "str mode",
    by_size=dict.fromkeys(("indices", "offsets", "per_sample_weights"), _but_columns),
    sizes=lambda _, offsets, **others: (offsets.shape[1] - 1 if offsets.dim() == 2 else -1,),
    fits=lambda fabric, batch, indices, offsets, per_sample_weights, **others: (
        indices.shape[:1] == offsets.shape[:1]
        and indices.is_contiguous()
        and offsets.is_contiguous()
        and (per_sample_weights is None or per_sample_weights.shape == indices.shape)
    ),
    problem=_problem,
    inputs=lambda _, weight, indices, offsets, weights, *others: (
        weight, indices, offsets, None if weights is None else aligned(weights),
    ),
    shape=lambda _, batch, weight, offsets, **others: (batch, offsets.shape[0], weight.shape[-1]),
    gradient=gradient,
    saved=4,
)  # fmt: skip

SIGNATURES = (EMBEDDING_ALL_TO_ALL,)
