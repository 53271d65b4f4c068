"""The operations as torch ops, so that ``torch.compile`` and graph capture see them.

They are registered when this module is imported, which ``taxfree.init`` does. Each takes the name
of a process group, as torch's own fused ops do, and runs on that group's runtime; code that was
compiled runs PyTorch's own collectives when the runtime is closed. The ops signal
peers, so all ranks must make the same calls in the same order. All compile the same graph, and a
pass keeps the order that it has. The ops have no ordered effects: a checkpoint could not compute
them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx.node import has_side_effect
from torch.library import Library

from taxfree._runtime.runtime import requires_grad, running
from taxfree.errors import UsageError
from taxfree_kernels.gradients import Gradients, gather
from taxfree_kernels.signature import Signature, signatures

_library = Library("taxfree", "DEF")


def _process_group(name: Any) -> ProcessGroup:
    return _resolve_process_group(name)


def _register(signature: Signature) -> None:
    """Register an operation, and its overload for code that was compiled.

    There autograd has done its work, whose dispatch takes longer than that of a call's plan.
    """
    name = signature.name
    fake = functools.partial(_fake, signature)
    for overload in (name, f"{name}.compiled"):
        _library.define(f"{overload}({signature.schema}, str group_name) -> Tensor")
        _library.impl(overload, functools.partial(_run, signature), "CompositeExplicitAutograd")
        torch.library.register_fake(f"taxfree::{overload}", fake, lib=_library)
    _library.impl(f"{name}.compiled", torch.library.fallthrough_kernel, "Autograd")
    packet = getattr(torch.ops.taxfree, name)
    for op in (packet.default, packet.compiled):
        has_side_effect(op)  # peers wait for unused calls, too
    if signature.gradient is None:
        _library.impl(name, functools.partial(_without_gradient, name), "Autograd")
    else:
        backward = functools.partial(_backward, signature.gradient)
        keep = functools.partial(_keep, signature.saved)
        torch.library.register_autograd(
            f"taxfree::{name}", backward, setup_context=keep, lib=_library
        )


def _run(signature: Signature, *arguments: Any) -> torch.Tensor:
    runtime = running(arguments[-1])
    if runtime is not None:
        return runtime._run(signature, arguments[:-1])
    if signature.library is None:
        raise UsageError("the runtime is closed", "call taxfree.init() again")
    *values, group_name = arguments
    size = _process_group(group_name).size()
    return signature.library(size, group_name, **signature.named(values))


def _fake(signature: Signature, *arguments: Any) -> torch.Tensor:
    """An output without memory (meta)."""
    if torch.compiler.is_compiling():
        from taxfree.models import inductor  # late: it loads Inductor

        inductor.install()
    *call_arguments, group_name = arguments
    world_size = _process_group(group_name).size()
    named = signature.named(call_arguments)
    rows, *_ = signature.sizes(world_size, **named)
    shape, dtype = signature.shape(world_size, rows, **named), signature.dtype(call_arguments)
    empty: torch.Tensor = call_arguments[0].new_empty(shape, dtype=dtype)
    return empty


def _keep(saved: int, ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    """Save what :attr:`Signature.gradient` reads: the first `saved` arguments, and others."""
    ctx.save_for_backward(*inputs[:saved])
    ctx.arguments = [None if isinstance(tensor, torch.Tensor) else tensor for tensor in inputs]
    group = _process_group(inputs[-1])
    ctx.world_size, ctx.rank = group.size(), group.rank()


def _backward(formula: Callable[..., Gradients], ctx: Any, grad: torch.Tensor) -> Gradients:
    """The gradients of all arguments, None of the last ones."""
    gradients = formula(ctx, grad)
    return *gradients, *[None] * (len(ctx.arguments) - len(gradients))


def _without_gradient(name: str, *arguments: Any) -> Any:
    """Refuse inputs that require gradients, also while code is compiled; else run the op."""
    if requires_grad(*arguments):
        raise UsageError("an input requires a gradient", "call under torch.no_grad()")
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.taxfree, name)(*arguments)


for _signature in signatures().values():
    _register(_signature)


# -- several matmuls after one gather: graphs and backward formulas call it, so it needs none --


def _gather_once(
    a_shard: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    returns_a: bool,
    group_name: str,
) -> list[torch.Tensor]:
    runtime = running(group_name)
    if runtime is not None:
        outs = runtime._all_gather_matmuls(a_shard, weights, biases, returns_a)
        assert outs is not None
        return outs
    world_size = _process_group(group_name).size()
    a = gather(a_shard, 0, len(a_shard) * world_size, world_size, group_name)()
    products = [a @ weight for weight in weights]
    outs = [y if bias is None else y + bias for y, bias in zip(products, biases, strict=True)]
    return [*outs, a] if returns_a else outs


def _fake_gather_once(
    a_shard: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    returns_a: bool,
    group_name: str,
) -> list[torch.Tensor]:
    m = a_shard.shape[0] * _process_group(group_name).size()
    columns = [weight.shape[1] for weight in weights] + [a_shard.shape[1]] * returns_a
    return [a_shard.new_empty(m, n) for n in columns]


_library.define(
    "all_gather_matmuls(Tensor a_shard, Tensor[] weights, Tensor?[] biases, bool returns_a, "
    "str group_name) -> Tensor[]"
)
_library.impl("all_gather_matmuls", _gather_once, "CompositeExplicitAutograd")
torch.library.register_fake("taxfree::all_gather_matmuls", _fake_gather_once, lib=_library)
