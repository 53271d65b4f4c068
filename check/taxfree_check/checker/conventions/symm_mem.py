"""PyTorch's symmetric memory in a world: handles with tables of pointers and signal pads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

from taxfree_check.checker.ranks import Ranks

_MODULE = "torch.distributed._symmetric_memory"
_PAD_WORDS = 2048


class Handle:
    """What ``rendezvous`` returns: a rank's view of one symmetric block of all ranks.

    Attributes:
        buffer_ptrs_dev, signal_pad_ptrs_dev: addresses of tables of pointers, one for each rank.
        buffer_ptrs, signal_pad_ptrs: these pointers.
    """

    def __init__(self, world: Ranks, rank: int, offset: int, size: int) -> None:
        self._world, self.rank, self.world_size = world, rank, world.ranks
        self._offset, self.buffer_size = offset, size
        self.device = torch.device("cpu")
        self.buffer_ptrs = [base + offset for base in world.heap_bases.tolist()]
        pads = world.shared("signal pad", _PAD_WORDS, torch.int32, 0)
        self.signal_pad_size = pads[0].nbytes
        self._pads = pads
        self.signal_pad_ptrs = [pad.data_ptr() for pad in pads]
        self.buffer_ptrs_dev = world.table(rank, self.buffer_ptrs)
        self.signal_pad_ptrs_dev = world.table(rank, self.signal_pad_ptrs)

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """A tensor in a rank's block; `storage_offset` counts elements."""
        return self._world.view(rank, self._offset, sizes, dtype, storage_offset)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        storage_offset: int = 0,
    ) -> torch.Tensor:
        """A rank's signal pad."""
        pad = self._pads[rank].view(dtype or torch.int32)[storage_offset:]
        return pad[: torch.Size(sizes).numel()].view(*sizes) if sizes else pad

    def get_remote_tensor(
        self, peer: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor at the begin of a rank's block."""
        return self.get_buffer(peer, sizes, dtype)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """On this rank's stream: set a word of `dst_rank`, once it is clear, and release it."""
        self._exchange(dst_rank, self.rank, channel, 0, 1, "release")

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """On this rank's stream: acquire the word that `src_rank` sets, and clear it."""
        self._exchange(self.rank, src_rank, channel, 1, 0, "acquire")

    def _exchange(
        self, owner: int, sender: int, channel: int, before: int, after: int, sem: str
    ) -> None:
        word = self._pads[owner][channel * self.world_size + sender]
        self._world.exchange(word, before, after, sem)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """A barrier of all ranks' streams that come by the same channel."""
        self._world.barrier(channel)


def rendezvous(world: Ranks, tensor: torch.Tensor, group: Any = None) -> Handle:
    """The handle of a tensor in symmetric memory."""
    rank, offset, size = world.place_of(tensor)
    return Handle(world, rank, offset, size)


def _workspace(world: Ranks, group_name: str, min_size: int) -> Handle:
    blocks = world.shared("workspace", min_size, torch.uint8, None)
    return rendezvous(world, blocks[world.rank])


def _empty(world: Ranks, *size: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
    kind = dtype or torch.get_default_dtype()
    name = "symmetric memory"
    return world.allocate(world.rank, shape.numel(), kind, name).view(shape)


@contextlib.contextmanager
def patched(world: Ranks) -> Iterator[None]:
    """Within the context, PyTorch's functions serve a world."""
    with contextlib.ExitStack() as stack:
        module = sys.modules.get(_MODULE)
        if module is not None:
            of_module: dict[str, Callable[..., Any]] = {
                "rendezvous": rendezvous,
                "get_symm_mem_workspace": _workspace,
                "empty": _empty,
            }
            for name, function in of_module.items():
                stack.enter_context(mock.patch.object(module, name, partial(function, world)))
        of_group: dict[str, Callable[..., int]] = {
            "get_rank": lambda group=None: world.rank,
            "get_world_size": lambda group=None: world.ranks,
        }
        for name, answer in of_group.items():
            stack.enter_context(mock.patch.object(torch.distributed, name, answer))
        yield
