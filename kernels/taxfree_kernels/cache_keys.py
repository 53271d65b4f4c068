"""Triton's cache finds what another process has compiled, in whatever order."""

from __future__ import annotations

from typing import Any

from triton.runtime import jit


def find_constants_of_callees_first() -> None:
    """Let the key of a kernel not depend on which kernels its process compiled before; idempotent.

    A key covers the constants of all functions that a kernel calls. Triton 3.6, unlike 3.9, takes a
    callee's before it has looked for them, so it misses those of a callee that is new. Then a
    worker compiles anew what the compile screen has compiled, and an engine what a search has.
    """
    finder: Any = getattr(jit, "DependenciesFinder", None)
    update = getattr(finder, "_update_hash", None)
    if update is not None and not hasattr(update, "__wrapped__"):

        def update_hash(self: Any, function: Any) -> None:
            function.cache_key  # noqa: B018  looks for the constants
            update(self, function)

        update_hash.__wrapped__ = update  # type: ignore[attr-defined]
        finder._update_hash = update_hash
