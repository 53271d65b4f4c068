"""A rank's part of a decoder, for proofs that know the whole one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from taxfree_kernels.decode_step.decoder import SCALED, Decoder, Layer
from taxfree_kernels.fp8 import quantised_weight

_OF_ROWS = ("q", "k", "v", "gate", "up", "q_bias", "k_bias", "v_bias")


def part_of(whole: Decoder, rank: int, world: int) -> Decoder:
    """A rank's part of a decoder."""

    def of_rows(weight: torch.Tensor) -> torch.Tensor:
        return weight.chunk(world)[rank].contiguous()

    def of_layer(layer: Layer) -> Layer:
        weights = {name: getattr(layer, name) for name in _OF_ROWS}
        parts: dict[str, Any] = {
            name: of_rows(weight) for name, weight in weights.items() if weight is not None
        }
        o, down = (w.chunk(world, 1)[rank].contiguous() for w in (layer.o, layer.down))
        return replace(layer, **parts, o=o, down=down)

    head = of_rows(whole.head)
    layers = tuple(map(of_layer, whole.layers))
    return replace(whole, layers=layers, head=head, vocab_start=rank * len(head))


def in_fp8(part: Decoder, scales: str) -> Decoder:
    """A rank's part with layers in fp8; "none": as it is."""
    if scales == "none":
        return part

    def of_layer(layer: Layer) -> Layer:
        factors = [quantised_weight(getattr(layer, name).t(), scales) for name in SCALED]
        weights: dict[str, Any] = {
            name: values.t() for name, (values, _) in zip(SCALED, factors, strict=True)
        }
        return replace(layer, **weights, scales=tuple(s.t().contiguous() for _, s in factors))

    return replace(part, layers=tuple(map(of_layer, part.layers)))
