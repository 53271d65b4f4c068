"""An emulation whose signals are lost."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from benchmarks import emulate_ranks
from benchmarks.emulate_ranks import TIMEOUT_S, Emulated
from taxfree_kernels.fabric.base import Fabric

__all__ = ["TIMEOUT_S", "emulate"]


@triton.jit
def _lose_signal(peers, channel, peer, GROUP: tl.constexpr, mask=None):
    pass


def emulate(fabric: Fabric, **arguments: Any) -> list[Emulated]:
    """As :func:`benchmarks.emulate_ranks.emulate`, without signals."""
    emulate_ranks._signal_as_another = emulate_ranks._signal_itself = _lose_signal
    return emulate_ranks.emulate(fabric, **arguments)
