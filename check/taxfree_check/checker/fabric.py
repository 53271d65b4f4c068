"""The fabric of a simulation, on which plans are made as on any other, and its group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import torch
import triton.language as tl

from taxfree_check.checker.simulate import Call, ClockSlots, Schedule, ScheduleOutcome, run_schedule
from taxfree_check.groupless import GrouplessFabric
from taxfree_kernels.device import packets, peers
from taxfree_kernels.fabric.base import SideStream, aligned
from taxfree_kernels.fabric.heap import Pool, SymmetricHeap
from taxfree_kernels.hardware import KNOWN

_NEVER = 1 << 62  # ticks
_EMPTIED = tl.constexpr(64)  # so few that several programs empty words of tiny problems


class DeclaredHeap(SymmetricHeap):
    """A heap that declares its blocks.

    Args:
        declare: gets each new block.
    """

    def __init__(self, arena: torch.Tensor, declare: Callable[[torch.Tensor], None]) -> None:
        super().__init__(arena)
        self._declare = declare

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        block = super().empty(count, dtype)
        self._declare(block)
        return block

    @property
    def used_bytes(self) -> int:
        return self._used

    def rewind(self, used: int) -> None:
        """Free all but the first `used` bytes."""
        self._used = used

    def holds(self, block: torch.Tensor) -> bool:
        """Whether a block has not been freed."""
        return self.offset_of(block) < self._used


class SimulatedFabric(GrouplessFabric):
    """One rank of a simulation."""

    name = "simulated"
    has_graphs = False

    def __init__(self, schedule: Schedule, rank: int, arenas: Sequence[torch.Tensor]) -> None:
        self._schedule = schedule
        self.backend = schedule.backend
        self.rank, self.world_size = rank, len(arenas)
        self.device = torch.device("cpu")
        self.hardware = KNOWN["cpu"]
        self.heap_bases = torch.tensor([arena.data_ptr() for arena in arenas])
        self._arenas = arenas
        self.heap = DeclaredHeap(arenas[rank], self._declare_block)
        schedule.declare_argument(rank, "heap_bases", self.heap_bases)

    def _declare_block(self, block: torch.Tensor) -> None:
        size = block.element_size()
        self._schedule.declare(self.rank, block, lambda offset: f"heap block[{offset // size}]")

    def _arena_of(self, peer: int) -> torch.Tensor:
        return self._arenas[peer]

    def side_stream(self) -> SideStream:
        return self._schedule.side_stream(self.rank)

    def host_words(self, count: int) -> torch.Tensor:
        words = torch.zeros(count, dtype=torch.int64)
        self._schedule.declare_argument(self.rank, "host words", words)
        return words

    def ticks(self, seconds: float) -> int:
        """No bound: an endless wait is reported as a deadlock."""
        return _NEVER

    def barrier(self) -> None:
        self._schedule.barrier()


Setup = Callable[[SimulatedFabric], Sequence[Call]]


class Simulation:
    """A group of ranks with pools, to run schedules on.

    Args:
        world_size: ranks.
        slot_bytes: of a payload slot of each rank's pool.
        heap_bytes: of each rank's heap beyond its pool.
    """

    def __init__(self, world_size: int, slot_bytes: int = 4096, heap_bytes: int = 4096) -> None:
        self.world_size = world_size
        self.slot_bytes = aligned(slot_bytes)
        # Whatever fits a slot, as words of half payload.
        self.ll_bytes = 2 * self.slot_bytes
        # Tiles are wider than tiny problems, and all is sent.
        self.lamport_bytes = 4 * self.slot_bytes
        control_bytes = (peers.SIGNALS.value + peers.CHANNELS * world_size) * 8
        slots = 2 * (self.slot_bytes + self.ll_bytes) + 3 * self.lamport_bytes
        size = aligned(control_bytes) + slots + aligned(heap_bytes)
        # side by side, so that which of several conflicts comes first does not depend on addresses
        self.arenas = list(torch.empty(world_size, size, dtype=torch.uint8))

    def run(
        self, setup: Setup, seed: int, *, first_generation: int = 1, backend: str = "cuda",
        co_resident: bool = False,
    ) -> ScheduleOutcome:  # fmt: skip
        """Set up each rank and run a schedule of all ranks' calls.

        Args:
            setup: makes the plans of a rank and returns its calls.
            seed: of the schedule.
            first_generation: of the pools.
            backend: kernels take the branches of this one.
            co_resident: all programs of a launch run at the same time.
        """

        def set_up(schedule: Schedule) -> list[Sequence[Call]]:
            for arena in self.arenas:
                arena.fill_(0xFF)  # NaN in every floating-point type
            fabrics = [SimulatedFabric(schedule, rank, self.arenas) for rank in self._ranks]
            for fabric in fabrics:
                fabric.pool = Pool(fabric, self.slot_bytes, self.ll_bytes, self.lamport_bytes)
                fabric.pool.reset(first_generation - 1)
                self._describe(fabric.pool, schedule)
            return [setup(fabric) for fabric in fabrics]

        with mock.patch.object(packets, "EMPTIED", _EMPTIED):
            return run_schedule(
                set_up, self.world_size, seed, ClockSlots(), co_resident=co_resident,
                backend=backend, first_call=first_generation,
            )  # fmt: skip

    @property
    def _ranks(self) -> range:
        return range(self.world_size)

    def _describe(self, pool: Pool, schedule: Schedule) -> None:
        """Name the words and slots of a pool, and allow races on packets and Lamport words."""
        control_words = schedule.find(pool.control)
        slots = schedule.find(pool.slots(1, torch.uint8)[0])
        assert control_words is not None
        assert slots is not None
        control_words.describe = partial(_control_word, self.world_size)
        size = self.slot_bytes
        slots.describe = lambda offset: f"payload slot {offset // size}, byte {offset % size}"
        for words, name in ((pool.ll_packets, "LL packet"), (pool.lamport_words, "Lamport word")):
            region = schedule.find(words)
            assert region is not None
            region.word_bytes = words.element_size()
            region.describe = partial(_word, name, words.element_size())


def _word(name: str, size: int, offset: int) -> str:
    return f"{name} {offset // size}"


def _control_word(world_size: int, offset: int) -> str:
    """Name a word of a control block."""
    names = {
        peers.GENERATION.value: "generation word",
        peers.LIMIT.value: "bound of waits",
        peers.ABORT.value: "abort word",
        peers.REPORTED.value: "reported word",
        peers.STATUS.value: "address of the report",
    }
    index = offset // 8
    if index < peers.SIGNALS.value:
        return names.get(index, f"control word {index}")
    channel, source = divmod(index - peers.SIGNALS.value, world_size)
    return f"signal word of channel {channel}, source rank {source}"
