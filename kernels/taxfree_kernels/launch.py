"""Launching kernels, with hooks that replace the launch; and the descriptors that kernels take.

Plans launch through :class:`Kernel`. By default it calls Triton's own launcher; the compile screen
records the launch instead, and the happens-before checker runs its programs itself, so that what
is screened and checked is exactly what runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Kernel:
    """A jitted function with everything about its launch that a plan fixes.

    At every launch Triton looks up the compiled kernel by everything it depends on, which takes the
    host several times longer than the launch itself. Here it is cached by the arguments that change
    between calls. On AMD it is not cached, because kernels there also depend on where a tensor's
    memory ends. Each size has its own copy, see :meth:`resized`; copies share compiled kernels.

    Arguments may be tuples, and constants NamedTuples. Triton specialises a kernel on all elements
    of a tuple or on none, so integers without specialisation are separate arguments.

    Args:
        function: the ``triton.jit`` function.
        grid: number of programs; grids are one-dimensional, because the hardware and the
            interpreter order multi-dimensional grids differently.
        constants: its constexpr arguments, by name.
        options: compile options (``num_warps``, ``num_stages``, and target-specific ones).
        last_args: the arguments after those of a call; they are the same in every call.
        static: names of descriptors, of memory that by a promise nobody writes: a kernel may load
            it before the preceding one has ended. Assembly checks allow no other such load.
    """

    function: Any
    grid: int
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    last_args: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    static: tuple[str, ...] = field(default=(), compare=False)
    _runners: dict[tuple[Any, ...], Callable[..., Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _compiled: dict[tuple[Any, ...], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _changed: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        constants = {name: self._constant(value) for name, value in self.constants.items()}
        object.__setattr__(self, "constants", constants)

    def _constant(self, value: Any) -> Any:
        is_compiled = hasattr(self.function, "params")  # interpreted functions have none
        if is_compiled and hasattr(value, "_fields"):
            kind: Any = type(value)
            return _with_constexprs(kind)._make(value)
        return value

    def resized(self, grid: int, last_args: tuple[Any, ...], **constants: Any) -> Kernel:
        """The same kernel for calls of another size; takes microseconds, and rarely compiles.

        Args:
            constants: those that differ.
        """
        other, _ = object.__new__(Kernel), self._generality  # found once for all sizes
        fields = other.__dict__
        fields.update(self.__dict__)
        fields.pop("specialization", None)
        fields["grid"], fields["last_args"], fields["_runners"] = grid, last_args, {}
        if constants:
            changed = {name: self._constant(value) for name, value in constants.items()}
            fields["constants"], fields["_changed"] = {**self.constants, **changed}, constants
        return other

    @cached_property
    def specialization(self) -> tuple[Any, ...]:
        """The cache key of a size: constants and the kinds of integer arguments."""
        last, generality = self.last_args, self._generality
        first = len(generality) - len(last)
        kinds = [
            _integer_kind(value, is_general)
            for arg, is_general in zip(last, generality[first:], strict=False)
            for value in (arg if isinstance(arg, tuple) else (arg,))
            if type(value) is int
        ]
        return (*kinds, *self._changed.values())

    @cached_property
    def _generality(self) -> tuple[bool, ...]:
        """For each argument but constants, whether the kernel is not specialised on it."""
        params = getattr(self.function, "params", ())
        return tuple(param.do_not_specialize for param in params if not param.is_constexpr)

    def __call__(self, *args: Any) -> None:
        launcher = _launcher.get()
        if launcher is not None:
            launcher(self, (*args, *self.last_args))
            return
        kinds = tuple([arg if type(arg) is int else _kind(arg) for arg in args])
        run = self._runners.get(kinds)
        if run is not None:
            run(*args)
            return
        general = [
            _specialised(arg, kind, is_general)
            for arg, kind, is_general in zip(args, kinds, self._generality, strict=False)
        ]
        known = (*general, *self.specialization)
        compiled = self._compiled.get(known)
        if compiled is not None:
            self._runners[kinds] = run = self._runner(compiled, len(args))
            run(*args)
            return
        compiled = self.function[(self.grid,)](
            *args, *self.last_args, **self.constants, **self.options
        )
        if getattr(getattr(compiled, "metadata", None), "target", _OTHER).backend == "cuda":
            rest = self.function.arg_names[len(args) + len(self.last_args) :]
            if self.constants.keys() >= set(rest):  # no argument is left to its default
                self._compiled[known] = compiled
                self._runners[kinds] = self._runner(compiled, len(args))

    def _runner(self, compiled: Any, first: int) -> Callable[..., Any]:
        """A launcher of a compiled kernel, for a fixed number of per-call arguments."""
        rest = self.function.arg_names[first + len(self.last_args) :]
        again = compiled[(self.grid, 1, 1)]
        fixed = (*self.last_args, *[self.constants[name] for name in rest])
        return lambda *args: again(*args, *fixed)


@cache
def _with_constexprs(kind: Any) -> Any:
    """A NamedTuple whose fields read as constexprs, because Triton 3.6 does not convert them.

    Iteration gives the plain values, so that a kernel's constants can be written as JSON.
    """

    def field(index: int) -> property:
        return property(lambda self: tl.constexpr(self[index]))

    fields = {name: field(index) for index, name in enumerate(kind._fields)}
    return type(kind.__name__, (kind,), fields)


_OTHER = GPUTarget("", "", 0)


def _integer_kind(arg: int, is_general: bool) -> int:
    """The specialisation of an integer: its width, and whether it is 1 or divisible by 16."""
    is_wide = arg >= 1 << 31
    if is_general:
        return is_wide
    return is_wide + 2 * (arg == 1) + 4 * (arg % 16 == 0)


def _specialised(arg: Any, kind: Any, is_general: bool) -> Any:
    """The kind of an argument; integers, also in tuples, are replaced by their kinds."""
    if type(arg) is int:
        return _integer_kind(arg, is_general)
    if isinstance(arg, tuple):
        return tuple([_specialised(*pair, is_general) for pair in zip(arg, kind, strict=True)])
    return kind


def _kind(arg: Any) -> Any:
    """The properties of a tensor or descriptor that a kernel is specialised on, on NVIDIA.

    For a tuple, the properties of its elements; integers are returned unchanged, and no float is
    specialised on.
    """
    if type(arg) is float:
        return float
    if hasattr(arg, "block_shape"):  # a descriptor of Triton, or of Gluon
        return arg.base.dtype, *arg.block_shape
    if isinstance(arg, tuple):
        return tuple([element if type(element) is int else _kind(element) for element in arg])
    return None if arg is None else (arg.dtype, arg.data_ptr() % 16 == 0)


def compile_options(backend: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Compile options besides the constants; multiply-add fusion is always set explicitly."""
    if backend == "interpreter":
        return {}
    names = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")
    return {name: config[name] for name in names if name in config} | {"enable_fp_fusion": True}


