"""Counts the work in captured graphs: torch does not list their nodes, the driver does."""

from __future__ import annotations

import ctypes

import torch

_DEVICE_WORK = (0, 1, 2)  # types of graph nodes: kernel, copy, fill


def count_nodes(graph: int) -> int:
    """Nodes of a captured graph that are work for the device.

    Torch does not list a graph's nodes; the driver that it has loaded does.

    Args:
        graph: the address of a `cudaGraph_t` or `hipGraph_t`.
    """
    if torch.version.hip:
        driver, prefix = ctypes.CDLL("libamdhip64.so"), "hip"
    else:
        driver, prefix = ctypes.CDLL("libcuda.so.1"), "cu"
    get_nodes = getattr(driver, f"{prefix}GraphGetNodes")
    get_type = getattr(driver, f"{prefix}GraphNodeGetType")
    count = ctypes.c_size_t()
    _succeed(get_nodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    if count.value == 0:  # a rank without rows has nothing to copy; the driver lists no empty graph
        return 0
    nodes = (ctypes.c_void_p * count.value)()
    _succeed(get_nodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    kind = ctypes.c_int()
    work = 0
    for node in nodes:
        _succeed(get_type(ctypes.c_void_p(node), ctypes.byref(kind)))
        work += kind.value in _DEVICE_WORK
    return work


def _succeed(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver cannot list a graph's nodes: status {status}")
