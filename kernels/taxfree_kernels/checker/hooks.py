"""Hooks on the functions of Triton's interpreter that touch memory.

All loads and stores, of pointers and of descriptors, end in a few methods of the one builder
instance. Their signatures differ between Triton's versions behind the arguments used here, and
``atomic_load``, ``atomic_store`` and ``atomic_poll`` exist in the newest only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from taxfree_kernels.checker.clocks import Scope
from taxfree_kernels.checker.watch import Watch
from taxfree_kernels.device.packets import EMPTY
from taxfree_kernels.interpreter import correct_bfloat16, hasten

_SEMANTICS = {
    "ACQUIRE": "acquire",
    "RELEASE": "release",
    "RELAXED": "relaxed",
    "ACQUIRE_RELEASE": "acq_rel",
}
_SCOPES: dict[str, Scope] = {"CTA": "cta", "GPU": "gpu", "SYSTEM": "sys"}


@contextlib.contextmanager
def observed_by(watch: Watch) -> Iterator[None]:
    """Within the context, the interpreter reports every access right before it happens."""
    correct_bfloat16()
    hasten()
    names = [name for name in dir(_Hooks) if name.startswith("create_")]
    installed = _Hooks(watch)
    hooks = {each: getattr(installed, each) for each in names if hasattr(interpreter_builder, each)}
    language = interpreter._patch_lang(observed_by)
    interpreter_builder.__dict__.update(hooks)
    try:
        yield
    finally:
        for name in hooks:
            del interpreter_builder.__dict__[name]
        language.restore()


class _Hooks:
    """Methods that replace the builder's: they report to a watch, then call the builder's own."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._load = interpreter_builder.create_masked_load
        self._store = interpreter_builder.create_masked_store
        self._rmw = interpreter_builder.create_atomic_rmw
        self._cas = interpreter_builder.create_atomic_cas

    def create_masked_load(
        self, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
    ) -> Any:
        self._plain(pointers, mask)
        return self._load(pointers, mask, other, *rest, **named)

    def create_masked_store(
        self, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        for part in self._arriving_together(pointers, mask):
            self._plain(pointers, part, value)
            self._store(pointers, value, part, *rest, **named)

    def create_atomic_rmw(
        self, operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        # Polls add 0.
        writes = operation.name not in ("ADD", "OR", "XOR") or bool(np.any(value.data))
        self._atomic(pointers, mask, sem, scope, writes=writes)
        return self._rmw(operation, pointers, value, mask, sem, scope)

    def create_atomic_cas(
        self, pointers: Any, expected: Any, value: Any, sem: Any, scope: Any
    ) -> Any:
        writes = bool(np.any(expected.data != value.data))
        self._atomic(pointers, None, sem, scope, writes=writes)
        return self._cas(pointers, expected, value, sem, scope)

    def create_atomic_load(self, pointers: Any, mask: Any, sem: Any, scope: Any) -> Any:
        self._atomic(pointers, mask, sem, scope, writes=False)
        return self._load(pointers, mask, None, None, True)

    def create_atomic_store(
        self, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        self._atomic(pointers, mask, sem, scope, reads=False, writes=True)
        return self._store(pointers, value, mask, None)

    def create_atomic_poll(
        self, pointers: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any
    ) -> Any:
        everywhere = TensorHandle(np.ones_like(pointers.data, dtype=bool), tl.int1)
        while True:
            seen = self.create_atomic_load(pointers, everywhere, sem, scope)
            if np.array_equal(seen.data, np.broadcast_to(expected.data, seen.data.shape)):
                return everywhere

    def create_inline_asm(
        self, assembly: str, constraints: str, values: Any, types: list[Any], *rest: Any
    ) -> Any:
        if "griddepcontrol.launch_dependents" in assembly:
            self._watch.on_launch_dependents()
        elif "griddepcontrol.wait" in assembly:
            self._watch.on_gdc_wait()
        return _NoResults(types)

    def _plain(self, pointers: Any, mask: Any, value: Any = None) -> None:
        addresses = _active(pointers, mask)
        if addresses.size:
            writes = value is not None
            empties = writes and bool((value.data == EMPTY.value).all())
            self._watch.on_plain(addresses, _size(pointers), writes=writes, empties=empties)

    def _atomic(
        self, pointers: Any, mask: Any, sem: Any, scope: Any, *, reads: bool = True, writes: bool
    ) -> None:
        addresses = _active(pointers, mask)
        if addresses.size:
            semantics, reach = _SEMANTICS[sem.name], _SCOPES[scope.name]
            size = _size(pointers)
            self._watch.on_atomic(addresses, size, semantics, reach, reads=reads, writes=writes)

    def _arriving_together(self, pointers: Any, mask: Any) -> list[Any]:
        """Masks of the lanes that become visible at once: words may arrive in two parts."""
        addresses = _active(pointers, mask)
        if addresses.size < 2 or not self._watch.holds_words(addresses):
            return [mask]
        shape = pointers.data.shape
        stored = np.broadcast_to(True if mask is None else mask.data, shape)
        first = self._watch.first_of(stored.size).reshape(shape)
        return [
            TensorHandle(np.ascontiguousarray(part), tl.int1)
            for part in (stored & first, stored & ~first)
        ]


class _NoResults:
    """Results of inline assembly, which is there for its effects: zeros."""

    def __init__(self, types: list[Any]) -> None:
        self._types = types

    def get_result(self, index: int) -> Any:
        kind = self._types[index]
        shape = getattr(kind, "shape", ()) or (1,)
        zeros = np.zeros([int(size) for size in shape], interpreter._get_np_dtype(kind))
        return TensorHandle(zeros, kind.scalar)


def _active(pointers: Any, mask: Any) -> np.ndarray:
    """The addresses of active lanes."""
    addresses = pointers.data
    if mask is None:
        return addresses.ravel()
    if mask.data.shape == addresses.shape:
        return addresses[mask.data]
    return addresses[np.broadcast_to(mask.data, addresses.shape)]


def _size(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def program_arguments(function: Any, args: tuple[Any, ...], constants: Any) -> dict[str, Any]:
    """The arguments of a launch as the interpreter gives them to each program."""
    rewritten = function.rewrite()
    constexprs = interpreter.GridExecutor(rewritten, function.arg_names, (1,)).constexprs
    named = inspect.getcallargs(rewritten, *args, **constants)
    return {
        name: value if name in constexprs else interpreter._implicit_cvt(value)
        for name, value in named.items()
    }
