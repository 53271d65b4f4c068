"""Errors of executed code."""

from __future__ import annotations

from taxfree_kernels.errors import KernelError


class ExecutionError(KernelError):
    """The executed code does something that no correct kernel does."""


class UnknownInstruction(ExecutionError):
    """The executor does not know an instruction, or a form of it."""


class BadAccess(ExecutionError):
    """An access lies outside of all tensors, or outside of LDS."""


class Hang(ExecutionError):
    """Waves wait for something that does not happen."""
