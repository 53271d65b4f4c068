"""The symmetric heap and the pool on it, without ranks."""

from __future__ import annotations

import pytest

from taxfree_kernels.errors import HeapExhausted, PeerTimeout, PlanError


class LoneFabric:
    """As much of a fabric as a pool needs."""

    world_size = 3

    def __init__(self, heap_bytes=1 << 16):
        import torch

        from taxfree_kernels.fabric.heap import SymmetricHeap

        self.heap = SymmetricHeap(torch.zeros(heap_bytes, dtype=torch.uint8))
        self.barriers = 0

    def host_words(self, count):
        import torch

        return torch.zeros(count, dtype=torch.int64)

    def ticks(self, seconds):
        return int(seconds * 1000)

    def barrier(self):
        self.barriers += 1


@pytest.fixture
def fabric():
    return LoneFabric()


@pytest.fixture
def pool(fabric):
    from taxfree_kernels.fabric.heap import Pool

    return Pool(fabric, timeout_s=1.5)


class TestHeap:
    def test_gives_typed_aligned_blocks_in_order(self, fabric):
        import torch

        blocks = [fabric.heap.empty(count, dtype) for count, dtype in
                  [(1, torch.uint8), (3, torch.int64), (100, torch.float16)]]  # fmt: skip
        start = blocks[0].data_ptr()
        assert [block.data_ptr() - start for block in blocks] == [0, 256, 512]
        assert [block.numel() for block in blocks] == [1, 3, 100]
        assert blocks[2].dtype == torch.float16

    def test_can_be_used_to_its_last_byte_and_no_further(self, fabric):
        import torch

        fabric.heap.empty(fabric.heap.free_bytes, torch.uint8)
        assert fabric.heap.free_bytes == 0
        with pytest.raises(HeapExhausted, match="0 bytes left, 256 are needed"):
            fabric.heap.empty(1, torch.uint8)

    def test_exhaustion_is_a_reason_not_to_plan(self):
        assert issubclass(HeapExhausted, PlanError)


class TestPool:
    def test_two_slots_share_what_the_words_leave(self, fabric, pool):
        assert fabric.heap.free_bytes < 2 * 256
        assert pool.slot_bytes % 256 == 0
        words = pool.control.nbytes + pool.ll_packets.nbytes + pool.lamport_words.nbytes
        assert 2 * pool.slot_bytes <= (1 << 16) - words

    @pytest.mark.parametrize("slot_bytes", [0, 1, 1 << 20, (4 << 20) + 300])
    def test_an_arena_for_a_slot_has_it_and_all_words(self, slot_bytes):
        from taxfree_kernels.device.peers import LAMPORT_SLOT_BYTES, LL_SLOT_BYTES
        from taxfree_kernels.fabric.heap import Pool, arena_bytes

        pool = Pool(LoneFabric(arena_bytes(slot_bytes)))
        assert pool.slot_bytes >= slot_bytes
        assert pool.ll_slots(LL_SLOT_BYTES // 8)[1] == LL_SLOT_BYTES // 8
        assert pool.lamport_slots(LAMPORT_SLOT_BYTES // 4)[1] == LAMPORT_SLOT_BYTES // 4

    def test_a_slot_is_typed_and_says_how_far_the_next_is(self, pool):
        import torch

        slot, stride = pool.slots(10, torch.float16)
        assert slot.dtype == torch.float16
        assert slot.numel() == 10
        assert stride * 2 == pool.slot_bytes

    def test_what_does_not_fit_a_slot_is_refused(self, pool):
        import torch

        pool.slots(pool.slot_bytes // 2, torch.float16)
        with pytest.raises(HeapExhausted, match="does not fit a slot"):
            pool.slots(pool.slot_bytes // 2 + 1, torch.float16)
        for slots in (pool.ll_slots, pool.lamport_slots):
            _, slot_words = slots(1)
            with pytest.raises(HeapExhausted, match="do not fit a slot"):
                slots(slot_words + 1)

    def test_a_reset_is_collective_and_sets_every_word(self, fabric, pool):
        from taxfree_kernels.device import peers

        before = fabric.barriers
        pool.control.fill_(99)
        pool.reset(generation=7)
        assert fabric.barriers == before + 2
        words = pool.control.tolist()
        assert words[peers.GENERATION.value] == 7 * peers.ONE_CALL.value
        assert words[peers.LIMIT.value] == 1500
        assert words[peers.ABORT.value] == 0
        assert words[peers.REPORTED.value] == 0
        assert set(words[peers.SIGNALS.value :]) == {7}
        assert words[peers.TURN.value] == 0
        assert set(pool.ll_packets.tolist()) == {7 << 32}
        assert set(pool.lamport_words.tolist()) == {peers.EMPTY.value}

    def test_a_report_raises_until_the_reset(self, pool):
        import torch

        pool.check()
        pool._report.copy_(torch.tensor([1, 2, 3, 4, 0, 6, 5, 0]))
        message = r"rank 2 waited 1.5 s for rank 0 \(program 3, channel 4, generation 6, seen 5\)"
        for _ in range(2):
            with pytest.raises(PeerTimeout, match=message):
                pool.check()
        pool.reset()
        pool.check()
