"""Layers that PyTorch's tensor parallelism has parallelised run the operations.

``parallelize_module`` shards parameters and leaves two hooks on each module, which lay out its
input and its output. Where those are of ``ColwiseParallel`` or ``RowwiseParallel`` on a linear
layer, its forward is replaced by one that does the work of both hooks and of the matmul in one
call. The hooks and the library's forward remain for calls that the operations do not serve.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import linear

from taxfree._runtime.collectives import vote
from taxfree._runtime.runtime import Runtime, runtime_of
from taxfree._runtime.startup import init
from taxfree.errors import UsageError
from taxfree.models import inductor, report, rows, symm_mem
from taxfree.models.scaled import Fp8Rowwise, is_float8_tensor
from taxfree_kernels.gradients import gradients


def enable(mesh: DeviceMesh, model: torch.nn.Module | None = None) -> Runtime:
    """Run tensor parallelism on taxfree; collective.

    Linear layers that ``parallelize_module`` gave a ``ColwiseParallel`` or ``RowwiseParallel`` run
    the operations, eager and compiled, with gradients. In what ``torch.compile`` compiles from now
    on, so do matmuls beside collectives on the mesh's group, and PyTorch's own fused ops of
    symmetric memory. What the operations do not serve runs the library; :func:`taxfree.report`
    says what and why.

    Args:
        mesh: one dimension, on which models are parallelised.
        model: parallelised; None for all models of this process that are parallelised on the mesh
            by now (after ``gc.freeze()`` they are not found: give the model).

    Returns:
        The runtime of the mesh's group, which is opened if there is none. Close it before
        ``destroy_process_group``.

    Raises:
        UsageError: the mesh has several dimensions, or the model has no layer on it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"{mesh!r} is no DeviceMesh", "give the mesh of parallelize_module")
    if mesh.ndim != 1:
        raise UsageError(
            f"the mesh has {mesh.ndim} dimensions", 'give one of them, as in enable(mesh["tp"])'
        )
    found = [
        (name or type(module).__name__, module)
        for root in (_models() if model is None else [model])
        for name, module in root.named_modules()
        if isinstance(module, torch.nn.Linear) and _is_on(module, mesh)
    ]
    if model is not None and not found:
        raise UsageError(
            "the model has no linear layer on this mesh", "call parallelize_module before enable"
        )
    if not found:
        why = "none was parallelised on the mesh when taxfree.enable was called"
        report.count("all layers", f"library: {why}", 0)
    runtime = runtime_on(mesh)
    sizes = [(name, *module.weight.shape) for name, module in found]
    common = set(sizes).intersection(*vote(mesh.get_group(), sizes))
    for (name, module), size in zip(found, sizes, strict=True):
        reason = None if size in common else "its sizes differ between ranks"
        if mesh.size() == 1:  # DTensor exchanges nothing then
            reason = "there is one rank"
        _replace_forward(name, module, mesh, runtime, reason)
    return runtime


def _models() -> list[torch.nn.Module]:
    """The modules of this process that are in no other module."""
    gc.collect()  # of dropped models, which may refer to themselves
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    modules = [each for each in found if "_modules" in vars(each)]  # not of those being made
    inner = {id(child) for each in modules for child in each._modules.values()}
    return [each for each in modules if id(each) not in inner]


def runtime_on(mesh: DeviceMesh) -> Runtime:
    """The runtime of a mesh's group, opened if there is none, for compiled code too; collective."""
    group = mesh.get_group()
    try:
        runtime = runtime_of(group.group_name)
    except UsageError:
        runtime = init(group)
    report.include(runtime)
    inductor.enable(runtime)
    symm_mem.enable(runtime)
    return runtime


def _is_on(module: torch.nn.Module, mesh: DeviceMesh) -> bool:
    """Whether a module's weight is sharded on a mesh, by FSDP also on other ones."""
    weight = module._parameters.get("weight")
    if not isinstance(weight, DTensor):
        return False
    whole = weight.device_mesh
    return mesh in (whole, *(whole[name] for name in whole.mesh_dim_names or ()))


