"""A decode step in float64, from the parts of all ranks, one sequence and head after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from taxfree_kernels.decode_step.decoder import SCALED, Cache, Decoder, Layer
from taxfree_kernels.fp8 import dequantised

Part = tuple[Decoder, Cache]


def exact_logits(
    parts: Sequence[Part], tokens: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Logits behind tokens [batch] at these positions; float64 [batch, vocabulary].

    Weights in fp8 are what they stand for, and inputs are not quantised.

    Args:
        parts: of each rank. Of the caches only what stands before the positions is read.
    """
    first = parts[0][0]
    x = first.embedding[tokens].double()
    for at, layer in enumerate(first.layers):
        normalised = _normalised(x, layer.input_norm, first.eps)
        x = x + sum(
            torch.stack([
                _attention(decoder, at, cache, normalised[i], i, int(position))
                for i, position in enumerate(positions)
            ])
            for decoder, cache in parts
        )  # fmt: skip
        normalised = _normalised(x, layer.post_norm, first.eps)
        x = x + sum(_mlp(decoder.layers[at], normalised) for decoder, _ in parts)
    normalised = _normalised(x, first.norm, first.eps)
    return torch.cat([normalised @ decoder.head.double().t() for decoder, _ in parts], dim=1)


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _mlp(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (_weight(layer, name).t() for name in ("gate", "up", "down"))
    gate = x @ gate
    return (gate * gate.sigmoid() * (x @ up)) @ down


def _weight(layer: Layer, name: str) -> torch.Tensor:
    weight = getattr(layer, name)
    if not layer.scales:
        return weight.double()
    return dequantised(weight.t(), layer.scales[SCALED.index(name)].t()).t()


def _attention(
    decoder: Decoder, at: int, cache: Cache, x: torch.Tensor, sequence: int, position: int
) -> torch.Tensor:
    layer = decoder.layers[at]
    angles = position * decoder.inv_freq.double()
    turn = torch.polar(torch.full_like(angles, decoder.rope_scale), angles)

    def heads(
        name: str, bias: torch.Tensor | None, norm: torch.Tensor | None, is_turned: bool
    ) -> torch.Tensor:
        y = _weight(layer, name) @ x + (0.0 if bias is None else bias.double())
        y = y.view(-1, decoder.head_dim)
        y = y if norm is None else _normalised(y, norm, decoder.eps)
        if not is_turned:
            return y
        turned = torch.complex(*y.chunk(2, dim=1)) * turn
        return torch.cat((turned.real, turned.imag), dim=1)

    q = heads("q", layer.q_bias, layer.q_norm, True)
    k = heads("k", layer.k_bias, layer.k_norm, True)
    v = heads("v", layer.v_bias, None, False)
    start = 0 if layer.window is None else max(0, position + 1 - layer.window)
    found = []
    for head, query in enumerate(q):
        own = head * len(k) // len(q)
        keys, values = (
            torch.cat((held[at][sequence, own, start:position].double(), new[own][None]))
            for held, new in ((cache.keys, k), (cache.values, v))
        )
        weights = torch.softmax(keys @ query * decoder.head_dim**-0.5, dim=0)
        found.append(weights @ values)
    return _weight(layer, "o") @ torch.cat(found)
