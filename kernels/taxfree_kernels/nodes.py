"""Ranks of several nodes: kernels inside each node, the collective library between them.

Rank d * G + l is rank l of node d. What a node's ranks do together is dispatched by the runtime of
these ranks. A rail joins the ranks of one number on all nodes: what goes over it goes in shards, so
that each byte enters a node once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from taxfree_kernels.errors import PeerTimeout, PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import Pool, SymmetricHeap
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config, MatmulProblem, Plan, Sharded, SizeRange, Space, Variant
from taxfree_kernels.vendor import all_gather, all_reduce, multiply_into

_CHUNKS = (1, 2, 4)
_HINT = "see why that one died or is stuck; then start again"
_ROLL_CALL_S = 5.0  # in which ranks of other nodes say that they are there


class NodesFabric(Fabric):
    """A group whose ranks are on several nodes, equally many on each, node by node.

    It has no symmetric heap: no kernel reaches another node's memory.

    Args:
        group: all ranks.
        node: the `taxfree.Runtime` of this node's ranks.
        rail: the ranks with this rank's number on all nodes, in the order of the nodes.
        names: of the nodes.
    """

    name = "nodes"

    def __init__(
        self, group: dist.ProcessGroup, node: Any, rail: dist.ProcessGroup, names: Sequence[str]
    ) -> None:
        inside: Fabric = node._fabric
        self.group, self.rank, self.world_size = group, dist.get_rank(group), group.size()
        self.node, self.rail, self.names = node, rail, tuple(names)
        self.ranks_per_node = inside.world_size
        self.own_node = self.rank // self.ranks_per_node
        self.backend, self.has_graphs, self.device = (
            inside.backend,
            inside.has_graphs,
            inside.device,
        )
        self.hardware = dataclasses.replace(inside.hardware, nodes=len(names))
        self.pool = _NodesPool(self, inside.pool)
        self.device_barrier = _Aligned(self, inside)  # type: ignore[assignment]
        self.static_weights = inside.static_weights
        self.static_cache = inside.static_cache
        self.lost: PeerTimeout | None = None
        self._meet(rail)  # now: no library can set up a group while a graph is captured

    @property
    def heap(self) -> SymmetricHeap:
        raise PlanError("kernels store into memory of one node", "its ranks are on several")

    # -- inside the node, as its runtime dispatches it ----------------------------------------

    def prepare(self, problem: Any, most: int) -> None:
        """Plan calls of a node's ranks for up to so many rows; collective."""
        if self.ranks_per_node > 1:
            self.node.prepare([SizeRange(problem, 1, most)])

    def sum_in_node(self, x: torch.Tensor, weight: torch.Tensor, shard: torch.Tensor) -> None:
        """This rank's rows of the sum of x @ weight over the node; rows beyond x are zero."""
        if self.ranks_per_node == 1:
            multiply_into(shard, x, weight, None)
        else:
            with self._naming_the_node():
                self.node.matmul_reduce_scatter(x, weight, out=shard)

    def gather_in_node(
        self,
        shard: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """The rows of all ranks of the node, times the weight (+ bias)."""
        if self.ranks_per_node == 1:
            multiply_into(out, shard, weight, bias)
        else:
            with self._naming_the_node():
                self.node.all_gather_matmul(shard, weight, bias, out=out)

    def share_in_node(self, gathered: torch.Tensor, shard: torch.Tensor) -> Any:
        """The shards of all ranks of the node, beside what follows; for :meth:`wait_in_node`."""
        return all_gather(gathered, shard, self.node._fabric.group, beside=True)

    def wait_in_node(self, work: Any) -> None:
        """Let what follows wait for what the node's ranks share.

        Raises:
            PeerTimeout: one of them is lost.
        """
        with self._naming_the_node():
            work.wait()

    # -- between nodes ------------------------------------------------------------------------

    def loss(self, error: RuntimeError) -> PeerTimeout | None:
        return self._loss(_said(error)) if _is_of_library(error) else None

    def synchronize(self) -> None:
        """Wait until this rank's device is idle.

        Raises:
            PeerTimeout: it does not become idle: a node is lost, which the message names.
        """
        synchronize = self.node._fabric.synchronize
        if not self.has_graphs:
            return synchronize()
        raised: list[Exception] = []

        def wait() -> None:
            try:
                synchronize()
            except Exception as error:  # the caller's thread raises it
                raised.append(error)

        waiting = threading.Thread(target=wait, daemon=True)  # it may wait for ever
        waiting.start()
        waiting.join(self.pool.timeout_s)
        if waiting.is_alive():
            raise self._loss(f"its device is not idle after {self.pool.timeout_s:g} s")
        if raised:
            raise raised[0]

    def _loss(self, why: str) -> PeerTimeout:
        """What to raise when another node does not come; so do all later calls."""
        absent = [f"node {self.names[node]} {self._ranks_of(node)}" for node in self._absent()]
        who = " and ".join(absent) or "a rank of a node that is still there"
        message = f"rank {self.rank} of node {self.names[self.own_node]} lost {who}: {why}"
        self.lost = PeerTimeout(message, _HINT)
        return self.lost

    def _ranks_of(self, node: int) -> str:
        first, count = node * self.ranks_per_node, self.ranks_per_node
        return f"(rank {first})" if count == 1 else f"(ranks {first} to {first + count - 1})"

    def _absent(self) -> list[int]:
        """The nodes of which no rank says, within some seconds, that it has lost another."""
        store, seconds = dist.distributed_c10d._get_default_store(), _ROLL_CALL_S
        others = [node for node in range(len(self.names)) if node != self.own_node]
        keys = [f"taxfree lost {self.group.group_name} {node}" for node in range(len(self.names))]
        try:
            store.set(keys[self.own_node], "")
        except RuntimeError:  # it went with the node of the first rank
            return others[:1]
        deadline, absent = time.monotonic() + min(seconds, self.pool.timeout_s), []
        for node in others:
            left = timedelta(seconds=max(0.01, deadline - time.monotonic()))
            try:
                store.wait([keys[node]], left)
            except RuntimeError:
                absent.append(node)
        return absent

    @contextlib.contextmanager
    def _naming_the_node(self) -> Iterator[None]:
        node = f"node {self.names[self.own_node]}"
        try:
            yield
        except PeerTimeout as error:
            message = f"in {node}: {error.message}"
            raise PeerTimeout(message, error.hint, error.is_secondary) from error
        except RuntimeError as error:
            if not _is_of_library(error):
                raise
            self.lost = PeerTimeout(
                f"rank {self.rank} lost a rank of its {node}: {_said(error)}", _HINT
            )
            raise self.lost from error

    def ticks(self, seconds: float) -> int:
        return self.node._fabric.ticks(seconds)

    def host_words(self, count: int) -> torch.Tensor:
        return self.node._fabric.host_words(count)

    def keep_memory(self) -> None:
        super().keep_memory()
        self.node._fabric.keep_memory()

    def release(self) -> None:
        if not self._is_closed:
            node = self.node
            try:
                super().release()
            finally:
                node._release()


def _is_of_library(error: RuntimeError) -> bool:
    """Whether a collective has failed: gloo's errors have no class, and not all name it."""
    said = str(error)
    return isinstance(error, dist.DistError) or "gloo" in said or "pair closure" in said


def _said(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


class _NodesPool(Pool):
    """The pool of the node's ranks, which knows of lost nodes, too."""

    def __init__(self, fabric: NodesFabric, inside: Pool) -> None:
        self._fabric, self._inside = fabric, inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def check(self) -> None:
        self._checked(self._inside.check)

    def check_at_rest(self) -> None:
        self._checked(self._inside.check_at_rest)

    def _checked(self, check: Callable[[], None]) -> None:
        fabric = self._fabric
        assert isinstance(fabric, NodesFabric)
        if fabric.lost is not None:
            raise fabric.lost
        with fabric._naming_the_node():
            check()

    def bound_waits(self, timeout_s: float) -> None:
        self._inside.bound_waits(timeout_s)

    def reset(self, generation: int = 0) -> None:
        self._inside.reset(generation)


class _Aligned:
    """An all-reduce, which ends on every rank after it has begun on all: a device barrier."""

    def __init__(self, fabric: NodesFabric, inside: Fabric) -> None:
        self.pool = inside.device_barrier.pool
        self._group, self._word = fabric.group, torch.zeros(1, device=fabric.device)

    def __call__(self) -> None:
        all_reduce(self._word, self._group)


class Rail(Variant):
    """Inside each node by its runtime, between nodes over the rail, in chunks of rows.

    Args:
        plan_class: of the operation's plans, on a :class:`NodesFabric`.
    """

    name = "rail"
    fused = False
    spans_nodes: ClassVar[bool] = True

    def __init__(self, plan_class: type[Plan]) -> None:
        self.plan_class = plan_class  # type: ignore[misc]  # of this one

    def unsupported_reason(self, problem: MatmulProblem, hardware: Hardware) -> str | None:
        if hardware.nodes == 1:
            return "its ranks are on one node"
        if problem.x_dtype != "same":
            return "it takes no fp8 factors"
        if isinstance(problem, Sharded) and problem.shard_dim == 1:
            return "it splits rows"
        if isinstance(problem, Sharded) and problem.m % problem.world_size:
            return "the ranks do not share the rows evenly"
        return None

    def space(self, problem: MatmulProblem, hardware: Hardware) -> Space:
        return {"CHUNKS": _CHUNKS}

    def seed_configs(self, problem: MatmulProblem, hardware: Hardware) -> list[dict[str, Any]]:
        return [{"CHUNKS": chunks} for chunks in _CHUNKS]

    def illegal_reason(
        self, problem: MatmulProblem, hardware: Hardware, config: Config
    ) -> str | None:
        rows = problem.shard_rows if isinstance(problem, Sharded) else problem.m
        return "fewer rows than chunks" if config["CHUNKS"] > rows else None
