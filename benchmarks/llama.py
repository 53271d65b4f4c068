"""A model of Llama's shape in plain torch, and its plans for PyTorch's tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from taxfree_kernels.decode_step.decoder import Decoder, Layer

#: keys and values of a layer: [batch, kv_heads, length, head_dim] each
Cache = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, before it is split.

    Args:
        rope_theta: base of the rotary embedding.
        eps: of RMSNorm.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    rope_theta: float = 10000.0
    eps: float = 1e-5


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        outer, inner = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q = nn.Linear(sizes.hidden, outer, bias=False)
        self.k, self.v = (nn.Linear(sizes.hidden, inner, bias=False) for _ in range(2))
        self.o = nn.Linear(outer, sizes.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> Any:
        q, k, v = (
            y.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        keys, values = cache
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        if positions.shape[0] > 1:  # the prompt: nothing came before it
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            seen = torch.arange(keys.shape[2], device=x.device) <= positions
            y = scaled_dot_product_attention(q, keys, values, seen[None], enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.sizes.head_dim // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float64) / half
        angles = positions[:, None] * self.sizes.rope_theta**-steps
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Linear(sizes.hidden, sizes.intermediate, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(silu(self.gate(x)) * self.up(x))


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.attention = _Attention(sizes)
        self.mlp_norm, self.mlp = nn.RMSNorm(sizes.hidden, sizes.eps), _MLP(sizes)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> Any:
        x = x + self.attention(self.attention_norm(x), positions=positions, cache=cache)
        return x + self.mlp(self.mlp_norm(x))


class _Last(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1:]


class Llama(nn.Module):
    """The model: tokens [batch, length] -> logits of the next token, [batch, vocabulary].

    Args:
        sizes: of the whole model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm, self.last = nn.RMSNorm(sizes.hidden, sizes.eps), _Last()
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> Any:
        """Run the tokens at these positions, whose keys and values are put into the cache."""
        x = self.embedding(tokens)
        for block, own in zip(self.blocks, cache, strict=True):
            x = block(x, positions, own)
        return self.head(self.last(self.norm(x)))[:, 0]


def plan(layers: int, is_sequence_parallel: bool, gathers_logits: bool) -> dict[str, Any]:
    """PyTorch's plan; with sequence parallelism norms and residuals have shards of the tokens."""
    tokens = Shard(1) if is_sequence_parallel else Replicate()
    inner: dict[str, Any] = {
        f"{room}.{name}": ColwiseParallel()
        for room, names in (("attention", "qkv"), ("mlp", ("gate", "up")))
        for name in names
    }
    inner |= {name: RowwiseParallel(output_layouts=tokens) for name in ("attention.o", "mlp.down")}
    logits = Replicate() if gathers_logits else Shard(-1)
    outer: dict[str, Any] = {"head": ColwiseParallel(output_layouts=logits)}
    if is_sequence_parallel:
        whole = partial(PrepareModuleInput, use_local_output=True)
        whole = partial(whole, input_layouts=Shard(1), desired_input_layouts=Replicate())
        inner |= {"attention": whole(), "mlp": whole()}
        norm = SequenceParallel(use_local_output=True)
        inner |= {"attention_norm": norm, "mlp_norm": norm}
        own = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        outer |= {"embedding": own, "norm": norm, "last": whole()}
    return {f"blocks.{at}.{name}": each for at in range(layers) for name, each in inner.items()} | (
        outer
    )


def on_meta(sizes: Sizes) -> Llama:
    """A model whose parameters have no memory (meta)."""
    with torch.device("meta"):
        return Llama(sizes).requires_grad_(False)


def parallel(
    sizes: Sizes, mesh: DeviceMesh, is_sequence_parallel: bool = False, gathers_logits: bool = True
) -> Llama:
    """A model on the meta device that PyTorch has parallelised on a mesh.

    Args:
        gathers_logits: otherwise each rank returns its own.
    """
    model = on_meta(sizes)
    parallelize_module(model, mesh, plan(sizes.layers, is_sequence_parallel, gathers_logits))
    return model


def decoder_of(model: Llama, rank: int) -> Decoder:
    """A rank's part of a model, for `taxfree.decode_step`."""
    blocks: Sequence[Any] = list(model.blocks)
    sizes, head = blocks[0].attention.sizes, local(model.head.weight)
    half = sizes.head_dim // 2

    def layer_of(block: Any) -> Layer:
        rooms: dict[Any, Sequence[str]] = {
            block.attention: "qkvo",
            block.mlp: ("gate", "up", "down"),
        }
        linears: dict[str, Any] = {
            name: local(getattr(room, name).weight)
            for room, names in rooms.items()
            for name in names
        }
        norms = block.attention_norm.weight, block.mlp_norm.weight
        return Layer(input_norm=local(norms[0]), post_norm=local(norms[1]), **linears)

    return Decoder(
        layers=tuple(map(layer_of, blocks)),
        embedding=local(model.embedding.weight),
        norm=local(model.norm.weight),
        head=head,
        inv_freq=sizes.rope_theta ** -(torch.arange(half, device=head.device) / half),
        head_dim=sizes.head_dim,
        eps=sizes.eps,
        vocab_start=rank * len(head),
    )


def random_weights(
    model: Llama, device: torch.device, dtype: torch.dtype, ranks: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The parts that some ranks have of each parameter, drawn at random; norms are near one.

    Args:
        model: parallelised.
        ranks: one, or all for whole parameters.
    """
    found = {}
    for at, (name, parameter) in enumerate(model.named_parameters()):
        local: torch.Tensor = parameter
        layout: Any = None
        if isinstance(parameter, DTensor):
            local, layout = parameter.to_local(), parameter.placements[0]
        parts = []
        for rank in ranks if isinstance(layout, Shard) else [-1]:
            generator = torch.Generator(device).manual_seed(1000 * at + 1 + rank)
            values = torch.randn(local.shape, generator=generator, device=device)
            if parameter.dim() == 1:
                values = 1.0 + 0.1 * values
            elif name != "embedding.weight":
                values *= parameter.shape[1] ** -0.5
            parts.append(values.to(dtype))
        found[name] = torch.cat(parts, layout.dim) if isinstance(layout, Shard) else parts[0]
    return found


def take_weights(model: Llama, weights: Mapping[str, torch.Tensor]) -> Llama:
    """Let a model on the meta device use these parts of its parameters; they are not copied."""
    for name, parameter in list(model.named_parameters()):
        own = weights[name]
        if isinstance(parameter, DTensor):
            own = DTensor.from_local(
                own, parameter.device_mesh, parameter.placements, run_check=False
            )
        room, _, short = name.rpartition(".")
        setattr(model.get_submodule(room), short, nn.Parameter(own, requires_grad=False))
    return model
