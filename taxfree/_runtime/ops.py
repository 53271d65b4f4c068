"""The operations as torch ops, so that ``torch.compile`` and graph capture see them.

They are registered when this module is imported, which ``taxfree.init`` does. Each takes the name
of a process group, as torch's own fused ops do, and runs on that group's runtime. The ops signal
peers, so the compiler must neither drop nor reorder them: they are registered with ordered effects.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.library import Library

from taxfree._runtime import gradients
from taxfree._runtime.runtime import requires_grad, runtime_of
from taxfree._runtime.signatures import SIGNATURES, Signature
from taxfree.errors import UsageError

_library = Library("taxfree", "DEF")


def _register(signature: Signature) -> None:
    name = signature.name
    _library.define(f"{name}({signature.schema}, str group_name) -> Tensor")
    _library.impl(name, functools.partial(_run, signature), "CompositeExplicitAutograd")
    if not gradients.register(name, _library):
        _library.impl(name, functools.partial(_without_gradient, name), "Autograd")
    fake = functools.partial(_fake, signature)
    torch.library.register_fake(f"taxfree::{name}", fake, lib=_library)
    # Imported late because it is slow. Its enum has moved between versions of torch.
    from torch._higher_order_ops import effects

    kinds = getattr(effects, "_EffectType", None) or effects.EffectType
    effects._register_effectful_op(getattr(torch.ops.taxfree, name).default, kinds.ORDERED)


def _run(signature: Signature, *arguments: Any) -> torch.Tensor:
    return runtime_of(arguments[-1])._run(signature, arguments[:-1])


def _fake(signature: Signature, *arguments: Any) -> torch.Tensor:
    """An output without memory (meta)."""
    *given, group_name = arguments
    world_size = runtime_of(group_name).world_size
    rows, *_ = signature.sizes(world_size, *given)
    shape = signature.shape(world_size, rows, *given)
    empty: torch.Tensor = given[0].new_empty(shape)
    return empty


def _without_gradient(name: str, *arguments: Any) -> Any:
    """Refuse inputs that require gradients, also while code is compiled; else run the op."""
    if requires_grad(*arguments):
        raise UsageError("an input requires a gradient", "call under torch.no_grad()")
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.taxfree, name)(*arguments)


for _signature in SIGNATURES:
    _register(_signature)
