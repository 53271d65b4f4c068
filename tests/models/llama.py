"""A small model of Llama's shape, in plain torch, and its plans for tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS = 64, 32, 64, 4, 1


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        ]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=bias) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention(bias)
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), MLP(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block(bias) for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def plan(is_sequence_parallel: bool) -> dict[str, Any]:
    """PyTorch's plan; with sequence parallelism norms and residuals have shards of the tokens."""
    inner: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
    }
    outer: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    tokens = Shard(1) if is_sequence_parallel else Replicate()
    inner |= {name: RowwiseParallel(output_layouts=tokens) for name in ("attention.o", "mlp.down")}
    if is_sequence_parallel:
        inner |= {
            name: SequenceParallel(use_local_output=True) for name in ("attention_norm", "mlp_norm")
        }
        inner["attention"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        inner |= {f"mlp.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("gate", "up")}
        outer |= {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(use_local_output=True),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    blocks = {f"blocks.{at}.{name}": each for at in range(LAYERS) for name, each in inner.items()}
    return blocks | outer
