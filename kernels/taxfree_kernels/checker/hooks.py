"""Hooks on the functions of Triton's interpreter that touch memory.

All loads and stores, of pointers and of descriptors, end in a few methods of the one builder
instance. Their signatures differ between Triton's versions behind the arguments used here, and
``atomic_load``, ``atomic_store`` and ``atomic_poll`` exist in the newest only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import triton.language as tl

from taxfree_kernels.checker.clocks import Scope
from taxfree_kernels.device.packets import EMPTY
from taxfree_kernels.interpreter import correct_bfloat16, hasten

_SEMANTICS = {
    "ACQUIRE": "acquire",
    "RELEASE": "release",
    "RELAXED": "relaxed",
    "ACQUIRE_RELEASE": "acq_rel",
}
_SCOPES: dict[str, Scope] = {"CTA": "cta", "GPU": "gpu", "SYSTEM": "sys"}


class Observer(Protocol):
    """Receives every access right before it happens.

    `addresses`: of active lanes; `size`: bytes per lane; `empties`: it stores only EMPTY.
    """

    def on_plain(
        self, addresses: np.ndarray, size: int, *, writes: bool, empties: bool = False
    ) -> None: ...

    def on_atomic(
        self,
        addresses: np.ndarray,
        size: int,
        sem: str,
        scope: Scope,
        *,
        reads: bool,
        writes: bool,
    ) -> None: ...

    def holds_words(self, addresses: np.ndarray) -> bool: ...

    def first_of(self, count: int) -> np.ndarray: ...

    def on_launch_dependents(self) -> None: ...

    def on_gdc_wait(self) -> None: ...


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Within the context, the interpreter reports accesses to `observer`."""
    from triton.runtime import interpreter

    correct_bfloat16()
    hasten()
    builder = interpreter.interpreter_builder
    hooks = _hooks(interpreter, builder, observer)
    language = interpreter._patch_lang(observed_by)
    builder.__dict__.update(hooks)
    try:
        yield
    finally:
        for name in hooks:
            del builder.__dict__[name]
        language.restore()


def _active(pointers: Any, mask: Any) -> np.ndarray:
    addresses = pointers.data
    if mask is None:
        return addresses.ravel()
    on = mask.data
    if on.shape != addresses.shape:
        on = np.broadcast_to(on, addresses.shape)
    return addresses.ravel() if on.all() else addresses[on]


def _size(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _is_read(operation: Any, value: Any) -> bool:
    """Whether an atomic only reads, as polls do: it adds 0."""
    return operation.name in ("ADD", "OR", "XOR") and not np.any(value.data)


def _hooks(interpreter: Any, builder: Any, observer: Observer) -> dict[str, Callable[..., Any]]:
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def plain(pointers: Any, mask: Any, value: Any = None) -> None:
        addresses = _active(pointers, mask)
        if addresses.size:
            writes = value is not None
            empties = writes and bool((value.data == EMPTY.value).all())
            observer.on_plain(addresses, _size(pointers), writes=writes, empties=empties)

    def atomic(
        pointers: Any, mask: Any, sem: Any, scope: Any, *, reads: bool, writes: bool
    ) -> None:
        addresses = _active(pointers, mask)
        if addresses.size:
            semantics, reach = _SEMANTICS[sem.name], _SCOPES[scope.name]
            size = _size(pointers)
            observer.on_atomic(addresses, size, semantics, reach, reads=reads, writes=writes)

    def create_masked_load(pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        plain(pointers, mask)
        return load(pointers, mask, other, *rest, **named)

    def create_masked_store(pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        for part in arriving_together(pointers, mask):
            plain(pointers, part, value)
            store(pointers, value, part, *rest, **named)

    def arriving_together(pointers: Any, mask: Any) -> list[Any]:
        """Masks of the lanes that become visible at once: words may arrive in two parts."""
        addresses = _active(pointers, mask)
        if addresses.size < 2 or not observer.holds_words(addresses):
            return [mask]
        shape = pointers.data.shape
        stored = np.broadcast_to(True if mask is None else mask.data, shape)
        first = observer.first_of(stored.size).reshape(shape)
        return [
            interpreter.TensorHandle(np.ascontiguousarray(part), tl.int1)
            for part in (stored & first, stored & ~first)
        ]

    def create_atomic_rmw(
        operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        writes = not _is_read(operation, value)
        atomic(pointers, mask, sem, scope, reads=True, writes=writes)
        return rmw(operation, pointers, value, mask, sem, scope)

    def create_atomic_cas(pointers: Any, expected: Any, value: Any, sem: Any, scope: Any) -> Any:
        writes = bool(np.any(expected.data != value.data))
        atomic(pointers, None, sem, scope, reads=True, writes=writes)
        return cas(pointers, expected, value, sem, scope)

    def create_atomic_load(pointers: Any, mask: Any, sem: Any, scope: Any) -> Any:
        atomic(pointers, mask, sem, scope, reads=True, writes=False)
        return load(pointers, mask, None, None, True)

    def create_atomic_store(pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        atomic(pointers, mask, sem, scope, reads=False, writes=True)
        return store(pointers, value, mask, None)

    def create_atomic_poll(
        pointers: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any
    ) -> Any:
        everywhere = interpreter.TensorHandle(np.ones_like(pointers.data, dtype=bool), tl.int1)
        while True:
            seen = create_atomic_load(pointers, everywhere, sem, scope)
            if np.array_equal(seen.data, np.broadcast_to(expected.data, seen.data.shape)):
                return everywhere

    def create_inline_asm(
        assembly: str, constraints: str, values: Any, types: list[Any], *rest: Any
    ) -> Any:
        if "griddepcontrol.launch_dependents" in assembly:
            observer.on_launch_dependents()
        elif "griddepcontrol.wait" in assembly:
            observer.on_gdc_wait()
        return _NoResults(interpreter, types)

    hooks = {name: hook for name, hook in locals().items() if name.startswith("create_")}
    newest_only = {name for name in hooks if not hasattr(type(builder), name)}
    return {name: hook for name, hook in hooks.items() if name not in newest_only}


class _NoResults:
    """Results of inline assembly, which is there for its effects: zeros."""

    def __init__(self, interpreter: Any, types: list[Any]) -> None:
        self._interpreter, self._types = interpreter, types

    def get_result(self, index: int) -> Any:
        kind = self._types[index]
        shape = getattr(kind, "shape", ()) or (1,)
        zeros = np.zeros([int(size) for size in shape], self._interpreter._get_np_dtype(kind))
        return self._interpreter.TensorHandle(zeros, kind.scalar)


def program_arguments(function: Any, args: tuple[Any, ...], constants: Any) -> dict[str, Any]:
    """The arguments of a launch as the interpreter gives them to each program."""
    from triton.runtime import interpreter

    rewritten = function.rewrite()
    constexprs = interpreter.GridExecutor(rewritten, function.arg_names, (1,)).constexprs
    named = inspect.getcallargs(rewritten, *args, **constants)
    return {
        name: value if name in constexprs else interpreter._implicit_cvt(value)
        for name, value in named.items()
    }


def enter_program(program: int, programs: int) -> None:
    """Make the interpreter run as `program` of `programs`."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.grid_idx, builder.grid_dim = (program, 0, 0), (programs, 1, 1)
