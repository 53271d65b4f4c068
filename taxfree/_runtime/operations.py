"""The operations as users call them: what their tensors are, and which signature runs them."""

from __future__ import annotations

import abc
from typing import Any

import torch

from taxfree.errors import UsageError
from taxfree_kernels.all_gather_matmul.signature import ALL_GATHER_MATMUL, SCALED_ALL_GATHER_MATMUL
from taxfree_kernels.attention.plans import split
from taxfree_kernels.attention.signature import ATTENTION, ATTENTION_LSE
from taxfree_kernels.embedding_all_to_all.signature import EMBEDDING_ALL_TO_ALL
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode.signature import FLASH_DECODE
from taxfree_kernels.fp8 import dtype_of
from taxfree_kernels.matmul_all_reduce.signature import (
    MATMUL_ALL_REDUCE,
    MATMUL_ALL_REDUCE_RMS_NORM,
    MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE,
    SCALED_MATMUL_ALL_REDUCE,
    SCALED_MATMUL_ALL_REDUCE_RMS_NORM,
    SCALED_MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE,
)
from taxfree_kernels.matmul_reduce_scatter.signature import (
    MATMUL_REDUCE_SCATTER,
    SCALED_MATMUL_REDUCE_SCATTER,
)
from taxfree_kernels.reduction.fused import parts_of
from taxfree_kernels.signature import Signature, on_wire
from taxfree_kernels.stencil.signature import STENCIL