def _replace_forward(
    name: str, module: torch.nn.Linear, mesh: DeviceMesh, runtime: Runtime, reason: str | None
) -> None:
    """Let a layer run the operations; the library if there is a reason."""
    enabled = getattr(module.forward, "__self__", None)
    if isinstance(enabled, _Layer):
        enabled.runtime = runtime  # that of before may have been closed
        return
    before, behind = module._forward_pre_hooks, module._forward_hooks
    for key in [key for key, hook in before.items() if isinstance(hook, _OfLibrary)]:
        del before[key]  # the reason may be gone
    prepare, finish = _style_hook(before, "input_fn"), _style_hook(behind, "output_fn")
    style = None if prepare is None else _STYLES.get(prepare[1].func)
    if reason is not None:
        pass
    elif style is None or prepare is None or finish is None:
        reason = "the style is neither ColwiseParallel nor RowwiseParallel"
    elif module.weight.shape[style.weight_dim] % mesh.size():
        features = module.weight.shape[style.weight_dim]
        reason = f"{features} features are not divisible by {mesh.size()} ranks"
    elif next(reversed(before)) != prepare[0] or next(iter(behind)) != finish[0]:
        reason = "it has hooks between those of its style"
    else:
        reason = rows.linear_unsupported_reason(module)
        if reason is None:
            del before[prepare[0]], behind[finish[0]]
            layer = style(name, module, mesh, runtime, module.forward, prepare[1], finish[1])
            module.forward = layer.forward  # type: ignore[method-assign,assignment]
            return
    module.register_forward_pre_hook(_OfLibrary(name, f"library: {reason}"), prepend=True)


@dataclass(frozen=True)
class _OfLibrary:
    """A hook of a layer that always runs the library: it counts calls."""

    name: str
    ran: str

    def __post_init__(self) -> None:
        report.count(self.name, self.ran, 0)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _count(self) -> None:
        """Without a guard of the name in compiled code, which equal layers share."""
        report.count(self.name, self.ran)

    def __call__(self, *_: Any) -> None:
        self._count()


def _style_hook(hooks: Mapping[int, Any], name: str) -> tuple[int, functools.partial[Any]] | None:
    """A hook that `distribute_module` registered: its key, and the style's function in it."""
    for key, hook in hooks.items():
        if inspect.isfunction(hook):
            function = inspect.getclosurevars(hook).nonlocals.get(name)
            if isinstance(function, functools.partial):
                return key, function
    return None


