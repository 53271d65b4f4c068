"""This process's place among those that a launcher has started: torchrun, srun, or Kubernetes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from taxfree.errors import UsageError

_STEP_TASKS, _TASKS_PER_NODE = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"


@dataclass(frozen=True)
class LaunchedProcess:
    """This process among those of a launcher; by default one that was started alone.

    Where a launcher starts several processes on a node, each is a rank of the node's group. One
    process on a node is no rank: it starts its ranks itself.

    Args:
        node, nodes: number of this node, and of all nodes.
        local_rank, local_ranks: of this process on its node, and their number there.
    """

    node: int = 0
    nodes: int = 1
    local_rank: int = 0
    local_ranks: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.node < self.nodes and 0 <= self.local_rank < self.local_ranks):
            raise UsageError(
                f"the launcher's variables contradict each other: node {self.node} of {self.nodes},"
                f" rank {self.local_rank} of {self.local_ranks} on it",
                "unset RANK and LOCAL_RANK to run without a launcher",
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LaunchedProcess:
        """Read the variables: those of torchrun, else of a job step of Slurm, else of a pod.

        Raises:
            UsageError: one is missing, or makes no sense.
        """
        if "LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" in environ:
            return cls._of_ranks(environ)
        if environ.get(_STEP_TASKS, "1") != "1":
            return cls._of_slurm(environ)
        if "LOCAL_RANK" in environ and environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                "LOCAL_RANK is set, and LOCAL_WORLD_SIZE is not",
                "export LOCAL_WORLD_SIZE, the number of processes on this node, as torchrun does",
            )
        if "RANK" in environ and "WORLD_SIZE" in environ:  # a process, such as a pod, per node
            return cls(_number(environ, "RANK"), _number(environ, "WORLD_SIZE"))
        return cls()

    @classmethod
    def _of_ranks(cls, environ: Mapping[str, str]) -> LaunchedProcess:
        ranks = _number(environ, "LOCAL_WORLD_SIZE")
        if "GROUP_RANK" in environ and "GROUP_WORLD_SIZE" in environ:
            node, nodes = _number(environ, "GROUP_RANK"), _number(environ, "GROUP_WORLD_SIZE")
        else:
            node = _number(environ, "RANK") // max(1, ranks)
            nodes = _number(environ, "WORLD_SIZE") // max(1, ranks)
        return cls(node, nodes, _number(environ, "LOCAL_RANK"), ranks)

    @classmethod
    def _of_slurm(cls, environ: Mapping[str, str]) -> LaunchedProcess:
        tasks: list[int] = []
        text = environ.get(_TASKS_PER_NODE, "")
        for part in text.split(","):  # 8(x3),4: three nodes with eight tasks, one with four
            match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
            if match is None:
                raise UsageError(
                    f"{_TASKS_PER_NODE}={text} makes no sense", "srun sets it: 8(x2), for example"
                )
            tasks += [int(match[1])] * int(match[2] or 1)
        node = _number(environ, "SLURM_NODEID")
        ranks = tasks[node] if node < len(tasks) else 0
        return cls(node, len(tasks), _number(environ, "SLURM_LOCALID"), ranks)

    @property
    def name(self) -> str:
        """For messages; empty for the first process of the first node, which prints results."""
        parts = [f"node {self.node}"] if self.node else []
        return ", ".join([*parts, f"rank {self.local_rank}"] if self.local_rank else parts)


def too_many(ranks: int, there: int, nodes: int) -> tuple[str, str]:
    """Message and hint where a group would have more ranks than there are on a node."""
    if nodes > 1:
        return (
            f"a group of {ranks} ranks would span nodes: this one has {there}",
            f"--gpus {there}: each node tunes for its own group, as kernels store into the memory "
            "of GPUs of one node",
        )
    return (
        f"{ranks} ranks are asked for, the launcher started {there}",
        f"--gpus {there}, or let the launcher start {ranks}: torchrun --nproc-per-node {ranks}",
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name}={text} is no number", f"the launcher sets {name}")
    return int(text)
