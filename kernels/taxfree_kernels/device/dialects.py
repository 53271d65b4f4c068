"""What device functions say differently in Triton and in Gluon, whose blocks have layouts.

With these, both kinds of kernels call the same functions of :mod:`taxfree_kernels.device.sync`. In
Triton they add nothing.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._semantic import GluonSemantic


def lanes(count: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """``tl.arange(0, count)``; in Gluon, in a layout of the warps that execute the call."""
    if not isinstance(_semantic, GluonSemantic):
        return tl.arange(0, count, _semantic=_semantic)
    warps = _semantic.num_warps(_generator)
    layout = gl.BlockedLayout([1], [32], [getattr(warps, "value", warps)], [0])
    return gl.arange(0, count, layout, _semantic=_semantic)


def for_each(block: Any, value: Any, _semantic: Any = None) -> Any:
    """`value`, a scalar, for each element of `block`; Gluon of Triton 3.6 does not broadcast it."""
    if not isinstance(_semantic, GluonSemantic) or not block.type.is_block():
        return value
    value = _semantic.to_tensor(value)
    return _semantic.splat(value, block.type.get_block_shapes(), block.type.layout)


lanes.__triton_builtin__ = True  # type: ignore[attr-defined]
for_each.__triton_builtin__ = True  # type: ignore[attr-defined]
