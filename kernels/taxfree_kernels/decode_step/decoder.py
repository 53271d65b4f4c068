"""What a step reads of a model: its weights, where the model holds them, and its cache."""

from dataclasses import dataclass

import torch

#: weights of a layer that may be in fp8, in the order of their scales
SCALED = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class Layer:
    """One rank's part of a decoder layer. Weights are as ``torch.nn.Linear`` has them: [rows, k].

    ``window`` is the number of last positions that attention sees; None: all. Where the seven
    weights are in fp8, ``scales`` are theirs, float32, in the order of ``SCALED``: of each output
    channel, [rows, 1], or of blocks of 128 x 128, [ceil(rows / 128), ceil(k / 128)].
    """

    input_norm: torch.Tensor  # [hidden]
    q: torch.Tensor  # [heads * head_dim, hidden]
    k: torch.Tensor  # [kv_heads * head_dim, hidden]
    v: torch.Tensor  # [kv_heads * head_dim, hidden]
    o: torch.Tensor  # [hidden, heads * head_dim]
    post_norm: torch.Tensor  # [hidden]
    gate: torch.Tensor  # [intermediate, hidden]
    up: torch.Tensor  # [intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim], of Qwen3
    k_norm: torch.Tensor | None = None
    window: int | None = None
    scales: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Decoder:
    """One rank's part of a model.

    ``head`` holds the rank's rows of the vocabulary, from ``vocab_start`` on; ``inv_freq``
    [head_dim / 2], float32, and ``rope_scale`` are rotary's.
    """

    layers: tuple[Layer, ...]
    embedding: torch.Tensor  # [vocab, hidden], whole on every rank
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab of this rank, hidden]
    inv_freq: torch.Tensor
    head_dim: int
    eps: float
    rope_scale: float = 1.0
    vocab_start: int = 0


@dataclass(frozen=True)
class Cache:
    """Keys and values of each layer.

    Dense: [batch, kv_heads, capacity, head_dim], any strides but the last; paged: [pages,
    page_size, kv_heads, head_dim] with ``block_table`` [batch, n].
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    block_table: torch.Tensor | None = None


def weights_of(layer: Layer) -> tuple[torch.Tensor, ...]:
    """Those of ``SCALED``."""
    return tuple(getattr(layer, name) for name in SCALED)


def scales_of(layer: Layer) -> str:
    """Who has a scale in a layer's weights: "channel" or "block"; "none" in 16 bits."""
    if not layer.scales:
        return "none"
    return "channel" if len(layer.scales[0]) == len(layer.q) else "block"
