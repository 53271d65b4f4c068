"""Groups whose ranks are on several nodes: which ranks are where, and the groups within."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from taxfree._runtime.runtime import Runtime
from taxfree.errors import UsageError
from taxfree_kernels.nodes import NodesFabric

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # another on each node, and after each start
VARIABLE = "TAXFREE_NODE"


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Args:
        node: what all processes of the node have in common, also those in containers.
        name: of the node, for messages.
    """

    node: str
    name: str


def place_here() -> Place:
    """Where this process is; `TAXFREE_NODE` can split a machine, not join two."""
    given, host = os.environ.get(VARIABLE, "").strip(), socket.gethostname()
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = host
    return Place(f"{boot} {given}", given or host)


def names_of(places: Sequence[Place]) -> list[str]:
    """The nodes of a group's ranks, in their order.

    Raises:
        UsageError: nodes have different numbers of ranks, or a node's are not consecutive.
    """
    nodes = list(dict.fromkeys(place.node for place in places))
    ranks = [[r for r, place in enumerate(places) if place.node == node] for node in nodes]
    names = [places[own[0]].name for own in ranks]
    if len({len(own) for own in ranks}) > 1:
        said = ", ".join(f"{name} {len(own)}" for name, own in zip(names, ranks, strict=True))
        raise UsageError(
            f"the group's nodes have different numbers of ranks: {said}",
            "give each node as many ranks, or taxfree the group of each node's ranks: between "
            "nodes, ranks of the same number exchange shards",
        )
    if [rank for own in ranks for rank in own] != list(range(len(places))):
        said = "; ".join(f"{name} {own}" for name, own in zip(names, ranks, strict=True))
        raise UsageError(
            f"the group's ranks are not in the order of its nodes: {said}",
            "number the ranks node by node, as launchers do",
        )
    return names


def nodes_fabric(
    group: dist.ProcessGroup | None,
    names: Sequence[str],
    timeout_s: float,
    open_runtime: Callable[[dist.ProcessGroup], Runtime],
) -> NodesFabric:
    """Open what ranks of several nodes need; collective.

    Args:
        group: all ranks, node by node.
        names: of the nodes.
        timeout_s: of the collectives of a CPU; the library of GPUs has its own.
        open_runtime: opens that of the ranks of a node, on their group.

    Raises:
        UsageError: the groups cannot be made without ranks outside of the group.
    """
    default = dist.distributed_c10d._get_default_group()
    group = group or default
    everyone = dist.get_process_group_ranks(group)
    if default.bound_device_id is not None and len(everyone) < default.size():
        raise UsageError(
            "the default group is bound to a device: NCCL makes groups of it with all ranks",
            "call init_process_group without device_id, or taxfree.init with all ranks",
        )
    count = len(everyone) // len(names)
    backend = dist.get_backend_config(group)
    bound = None if "nccl" in backend else timedelta(seconds=timeout_s)

    is_whole = len(everyone) == default.size()

    def own_of(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """This rank's of some groups of ranks.

        All ranks of the default group make all of them. Within a part of it, ranks make their own:
        PyTorch then names it by how many groups a rank is in, which must be the same on its ranks.
        """
        made = [
            dist.new_group(
                list(ranks), timeout=bound, backend=backend, use_local_synchronization=not is_whole
            )
            for ranks in groups
            if is_whole or dist.get_rank() in ranks
        ]
        others = dist.GroupMember.NON_GROUP_MEMBER
        own: dist.ProcessGroup = next(each for each in made if each is not others)
        return own

    inside = own_of([everyone[first : first + count] for first in range(0, len(everyone), count)])
    rail = own_of([everyone[number::count] for number in range(count)])
    return NodesFabric(group, open_runtime(inside), rail, names)
