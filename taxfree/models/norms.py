"""RMSNorm in Inductor's graphs, as PyTorch's module and Transformers' models leave it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default
_multiply = _aten.mul.Tensor


@dataclass(frozen=True)
class Norm:
    """An RMSNorm that nothing else looks into.

    Args:
        result: its last node, of the input's dtype.
        weight: [n], of the input's dtype.
        eps: is added to the mean square.
    """

    result: Node
    weight: Node
    eps: float


def norm_behind(node: Node) -> Norm | None:
    """The RMSNorm of a node's last dimension, computed in float32; None if there is none."""
    dtype = node.meta["val"].dtype
    for wide in _users(node, _cast):
        if wide.args[1] is not torch.float32 or len(wide.users) != 2:
            continue
        for square in _users(wide, _aten.pow.Tensor_Scalar, _multiply):
            if square.args[1] not in (2, wide):
                continue
            mean = _only_user(square, _aten.mean.dim)
            shifted = _only_user(mean, _aten.add.Scalar, _aten.add.Tensor)
            inverse = _only_user(shifted, _aten.rsqrt.default)
            scaled = _only_user(inverse, _multiply)
            if (
                mean is None or shifted is None or scaled is None
                or mean.args[1:] not in (([-1], True), ([node.meta["val"].dim() - 1], True))
                or not isinstance(shifted.args[1], float)
                or wide not in scaled.args
            ):  # fmt: skip
                continue
            found = _weighted(scaled, dtype)
            if found is not None:
                return Norm(*found, shifted.args[1])
    return None


def _weighted(scaled: Node, dtype: torch.dtype) -> tuple[Node, Node] | None:
    """The product with the weight, cast to a dtype before or after it; and the weight."""
    cast = _only_user(scaled, _cast)
    product = _only_user(cast or scaled, _multiply)
    result = product if cast is not None else _only_user(product, _cast)
    if product is None or result is None or (cast or result).args[1] is not dtype:
        return None
    factors = [each for each in product.args if each is not (cast or scaled)]
    weight = factors[0] if factors else None
    if isinstance(weight, Node) and weight.target is _cast:
        weight = weight.args[0]
    if not isinstance(weight, Node):
        return None
    value = weight.meta["val"]
    is_one = value.dtype is dtype and value.shape == result.meta["val"].shape[-1:]
    return (result, weight) if is_one else None


def _users(node: Node, *targets: Any) -> Iterator[Node]:
    return (each for each in node.users if each.target in targets)


def _only_user(node: Node | None, *targets: Any) -> Node | None:
    """The user of a node, if there is one alone and it has one of the targets."""
    if node is None or len(node.users) != 1:
        return None
    return next(_users(node, *targets), None)
