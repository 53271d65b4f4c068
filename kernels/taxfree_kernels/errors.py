"""Errors below the dispatcher.

KernelError
├── FabricUnavailable   the requested fabric cannot serve on this machine
├── PlanError           a variant cannot run this problem with this config
│   └── HeapExhausted   the symmetric heap is too small for it
└── PeerTimeout         a peer did not signal within the bound
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of this package's errors: one line of message, one line of hint.

    Args:
        message: without a trailing full stop.
        hint: what the user can do next; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class FabricUnavailable(KernelError):
    """The requested fabric or hardware is missing."""

    exit_code = 3


class PlanError(KernelError):
    """A variant cannot run this problem with this config."""


class HeapExhausted(PlanError):
    """The symmetric heap is too small for an allocation."""


class PeerTimeout(KernelError):
    """A peer did not signal within the bound; its pool is unusable until it is reset.

    Args:
        is_secondary: this rank aborted because a peer had timed out; the peer's report is closer
            to the cause.
    """

    exit_code = 5

    def __init__(self, message: str, hint: str = "", is_secondary: bool = False) -> None:
        super().__init__(message, hint)
        self.is_secondary = is_secondary
