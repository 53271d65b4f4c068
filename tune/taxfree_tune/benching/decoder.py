"""A decoder of Llama's family in plain torch, as an engine runs it, and PyTorch's plans for it.

Tokens of all sequences are rows of one matrix. The projections q, k, v are one weight, as are gate
and up. Keys and values are written into a cache in place, attention reads the filled part of it
without a mask, and rotary's factors are computed ahead. Heads, columns and logits are split over
ranks by ``parallelize_module``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu

from taxfree.models.decoders import local
from taxfree_kernels.decode_step import decoder as of_step
from taxfree_kernels.fp8 import dequantised, fp8_dtype, quantised_weight
from taxfree_tune.shapes.models import Model

FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
_EPS, _ROPE_BASE = 1e-6, 10000.0  # of no account for times

#: keys and values of a layer: [batch, length, kv_heads of a rank, head_dim] each
Cache = Sequence[tuple[torch.Tensor, torch.Tensor]]


def kv_heads_of_rank(model: Model, ranks: int) -> int:
    """Key and value heads of a rank; with more ranks than heads, several have the same one."""
    return max(1, model.kv_heads // ranks)


class _Attention(nn.Module):
    def __init__(self, model: Model, ranks: int) -> None:
        super().__init__()
        kv_heads = kv_heads_of_rank(model, ranks)
        self.head_dim = model.head_dim
        self.heads = (model.heads // ranks, kv_heads, kv_heads)
        columns = ranks * sum(self.heads) * model.head_dim
        block = model.blocks[0]
        has_bias = any(column.bias for column in block.columns)
        self.qkv = nn.Linear(model.hidden, columns, bias=has_bias)
        self.o = nn.Linear(block.inputs, model.hidden, bias=block.bias)
        has_norms = model.family == "qwen3"
        norm = partial(nn.RMSNorm, model.head_dim, _EPS) if has_norms else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        self.attend = attend

    def forward(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor,
        start: int,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> Any:
        heads = self.qkv(x).view(cache[0].shape[0], -1, sum(self.heads), self.head_dim)
        q, k, v = heads.split(self.heads, dim=2)
        q, k = (_rotated(norm(y), rotary) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        end = start + q.shape[1]
        for states, new in zip(cache, (k, v), strict=True):
            states[:, start:end] = new
        if q.shape[1] == 1:  # a prompt sees what it has just computed, a token all before it
            k, v = (states[:, :end] for states in cache)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(x.shape[0], -1))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of a prompt to itself, or of one token to all: [batch, heads, length, head_dim]."""
    return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def rotary_factors(length: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of positions from 0 on, [length, 2, 1, head_dim] in float64.

    The sines of the first half of a head are negative: rotated, x is x * cos + swapped(x) * sin.
    """
    exponents = torch.arange(head_dim // 2, device=device, dtype=torch.float64) * (-2 / head_dim)
    angles = torch.arange(length, device=device)[:, None] * _ROPE_BASE**exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)[:, :, None]


def _rotated(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    cos, sin = rotary.unbind(1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class _MLP(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        block = model.blocks[1]
        has_bias = any(column.bias for column in block.columns)
        self.gate_up = nn.Linear(model.hidden, 2 * block.inputs, bias=has_bias)
        self.down = nn.Linear(block.inputs, model.hidden, bias=block.bias)

    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)


class _Block(nn.Module):
    """A layer from its normalised input to that of the next one, which a compiler sees at once."""

    def __init__(self, model: Model, ranks: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden, _EPS)
        self.attention = _Attention(model, ranks)
        self.mlp_norm, self.mlp = nn.RMSNorm(model.hidden, _EPS), _MLP(model)

    def forward(self, x: Any, normed: Any, next_norm: nn.Module, **state: Any) -> Any:
        x = x + self.attention(normed, **state)
        x = x + self.mlp(self.mlp_norm(x))
        return x, next_norm(x)


class Decoder(nn.Module):
    """The model: tokens -> logits of each sequence's next one, [batch, vocabulary].

    Args:
        model: of two blocks, attention and MLP; `vocabulary` is divisible by `ranks`.
        ranks: over which it is split.
    """

    def __init__(self, model: Model, ranks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.hidden)
        self.blocks = nn.ModuleList(_Block(model, ranks) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden, _EPS)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=model.head_bias)

    def forward(self, tokens: torch.Tensor, rotary: torch.Tensor, start: int, cache: Cache) -> Any:
        """Run a prompt, or one token of each sequence.

        Args:
            tokens: [length of the prompt], or [batch].
            rotary: of their positions, in the model's dtype; see `rotary_factors`.
            start: the first of these positions; 0 for a prompt.
            cache: keys and values are put into it.
        """
        batch, is_prompt = cache[0][0].shape[0], rotary.shape[0] > 1
        x, normed = self.begin(tokens)
        norms: list[Any] = [block.attention_norm for block in self.blocks][1:]
        norms.append(nn.Identity() if is_prompt else self.norm)
        for block, next_norm, states in zip(self.blocks, norms, cache, strict=True):
            x, normed = block(x, normed, next_norm, rotary=rotary, start=start, cache=states)
        return self.end(normed, batch, is_prompt)

    def begin(self, tokens: torch.Tensor) -> Any:
        """Embeddings, and the input of the first layer."""
        x: Any = self.embedding(tokens)
        first: Any = self.blocks[0]
        return x, first.attention_norm(x)

    def end(self, normed: torch.Tensor, batch: int, is_prompt: bool) -> Any:
        """The logits; of a prompt only the last row is normalised."""
        if is_prompt:  # with sequence parallelism of each rank's rows
            normed = self.norm(normed[-1:])
        return self.head(normed[-batch:])

    def compile_parts(self) -> Decoder:
        """Compile layers one by one: equal ones share their code, however many there are."""
        options: dict[str, Any] = {"dynamic": False, "fullgraph": True}
        for block in self.blocks:
            block.compile(**options)
        self.begin = torch.compile(self.begin, **options)  # type: ignore[method-assign]
        self.end = torch.compile(self.end, **options)  # type: ignore[method-assign]
        return self


def _plan(is_sequence_parallel: bool) -> dict[str, Any]:
    """PyTorch's plan; with sequence parallelism norms and residuals have shards of the rows."""
    rows = Shard(0) if is_sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.o": RowwiseParallel(output_layouts=rows),
        "blocks.*.mlp.gate_up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=rows),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if is_sequence_parallel:
        for name in ("blocks.*.attention", "blocks.*.mlp", "norm"):
            plan[name] = PrepareModuleInput(
                input_layouts=rows, desired_input_layouts=Replicate(), use_local_output=True
            )
        for name in ("attention_norm", "mlp_norm"):
            plan[f"blocks.*.{name}"] = SequenceParallel(sequence_dim=0, use_local_output=True)
        plan["embedding"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=rows
        )
    return plan


def parallel_decoder(model: Model, mesh: DeviceMesh, is_sequence_parallel: bool = False) -> Decoder:
    """A decoder that PyTorch has parallelised on a mesh, on the meta device."""
    with torch.device("meta"):
        decoder = Decoder(model, mesh.size()).requires_grad_(False)
    parallelize_module(decoder, mesh, _plan(is_sequence_parallel))
    return decoder


def random_weights(
    decoder: Decoder, rank: int, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A rank's part of each parameter, drawn at random; norms are near one.

    Args:
        decoder: parallelised.
    """
    weights = {}
    for index, (name, parameter) in enumerate(decoder.named_parameters()):
        local: torch.Tensor = parameter
        is_sharded = False
        if isinstance(parameter, DTensor):
            local, is_sharded = parameter.to_local(), isinstance(parameter.placements[0], Shard)
        generator = torch.Generator(device).manual_seed(1000 * index + is_sharded * (1 + rank))
        values = torch.randn(local.shape, generator=generator, device=device, dtype=dtype)
        if parameter.dim() == 1:
            values = 0.1 * values + (0.0 if name.endswith("bias") else 1.0)
        elif name != "embedding.weight":
            values *= parameter.shape[1] ** -0.5
        weights[name] = values
    return weights


def take_weights(decoder: Decoder, weights: Mapping[str, torch.Tensor]) -> None:
    """Let a decoder on the meta device use a rank's parts of its parameters, without a copy."""
    for name, parameter in list(decoder.named_parameters()):
        weight = weights[name]
        if isinstance(parameter, DTensor):
            weight = DTensor.from_local(
                weight, parameter.device_mesh, parameter.placements, run_check=False
            )
        room, _, short = name.rpartition(".")
        setattr(decoder.get_submodule(room), short, nn.Parameter(weight, requires_grad=False))


def in_fp8(decoder: of_step.Decoder, scales: str) -> of_step.Decoder:
    """A decoder for steps whose layers are in fp8; its own weights become what these stand for.

    Scales are powers of two, so that 16 bits hold that exactly.

    Args:
        scales: "channel" or "block".
    """
    kind = fp8_dtype(decoder.head.device)

    def of_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, scale = quantised_weight(weight.t(), scales, kind)
        scale = torch.ldexp(torch.ones_like(scale), scale.frexp().exponent)
        by_element = dequantised(torch.ones_like(weight.t()), scale, torch.float32).t()
        values = (weight / by_element).to(kind)
        weight.copy_(values.float() * by_element)
        return values, scale.t().contiguous()

    def of_layer(layer: of_step.Layer) -> of_step.Layer:
        factors = {name: of_weight(getattr(layer, name)) for name in of_step.SCALED}
        weights: dict[str, Any] = {name: values for name, (values, _) in factors.items()}
        return replace(layer, **weights, scales=tuple(scale for _, scale in factors.values()))

    return replace(decoder, layers=tuple(map(of_layer, decoder.layers)))


def for_step(decoder: Decoder, rank: int) -> of_step.Decoder:
    """A rank's part of a decoder without biases behind sums, as `taxfree.decode_step` takes it."""
    blocks: Sequence[Any] = list(decoder.blocks)
    head, head_dim = local(decoder.head.weight), blocks[0].attention.head_dim

    def layer_of(block: Any) -> of_step.Layer:
        attention, mlp = block.attention, block.mlp
        sizes = [head_dim * heads for heads in attention.heads]
        q, k, v = local(attention.qkv.weight).split(sizes)
        bias = attention.qkv.bias
        biases = (None,) * 3 if bias is None else local(bias).split(sizes)
        norms = [getattr(norm, "weight", None) for norm in (attention.q_norm, attention.k_norm)]
        gate, up = local(mlp.gate_up.weight).chunk(2)
        return of_step.Layer(
            local(block.attention_norm.weight), q, k, v, local(attention.o.weight),
            local(block.mlp_norm.weight), gate, up, local(mlp.down.weight), *biases,
            *(None if norm is None else local(norm) for norm in norms),
        )  # fmt: skip

    exponents = torch.arange(head_dim // 2, device=head.device) * (-2 / head_dim)
    return of_step.Decoder(
        layers=tuple(map(layer_of, blocks)),
        embedding=local(decoder.embedding.weight),
        norm=local(decoder.norm.weight),
        head=head,
        inv_freq=_ROPE_BASE**exponents,
        head_dim=head_dim,
        eps=_EPS,
        vocab_start=rank * len(head),
    )
