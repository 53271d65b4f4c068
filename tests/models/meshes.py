"""Meshes for tests on rank workers."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@cache  # DTensor takes equal meshes for the same one
def new_mesh(device: str = "cpu") -> DeviceMesh:
    """All ranks, as a group of its own: a runtime on the workers' group may be another test's."""
    return DeviceMesh.from_group(dist.new_group(), device)