class Operations(abc.ABC):
    """Of a :class:`taxfree.Runtime`."""

    _fabric: Fabric

    @abc.abstractmethod
    def _call(
        self, signature: Signature, arguments: tuple[Any, ...], out: torch.Tensor | None
    ) -> torch.Tensor:
        """Run an operation; as its torch op if the compiler, autograd or a mode must see it."""

    def all_gather_matmul(
        self,
        a_shard: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gather_dim: int = 0,
        m: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """all_gather(a_shard) @ weight (+ bias), with this rank's own weight.

        Args:
            a_shard: contiguous, float16 or bfloat16; for gather_dim 0 [ceil(m / world_size), k],
                where the last ranks have fewer rows or none if m does not divide evenly; for
                gather_dim 1 [m, k / world_size].
            weight: [k, n] of the same dtype; one of its strides must be 1.
            bias: [n], or None.
            gather_dim: 0: shards are rows; 1: shards are columns.
            m: rows over all ranks; required when gather_dim is 0 and their number is not
                ``world_size * a_shard.shape[0]`` on every rank.
            out: [m, n], contiguous; the result is written into it.

        Returns:
            [m, n] of the inputs' dtype.
        """
        return self._call(ALL_GATHER_MATMUL, (a_shard, weight, bias, gather_dim, m), out)

    def scaled_all_gather_matmul(
        self,
        a_shard: torch.Tensor,
        weight: torch.Tensor,
        a_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        gather_dim: int = 0,
        m: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        fast_accumulation: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """:meth:`all_gather_matmul` of fp8 factors: of all_gather(a * a_scale) @ (weight * scale).

        Scales are float32, as of :meth:`scaled_matmul_all_reduce`. Those of a rank's own rows or
        blocks travel with its shard. A scale of the tensor, and those of tokens whose columns are
        on several ranks (gather_dim 1), must be the same on all ranks.

        Args:
            a_shard: as there, in e4m3, of the kind that the GPU multiplies.
            a_scale: [1]; [rows of a_shard, 1]; or [rows of a_shard, ceil(its columns / 128)].
            weight, weight_scale, dtype, fast_accumulation: as of :meth:`scaled_matmul_all_reduce`.
            bias, out: as there, of `dtype`.
            gather_dim, m: as there; with blocks, columns of a shard are a multiple of 128.

        Returns:
            [m, n] of `dtype`.
        """
        factors = (a_shard, weight, a_scale, weight_scale)
        arguments = (*factors, bias, gather_dim, m, dtype, bool(fast_accumulation))
        return self._call(SCALED_ALL_GATHER_MATMUL, arguments, out)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        cu_seqlens: torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of prompts to themselves: softmax(scale * q @ k^T) @ v, for each head.

        Each rank attends to its own tensors; none waits for another.

        Args:
            q: [batch, length, q_heads, head_dim], float16 or bfloat16; any strides but the last.
            k, v: [batch, length, kv_heads, head_dim]; consecutive query heads share a kv head.
            causal: a token does not see later ones.
            scale: factor of the logits; ``head_dim**-0.5`` when None.
            cu_seqlens: int32 [batch + 1], on the device, contiguous: packed sequences begin at
                these tokens of q, k and v [tokens, heads, head_dim], and the last entry is the
                number of tokens. Lengths may change between replays of a graph; sequences may be
                empty.
            return_lse: also return the log-sum-exps of the scaled logits.
            out: of the shape of q, contiguous; the result is written into it. Without `return_lse`.
            k_scale, v_scale: of keys and values in fp8, as of :meth:`flash_decode`. Else None.

        Returns:
            The output, of the shape and dtype of q, contiguous. With `return_lse` a pair, the
            second float32 [batch, q_heads, length] or, of packed sequences, [q_heads, tokens]:
            natural logarithms.
        """
        arguments = (q, k, v, cu_seqlens, bool(causal), scale, k_scale, v_scale)
        if not return_lse:
            return self._call(ATTENTION, arguments, out)
        if out is not None:
            raise UsageError("out holds no log-sum-exps", "call without out, or return_lse")
        both, lse = split(self._call(ATTENTION_LSE, arguments, None), q)
        assert lse is not None
        return both, lse

    def flash_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_lens: torch.Tensor,
        block_table: torch.Tensor | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        out: torch.Tensor | None = None,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one query token per sequence over a KV cache that is split across ranks.

        The keys of a sequence are those of rank 0, then those of rank 1, and so on; the query
        comes after all of them. Lengths may change between replays of a graph.

        Args:
            q: [batch, q_heads, head_dim], the same on every rank; float16 or bfloat16.
            k, v: this rank's cache, [batch, capacity, kv_heads, head_dim] and [..., v_head_dim];
                with a block table [pages, page_size, kv_heads, ...]. Each head is contiguous.
            kv_lens: int32 [world_size, batch], the same on every rank: how many keys of each
                sequence each rank holds. The output of a sequence without keys is zero.
            block_table: int32 [batch, pages], contiguous: this rank's pages of each sequence.
            scale: factor of the logits; ``head_dim**-0.5`` when None. A captured call with another
                scale, or a soft cap, that no eager call has used before runs two more small
                kernels.
            soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
            window: the number of most recent keys that a query attends to; None for all.
            out: [batch, q_heads, v_head_dim], contiguous; the result is written into it.
            k_scale, v_scale: of a cache in e4m3, of the kind that the GPU multiplies: float32 [1],
                or [kv_heads]; a key is its element times its scale. Else None.

        Returns:
            [batch, q_heads, v_head_dim] of q's dtype, bitwise identical on every rank.
        """
        numbers, scales = (scale, soft_cap, window), (k_scale, v_scale)
        arguments = (q, k, v, kv_lens, block_table, *numbers, *scales)
        return self._call(FLASH_DECODE, arguments, out)

    def embedding_all_to_all(
        self,
        weight: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        shard_dim: int = 0,
        mode: str = "sum",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pooled rows of embedding tables that are sharded over the ranks, for own bags of indices.

        Indices and lengths of bags may change between replays of a graph. By the fused kernel a bag
        that begins before 0, ends before it begins or ends beyond the capacity, or holds an index
        that is no row, pools to NaN; the library's path checks no more than torch's
        `embedding_bag` does on all of a rank's tables.

        Args:
            weight: this rank's tables, [tables, rows, dim], contiguous, at a multiple of 16 bytes
                (`.clone()` a part that is not); float16, bfloat16 or float32; dim is even. For
                shard_dim 0 it has tables [rank * tables // world_size, ...) of all; for 1 rows
                [rank * rows, ...) of each table.
            indices: int32 [tables, capacity], contiguous: this rank's bags for all tables, those of
                a table one behind the other. Beyond the last bag there may be any rows' numbers.
                The capacity, the same on all ranks, is a multiple of the batch.
            offsets: int32 [tables, batch + 1], contiguous: bag b of table t is indices[t,
                offsets[t, b] : offsets[t, b + 1]]; the first begins at 0. The batch is the same on
                all ranks.
            per_sample_weights: float32 [tables, capacity], factors of rows; for mode "sum". The
                library's path rounds them to weight's dtype.
            shard_dim: 0: ranks hold whole tables; 1: ranks hold rows of each.
            mode: "sum" or "mean"; an empty bag pools to 0.
            out: [batch, tables, dim], contiguous; the result is written into it.

        Returns:
            [batch, tables, dim] of weight's dtype. Its gradient is that of weight alone.
        """
        arguments = (weight, indices, offsets, per_sample_weights, shard_dim, mode)
        return self._call(EMBEDDING_ALL_TO_ALL, arguments, out)

    def matmul_all_reduce(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        fp8_wire: bool = False,
    ) -> torch.Tensor:
        """The sum over all ranks of x @ weight (+ bias) (+ residual); bitwise equal on all ranks.

        Args:
            x: [m, k], this rank's columns; float16 or bfloat16.
            weight: [k, n] of the same dtype, this rank's rows; one of its strides 1.
            bias: [n], or None; the same on all ranks, and added once.
            residual: [m, n], or None; the same on all ranks, and added once.
            out: [m, n], contiguous; the result is written into it. It may be
                the residual.
            fp8_wire: permit partial sums of many rows to travel in fp8, with errors of up to 1/16
                of each: docs/fp8.md. Such calls have no gradients.

        Returns:
            [m, n] of the inputs' dtype.
        """
        signature = on_wire(MATMUL_ALL_REDUCE, fp8_wire)
        return self._call(signature, (x, weight, bias, residual), out)

    def matmul_all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm_weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
        fp8_wire: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`matmul_all_reduce`, followed by an RMSNorm of each row; returns both.

        The norm is sum * rsqrt(mean(sum^2) + eps) * norm_weight, computed in float32 from the sum
        before rounding or, in some variants, after it.

        Args:
            x, weight, bias, residual: as there.
            norm_weight: [n], the same on all ranks.
            eps: the same on all ranks. A captured call with a value that no eager call has used
                before runs one more small kernel.
            out: [2, m, n], contiguous; both are written into it. ``out[1]`` may be the
                residual.
            fp8_wire: as of :meth:`matmul_all_reduce`.

        Returns:
            The normalised sum, and the sum, which is the next layer's residual: [m, n] each, of the
            inputs' dtype.
        """
        arguments = (x, weight, bias, residual, norm_weight, eps)
        signature = on_wire(MATMUL_ALL_REDUCE_RMS_NORM, fp8_wire)
        normalised, total = self._call(signature, arguments, out).unbind()
        return normalised, total

    def matmul_all_reduce_rms_norm_quantise(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm_weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        eps: float = 1e-6,
        out_scales: str = "channel",
        out_scale: torch.Tensor | None = None,
        fp8_wire: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`matmul_all_reduce_rms_norm`, with the normalised sum in fp8 for the next layer.

        It is rounded to the inputs' dtype, then quantised as by :func:`taxfree.quantise`.

        Args:
            x, weight, norm_weight, bias, residual, eps, fp8_wire: as there.
            out_scales: who has a scale: "channel" for each token, "block" for each 128 elements of
                one, or "tensor", whose scale is given.
            out_scale: float32 [1], for "tensor" alone.

        Returns:
            The normalised sum, e4m3 [m, n]; its scales, float32 [m, 1], [m, ceil(n / 128)] or
            `out_scale`; the sum, which is the next layer's residual, [m, n] of the inputs' dtype.
        """
        arguments = (x, weight, bias, residual, norm_weight, eps, out_scales, out_scale)
        return self._quantised(on_wire(MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE, fp8_wire), arguments)

    def scaled_matmul_all_reduce(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        fast_accumulation: bool = False,
        out: torch.Tensor | None = None,
        fp8_wire: bool = False,
    ) -> torch.Tensor:
        """:meth:`matmul_all_reduce` of fp8 factors: of (x * x_scale) @ (weight * weight_scale).

        Scales are float32. Their shapes say whether a tensor, a token and an output channel, or
        128 elements of a token and a block of 128 x 128 of the weight have one.

        Args:
            x: [m, k], this rank's columns; e4m3, of the kind that the GPU multiplies.
            weight: [k, n] of the same dtype, this rank's rows; k is contiguous.
            x_scale: [1]; [m, 1]; or [m, ceil(k / 128)].
            weight_scale: [1]; [1, n]; or [ceil(k / 128), ceil(n / 128)], the first contiguous.
            bias, residual, out, fp8_wire: as there.
            dtype: of the result, of bias and residual; bfloat16 or float16.
            fast_accumulation: add products as the device's matrix instructions do, over all of k:
                faster, on Hopper with about 14 bits. With scales of tensors or channels alone.

        Returns:
            [m, n] of `dtype`.
        """
        factors = (x, weight, x_scale, weight_scale)
        arguments = (*factors, bias, residual, dtype, bool(fast_accumulation))
        return self._call(on_wire(SCALED_MATMUL_ALL_REDUCE, fp8_wire), arguments, out)

    def scaled_matmul_all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        norm_weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        eps: float = 1e-6,
        dtype: torch.dtype = torch.bfloat16,
        fast_accumulation: bool = False,
        out: torch.Tensor | None = None,
        fp8_wire: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`scaled_matmul_all_reduce`, and the RMSNorm of each row of it.

        Args:
            x, weight, x_scale, weight_scale, bias, residual, fast_accumulation: as there.
            norm_weight, eps, out, fp8_wire: as of :meth:`matmul_all_reduce_rms_norm`.
            dtype: as there, also of norm_weight.

        Returns:
            The normalised sum, and the sum: [m, n] each, of `dtype`.
        """
        factors = (x, weight, x_scale, weight_scale)
        kind = (dtype, bool(fast_accumulation))
        arguments = (*factors, bias, residual, *kind, norm_weight, eps)
        signature = on_wire(SCALED_MATMUL_ALL_REDUCE_RMS_NORM, fp8_wire)
        normalised, total = self._call(signature, arguments, out).unbind()
        return normalised, total

    def scaled_matmul_all_reduce_rms_norm_quantise(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        norm_weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        eps: float = 1e-6,
        dtype: torch.dtype = torch.bfloat16,
        out_scales: str = "channel",
        out_scale: torch.Tensor | None = None,
        fast_accumulation: bool = False,
        fp8_wire: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`scaled_matmul_all_reduce_rms_norm`, with the normalised sum in fp8.

        Args:
            out_scales, out_scale: as of :meth:`matmul_all_reduce_rms_norm_quantise`; the others: as
                there.

        Returns:
            As :meth:`matmul_all_reduce_rms_norm_quantise`; the sum is of `dtype`.
        """
        factors, kind = (x, weight, x_scale, weight_scale), (dtype, bool(fast_accumulation))
        normed = (norm_weight, eps, out_scales, out_scale)
        arguments = (*factors, bias, residual, *kind, *normed)
        signature = on_wire(SCALED_MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE, fp8_wire)
        return self._quantised(signature, arguments)

    def matmul_reduce_scatter(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scatter_dim: int = 0,
        out: torch.Tensor | None = None,
        fp8_wire: bool = False,
    ) -> torch.Tensor:
        """This rank's shard of the sum over all ranks of x @ weight.

        Args:
            x: [m, k], this rank's columns; float16 or bfloat16.
            weight: [k, n] of the same dtype, this rank's rows; one of its strides 1.
            scatter_dim: 0: shards are rows; 1: shards are columns, and n must be divisible by
                world_size.
            out: of the result's shape, contiguous; the result is written into it.
            fp8_wire: as of :meth:`matmul_all_reduce`.

        Returns:
            [ceil(m / world_size), n] for scatter_dim 0, where rows beyond m are zero; [m, n /
            world_size] for scatter_dim 1; of the inputs' dtype.
        """
        signature = on_wire(MATMUL_REDUCE_SCATTER, fp8_wire)
        return self._call(signature, (x, weight, scatter_dim), out)

    def scaled_matmul_reduce_scatter(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        scatter_dim: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        fast_accumulation: bool = False,
        out: torch.Tensor | None = None,
        fp8_wire: bool = False,
    ) -> torch.Tensor:
        """:meth:`matmul_reduce_scatter` of fp8 factors: of (x * x_scale) @ (weight * weight_scale).

        Args:
            x, weight, x_scale, weight_scale, dtype, fast_accumulation: as of
                :meth:`scaled_matmul_all_reduce`.
            scatter_dim, out, fp8_wire: as there.

        Returns:
            As :meth:`matmul_reduce_scatter`, of `dtype`.
        """
        factors = (x, weight, x_scale, weight_scale)
        arguments = (*factors, scatter_dim, dtype, bool(fast_accumulation))
        return self._call(on_wire(SCALED_MATMUL_REDUCE_SCATTER, fp8_wire), arguments, out)

    def stencil(
        self,
        u: torch.Tensor,
        steps: int,
        norm_every: int = 0,
        across: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Jacobi steps on a domain that the ranks share: each point becomes its neighbours' mean.

        Points at the edges of the domain stay. Results have the same bits on any number of ranks.

        Args:
            u: this rank's part, [rows, columns] or [rows, columns, depth], float32; of one shape on
                all ranks. Rank r has row r // across and column r % across of a grid of parts.
            steps: at least 1.
            norm_every: steps from one residual norm to the next; 0 for none.
            across: ranks that share the columns; 1: all share the rows.
            out: of the shape of u, contiguous; the result is written into it. Without norms.

        Returns:
            The part after all steps. With `norm_every` a pair, the second float32
            [steps // norm_every], the same on all ranks: the 2-norms, over the whole domain, of
            what these steps have changed.

        Raises:
            UsageError: the tensor and numbers do not fit together.
            PeerTimeout: an earlier call lost a peer.
        """
        arguments = (u, steps, norm_every, across)
        if not norm_every:
            return self._call(STENCIL, arguments, out)
        if out is not None:
            raise UsageError("out holds no norms", "call without out, or without norm_every")
        both = self._call(STENCIL, arguments, None)
        return both[: u.numel()].view(u.shape), both[u.numel() :].sqrt()

    def _quantised(
        self, signature: Signature, arguments: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run an operation whose normalised sum is in fp8: the values, their scales, the sum."""
        _, weight, *_, out_scales, out_scale = arguments
        out = self._call(signature, arguments, None)
        kind = dtype_of(self._fabric.hardware.architecture)
        values, scale, total = parts_of(out, weight.shape[1], out_scales, kind, out_scale)
        return values, scale, total