@dataclass(eq=False)
class _Layer:
    """A linear layer of which each rank has a shard.

    Args:
        name: in the model.
        module: the layer.
        mesh: the ranks.
        runtime: theirs.
        library: the forward that it had.
        prepare: lays out the input for it.
        finish: lays out the output.
    """

    name: str
    module: torch.nn.Linear
    mesh: DeviceMesh
    runtime: Runtime
    library: Callable[..., Any]
    prepare: functools.partial[Any]
    finish: functools.partial[Any]

    weight_dim = 0  # in which the weight, [n, k], is sharded

    def forward(self, x: Any) -> Any:
        """The layer's output; each style's code is its own, with sizes that are alike."""
        raise NotImplementedError

    def _forward(self, x: Any) -> Any:
        """The layer's output, laid out as its style says."""
        reason = self._unsupported_reason(x)
        is_left = torch.compiler.is_compiling() and self._exchanges_shards(x)
        if reason is not None or is_left:
            self._count("compiled" if reason is None else f"library: {reason}")
            y = self.library(self.prepare(self.module, (x,), self.mesh))
            return self.finish(self.module, y, self.mesh)
        y, made, ran = self._run(x, self._layout(x))
        self._count(ran)
        wanted, is_local = self.finish.args
        if is_local and _normal(wanted[0], y.dim()) == made:
            return y
        y = DTensor.from_local(y, self.mesh, (made,), run_check=False)
        return self.finish(self.module, y, self.mesh)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _count(self, ran: str) -> None:
        """Without a guard of the name in compiled code, which equal layers share."""
        report.count(self.name, ran)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        """That of a copy of the model, on the same ranks."""
        module, library = copy.deepcopy((self.module, self.library), memo)
        return dataclasses.replace(self, module=module, library=library)

    def _run(self, x: Any, layout: Any) -> tuple[torch.Tensor, Any, str]:
        """The local result, its layout, and the operation that made it."""
        raise NotImplementedError

    def _exchanges_shards(self, x: Any) -> bool:
        """Whether rows are gathered or scattered.

        In compiled code these sequences stay PyTorch's until the compile pass: the compiler joins
        equal gathers, keeps gathered rows for the backward, and moves what is independent between
        the start of a collective and its end.
        """
        raise NotImplementedError

    def _unsupported_reason(self, x: Any) -> str | None:
        """The reason why the library must run, or None."""
        if self.runtime.is_closed:
            return "the runtime is closed"
        weight = self.module.weight
        if not isinstance(weight, DTensor) or weight.placements != (Shard(self.weight_dim),):
            return "the weight is not sharded as its style says"
        if isinstance(x, DTensor) and x.device_mesh != self.mesh:
            return "the input is on another mesh"
        local = x._local_tensor if isinstance(x, DTensor) else x
        reason = self._types_unsupported_reason(local, weight._local_tensor)
        return self._layout_unsupported_reason(x, self._layout(x)) if reason is None else reason

    def _types_unsupported_reason(self, x: torch.Tensor, weight: torch.Tensor) -> str | None:
        return rows.layer_unsupported_reason(x, weight, self.module.bias)

    def _layout_unsupported_reason(self, x: Any, layout: Any) -> str | None:
        raise NotImplementedError

    def _layout(self, x: Any) -> Any:
        """The input's layout: its own, or the one that the style says."""
        (layout,) = x.placements if isinstance(x, DTensor) else self.prepare.args[0]
        return _normal(layout, x.dim())

    def _weight(self) -> torch.Tensor:
        """[k, n], this rank's."""
        weight: Any = self.module.weight
        local: torch.Tensor = weight.to_local()
        return local.t()


class _Colwise(_Layer):
    """Output features are sharded: rows are gathered, if they are sharded."""

    def forward(self, x: Any) -> Any:
        return self._forward(x)

    def _layout_unsupported_reason(self, x: Any, layout: Any) -> str | None:
        if isinstance(layout, Replicate):
            return None
        if not isinstance(layout, Shard):
            return f"the input is {layout}"
        if isinstance(x, DTensor) and x.shape[layout.dim] % self.mesh.size():
            return f"{x.shape[layout.dim]} rows are not divisible by {self.mesh.size()} ranks"
        is_kept = torch.is_grad_enabled() and self.module.weight.requires_grad
        if layout.dim == x.dim() - 1 and is_kept:
            return "columns are gathered, which the gradient of the weight needs again"
        return None

    def _exchanges_shards(self, x: Any) -> bool:
        return isinstance(self._layout(x), Shard)

    def _run(self, x: Any, layout: Any) -> tuple[torch.Tensor, Any, str]:
        weight, bias = self._weight(), self.module.bias
        local = bias.to_local() if isinstance(bias, DTensor) else None
        made = Shard(x.dim() - 1)
        if isinstance(layout, Shard):
            y = rows.all_gather_matmul(self.runtime, _local(x), weight, local, layout.dim)
            return y, made, "all_gather_matmul"
        if isinstance(x, DTensor):  # PyTorch adds up its gradient, once for all layers that use it
            x = x.to_local(grad_placements=[Partial()])
        elif torch.is_grad_enabled() and x.requires_grad:
            y = _replicated(x.flatten(0, -2), weight, self.runtime.group_name)
            y = y.view(*x.shape[:-1], y.shape[1])
            return y if local is None else y + local, made, "matmul; backward matmul_all_reduce"
        return linear(x, weight.t(), local), made, "matmul"


