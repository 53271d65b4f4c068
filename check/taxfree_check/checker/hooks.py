"""Hooks on the functions of Triton's interpreter that touch memory.

All loads and stores, of pointers and of descriptors, end in a few methods of the one builder
instance. Their signatures differ between Triton's versions behind the arguments used here, and
``atomic_load``, ``atomic_store`` and ``atomic_poll`` exist in the newest only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from inspect import signature
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from taxfree_check.checker.clocks import Scope
from taxfree_check.checker.ptx import run_assembly
from taxfree_check.checker.watch import CHANGES, NO_CHANGE, Change, Watch
from taxfree_kernels.device.peers import EMPTY
from taxfree_kernels.interpreter import correct_types, hasten

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
    correct_types()
    hasten()
    names = [name for name in dir(_Hooks) if name.startswith("create_")]
    installed = _Hooks(watch)
    hooks = {name: getattr(installed, name) for name in names if hasattr(interpreter_builder, name)}
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
        arguments = ("ptrs", "mask", "other", "is_volatile")
        policies = [
            parameter
            for parameter in signature(self._load).parameters
            if parameter not in arguments
        ]
        self._no_policies = dict.fromkeys(policies)

    def create_masked_load(
        self, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
    ) -> Any:
        addresses = _active(pointers, mask)
        is_volatile = bool(rest[-1]) if rest else bool(named.get("is_volatile"))
        if is_volatile and addresses.size and not self._watch.holds_words(addresses):
            # in PTX, what a relaxed load at system scope does
            with self._atomic(addresses, _size(pointers), "relaxed", "sys"):
                return self._load(pointers, mask, other, *rest, **named)
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
        name = operation.name

        def change() -> Change:
            if name in ("ADD", "FADD", "OR", "XOR") and not np.any(value.data):
                return NO_CHANGE  # as polls do
            if name != "XCHG":
                return CHANGES
            old = self._seen(pointers, mask).data
            return Change(True, bool(np.any(old != value.data)))

        what = name.encode() + np.ascontiguousarray(value.data).tobytes()
        with self._ordered(pointers, mask, sem, scope, what=what, change=change):
            return self._rmw(operation, pointers, value, mask, sem, scope)

    def create_atomic_cas(
        self, pointers: Any, expected: Any, value: Any, sem: Any, scope: Any
    ) -> Any:
        def change() -> Change:
            before = self._seen(pointers, _everywhere(pointers)).data
            changes = bool(np.any((before == expected.data) & (expected.data != value.data)))
            return Change(changes, changes)

        what = b"CAS" + b"".join(
            np.ascontiguousarray(operand.data).tobytes() for operand in (expected, value)
        )
        with self._ordered(pointers, None, sem, scope, what=what, change=change):
            return self._cas(pointers, expected, value, sem, scope)

    def create_atomic_load(self, pointers: Any, mask: Any, sem: Any, scope: Any) -> Any:
        with self._ordered(pointers, mask, sem, scope):
            return self._seen(pointers, mask)

    def create_atomic_store(
        self, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        self._ordered(pointers, mask, sem, scope, reads=False, change=lambda: CHANGES)
        return self._store(pointers, value, mask, None)

    def create_atomic_poll(
        self, pointers: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any
    ) -> Any:
        everywhere = _everywhere(pointers)
        if isinstance(timeout_ns, TensorHandle):
            matched = self._seen(pointers, everywhere).data == expected.data
            if not matched.all() and self._watch.times_out():
                return TensorHandle(matched, tl.int1)
        while True:
            seen = self.create_atomic_load(pointers, everywhere, sem, scope)
            if np.array_equal(seen.data, np.broadcast_to(expected.data, seen.data.shape)):
                return everywhere

    def create_assume(self, condition: Any) -> None:
        if not np.all(condition.data):
            self._watch.on_false_assumption()

    def create_inline_asm(
        self, assembly: str, constraints: str, values: Any, types: list[Any], *rest: Any
    ) -> Any:
        return run_assembly(self._watch, assembly, constraints, values, types)

    def _seen(self, pointers: Any, mask: Any) -> Any:
        """What memory holds, without a report."""
        return self._load(pointers, mask, None, is_volatile=True, **self._no_policies)

    def _plain(self, pointers: Any, mask: Any, value: Any = None) -> None:
        addresses = _active(pointers, mask)
        if addresses.size:
            writes = value is not None
            empties = writes and bool((value.data == EMPTY.value).all())
            self._watch.on_plain(addresses, _size(pointers), writes=writes, empties=empties)

    def _ordered(
        self, pointers: Any, mask: Any, sem: Any, scope: Any, **named: Any
    ) -> contextlib.AbstractContextManager[None]:
        """The context of an atomic as the interpreter describes it."""
        addresses = _active(pointers, mask)
        if not addresses.size:
            return contextlib.nullcontext()
        size = _size(pointers)
        return self._atomic(addresses, size, _SEMANTICS[sem.name], _SCOPES[scope.name], **named)

    def _atomic(
        self, addresses: np.ndarray, size: int, sem: str, scope: Scope, **named: Any
    ) -> contextlib.AbstractContextManager[None]:
        change = named.pop("change", lambda: NO_CHANGE)
        return self._watch.on_atomic(addresses, size, sem, scope, change=change, **named)

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


def _everywhere(pointers: Any) -> Any:
    return TensorHandle(np.ones_like(pointers.data, dtype=bool), tl.int1)


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
