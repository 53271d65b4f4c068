"""Device functions of integers, evaluated on the host."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime.jit import KernelInterface

_NUMPY = {
    "min": np.minimum,
    "max": np.maximum,
    "tl": types.SimpleNamespace(where=np.where),
}


@functools.cache
def on_host(function: KernelInterface[Any]) -> Callable[..., Any]:
    """A device function as a Python function of integers and NumPy arrays of them.

    The function, and those that it calls, may use arithmetic, min, max and tl.where.
    """
    python: types.FunctionType = function.fn
    names = {
        name: on_host(value) if isinstance(value, KernelInterface) else value
        for name, value in python.__globals__.items()
        if name in python.__code__.co_names
    }
    return types.FunctionType(python.__code__, names | _NUMPY, python.__name__)