def pdl_options(config: Mapping[str, Any]) -> dict[str, bool]:
    """Further options of a kernel that waits for the preceding one: whether to launch it early.

    See ``gdc_wait`` in :mod:`taxfree_kernels.device.sync`.
    """
    return {"launch_pdl": True} if config.get("launch_pdl") else {}


def is_compiling() -> bool:
    """Whether kernels are only compiled, so that a plan must not call libraries or its peers."""
    return _launcher.get() is _compile


def copy_between_ranks(target: torch.Tensor, source: torch.Tensor) -> None:
    """Let a copy engine store into a peer's memory, or load from it, on the current stream.

    When kernels are only compiled, nothing is copied, because the signals that order copies do not
    run.
    """
    if not is_compiling():
        target.copy_(source)


class Launcher(Protocol):
    """A replacement of Triton's launcher; gets all arguments, including those that a plan fixes."""

    def __call__(self, kernel: Kernel, args: tuple[Any, ...]) -> None: ...


_launcher: ContextVar[Launcher | None] = ContextVar("taxfree_launcher", default=None)


@contextlib.contextmanager
def launching_through(launcher: Launcher) -> Iterator[None]:
    """Within the context, kernels go to `launcher` instead of the device."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)


def launch_normally(kernel: Kernel, args: tuple[Any, ...]) -> None:
    """Launch with Triton's own launcher, even where it is replaced."""
    Context().run(kernel, *args[: len(args) - len(kernel.last_args)])


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Within the context, kernels are compiled and loaded on this device but not run.

    This keeps a rank from waiting inside a kernel for a peer that is still compiling. Interpreted
    kernels have nothing to compile.
    """
    with launching_through(_compile):
        yield


def _compile(kernel: Kernel, args: tuple[Any, ...]) -> None:
    compiled = kernel.function.warmup(
        *args, grid=(kernel.grid,), **kernel.constants, **kernel.options
    )
    if hasattr(compiled, "_init_handles"):  # loads the binary; raises where it cannot run
        compiled._init_handles()


# -- which Triton compiles: what one version spoils of kernels is refused there, with its reason --

_assumed: ContextVar[str | None] = ContextVar("assumed", default=None)


def is_triton(major: int, minor: int) -> bool:
    """Whether this release of Triton compiles."""
    version = _assumed.get()
    if version is None:
        version = triton.__version__
    return version.split(".")[:2] == [str(major), str(minor)]


@contextlib.contextmanager
def assuming(version: str) -> Iterator[None]:
    """Within the context, legality is that of another Triton, which other processes compile with.

    Args:
        version: such as "3.8.0".
    """
    token = _assumed.set(version)
    try:
        yield
    finally:
        _assumed.reset(token)


# -- descriptors of matrices that Hopper's Tensor Memory Accelerator (TMA) loads ----------------
# Rows have to start at multiples of 16 bytes. Elements beyond the ends of a tensor read as 0.


class OperandDescriptors:
    """Descriptors of an operand that is a different matrix in each call.

    Triton's constructor validates every dimension, which takes several microseconds on the host.
    Here it runs again only when the strides change.
    """

    def __init__(self, describe: Callable[[torch.Tensor], TensorDescriptor]) -> None:
        self._describe = describe
        self._strides: tuple[int, ...] | None = None
        self._last: TensorDescriptor | None = None

    def __call__(self, matrix: torch.Tensor) -> TensorDescriptor:
        if self._last is None or matrix.stride() != self._strides or matrix.data_ptr() % 16:
            descriptor = self._describe(matrix)
            if descriptor.base.data_ptr() == matrix.data_ptr():  # it is no copy
                self._strides = matrix.stride()
                self._last = with_fields(descriptor, base=None)  # the matrix is not held
            return descriptor
        return with_fields(self._last, base=matrix)  # of which the address matters


def with_fields(descriptor: TensorDescriptor, **fields: Any) -> TensorDescriptor:
    """A copy of a valid descriptor with other valid fields; skips the validation."""
    other: TensorDescriptor = object.__new__(type(descriptor))
    other.__dict__ = vars(descriptor) | fields
    return other


class RowDescriptors(OperandDescriptors):
    """Descriptors of a [rows, k] as [slots, sources, rows, k] with one slot and one source.

    Args:
        kind: a class of descriptors, Triton's or Gluon's, with what else its constructor takes.
        fold: see :func:`folded`; 0 for matrices as they are.
    """

    def __init__(
        self, box: list[int], kind: Any = TensorDescriptor, *others: Any, fold: int = 0
    ) -> None:
        self._fold = fold

        def describe(a: torch.Tensor) -> Any:
            a = _aligned(a)
            return kind(a, *self._one_source(a), box, *others)

        super().__init__(describe)

    def __call__(self, matrix: torch.Tensor) -> TensorDescriptor:
        descriptor = super().__call__(matrix)
        if descriptor.shape[-2] != matrix.shape[0]:
            descriptor.shape, descriptor.strides = self._one_source(matrix)
        return descriptor

    def _one_source(self, a: torch.Tensor) -> tuple[list[int], list[int]]:
        shape, strides = [1, 1, *a.shape], [a.numel(), a.numel(), *a.stride()]
        return folded(shape, strides, self._fold) if self._fold else (shape, strides)


def folded(shape: Sequence[int], strides: Sequence[int], fold: int) -> tuple[list[int], list[int]]:
    """Shape and strides of [..., rows, k] as [..., fold, rows, k // fold]: equal parts of rows."""
    width = shape[-1] // fold
    return [*shape[:-2], fold, shape[-2], width], [*strides[:-2], width, *strides[-2:]]


class HeadDescriptors(OperandDescriptors):
    """Descriptors of a [batch, length, heads, head_dim] as [batch, heads, length, head_dim].

    Args:
        kind: a class of descriptors, Triton's or Gluon's, with what else its constructor takes.
    """

    def __init__(self, box: list[int], kind: Any = TensorDescriptor, *others: Any) -> None:
        def describe(tokens: torch.Tensor) -> Any:
            strides = tokens.stride()[:3]
            if tokens.data_ptr() % 16 or any(stride * tokens.itemsize % 16 for stride in strides):
                tokens = tokens.clone(memory_format=torch.contiguous_format)
            heads = tokens.transpose(1, 2)
            return kind(heads, [*heads.shape], [*heads.stride()], box, *others)

        super().__init__(describe)

    def __call__(self, matrix: torch.Tensor) -> TensorDescriptor:
        descriptor = super().__call__(matrix)
        batch, length, heads, head_dim = matrix.shape
        descriptor.shape = [batch, heads, length, head_dim]
        return descriptor


def weight_descriptors(
    sources: int, box: list[int], is_nk: bool, kind: Any = TensorDescriptor, *others: Any
) -> OperandDescriptors:
    """weight [k, n] as [sources, n, columns] when `is_nk`, else as [sources, columns, n].

    Args:
        sources: ranks that have columns of A, hence rows of the weight.
    """

    def describe(weight: torch.Tensor) -> Any:
        rows = _aligned(weight.t() if is_nk else weight)
        pitch, columns, n = rows.stride(0), weight.shape[0] // sources, weight.shape[1]
        if is_nk:
            return kind(rows, [sources, n, columns], [columns, pitch, 1], box, *others)
        return kind(rows, [sources, columns, n], [columns * pitch, pitch, 1], box, *others)

    return OperandDescriptors(describe)


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes; descriptors are of copies of other matrices."""
    return (matrix.data_ptr() | matrix.stride(0) * matrix.itemsize) % 16 == 0


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows start at multiples of 16 bytes: itself, or for odd views a copy."""
    if not is_aligned(matrix):
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix
