"""What ranks tell each other through the host."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from taxfree_kernels.errors import PeerTimeout


def vote(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Every rank's value, indexed by rank; collective.

    Raises:
        PeerTimeout: not all ranks joined within the process group's own timeout.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group)
    except RuntimeError as error:  # each backend says it in its own way
        raise PeerTimeout(
            f"rank {dist.get_rank(group)} waited in vain for its peers: "
            f"{str(error).partition(chr(10))[0]}",
            "all ranks make the same calls in the same order; one may have failed before",
        ) from error
    return values