class _Rowwise(_Layer):
    """Input features are sharded: partial sums are added, and scattered if the style says so."""

    weight_dim = 1

    def forward(self, x: Any) -> Any:
        return self._forward(x)

    def _types_unsupported_reason(self, x: torch.Tensor, weight: torch.Tensor) -> str | None:
        if not is_float8_tensor(weight) or torch.compiler.is_compiling():
            return super()._types_unsupported_reason(x, weight)
        if not isinstance(self.finish.args[0][0], Replicate):
            return "the weight is in fp8, and the sum is scattered"
        layer = Fp8Rowwise(self.module, self.runtime)
        return layer.unsupported_reason or layer.call_unsupported_reason(x)

    def _layout_unsupported_reason(self, x: Any, layout: Any) -> str | None:
        if layout != Shard(x.dim() - 1):
            return f"the input is {layout}"
        wanted = _normal(self.finish.args[0][0], x.dim())
        if isinstance(wanted, Replicate):
            return None
        if not isinstance(wanted, Shard) or wanted.dim == x.dim() - 1:
            return f"the output is {wanted}"
        if x.shape[wanted.dim] % self.mesh.size():
            return f"{x.shape[wanted.dim]} rows are not divisible by {self.mesh.size()} ranks"
        return None

    def _exchanges_shards(self, x: Any) -> bool:
        return isinstance(self.finish.args[0][0], Shard)

    def _run(self, x: Any, layout: Any) -> tuple[torch.Tensor, Any, str]:
        weight, bias = self._weight(), self.module.bias
        x, wanted = _local(x), _normal(self.finish.args[0][0], x.dim())
        if is_float8_tensor(self.module.weight._local_tensor):  # type: ignore[attr-defined]
            return Fp8Rowwise(self.module, self.runtime)(x), wanted, "matmul_all_reduce"
        if isinstance(wanted, Replicate):
            local = bias.to_local() if isinstance(bias, DTensor) else None
            y = rows.matmul_all_reduce(self.runtime, x, weight, local)
            return y, wanted, "matmul_all_reduce"
        y = rows.matmul_reduce_scatter(self.runtime, x, weight, wanted.dim)
        if isinstance(bias, DTensor):  # each rank adds it to its own rows
            y = y + bias.to_local(grad_placements=[Partial()])
        return y, wanted, "matmul_reduce_scatter"


_STYLES: dict[Any, type[_Layer]] = {
    ColwiseParallel._prepare_input_fn: _Colwise,
    RowwiseParallel._prepare_input_fn: _Rowwise,
}


def _normal(layout: Any, dims: int) -> Any:
    """A layout with its dimension counted from the front, as a constant in compiled code."""
    if not isinstance(layout, Shard):
        return layout
    return [Shard(dim) for dim in range(dims)][layout.dim]


def _local(x: Any) -> torch.Tensor:
    """This rank's part of an input."""
    local: torch.Tensor = x.to_local() if isinstance(x, DTensor) else x
    return local


def _replicated(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    y: torch.Tensor = _Replicated.apply(x, weight, group_name)  # type: ignore[no-untyped-call]
    return y


class _Replicated(torch.autograd.Function):
    """x @ weight for an x that all ranks have; the gradient of x is a matmul + all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group_name = group_name
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors

        def of_input() -> Any:
            operation = torch.ops.taxfree.layer_matmul_all_reduce
            return operation(grad, weight.t(), None, None, ctx.group_name)

        return *gradients(ctx.needs_input_grad, grad, of_input, lambda: x.t() @ grad), None
