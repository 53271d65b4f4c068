"""The host fabric: memory that ranks share, the groups it serves, and what it leaves behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.ranks import (
    HEAP_BYTES,
    PYTHON,
    TIMEOUT_S,
    environment,
    is_running,
    processes,
    wait_until_gone,
)

TASKS = "tests.kernels.tasks"
FIELDS = {"m": 5, "n": 16, "k": 12, "gather_dim": 0}


class TestMemory:
    def test_the_layout_is_the_same_on_every_rank(self, ranks):
        found = ranks.run(3, f"{TASKS}:layout")
        assert len({rank["offset"] for rank in found}) == 1
        assert all(rank["same slot"] for rank in found)

    def test_each_rank_sees_every_heap_at_its_base(self, ranks):
        found = ranks.run(3, f"{TASKS}:layout")
        assert [rank["rank"] for rank in found] == [0, 1, 2]
        for rank in found:
            assert rank["seen"] == [[100 * peer + i for i in range(8)] for peer in range(3)]
            assert len(set(rank["bases"])) == 3

    def test_what_a_rank_writes_into_a_peer_stands_there(self, ranks):
        found = ranks.run(3, f"{TASKS}:writes_into_peers")
        assert found == [[10 * source + rank for source in range(3)] for rank in range(3)]

    def test_two_heaps_are_two_memories(self, ranks):
        assert ranks.run(2, f"{TASKS}:two_heaps") == [[[1] * 4, [2] * 4]] * 2

    def test_allocations_are_aligned_and_end_with_the_arena(self, ranks):
        found = ranks.run(2, f"{TASKS}:allocations", sizes=[1, 256, 257, 1000])
        offsets, message, left = found[0]
        assert offsets == [0, 256, 512, 1024]
        assert left == (1 << 14) - 2048
        assert message == (
            f"HeapExhausted: the symmetric heap has {left} bytes left, {left + 256} are needed"
        )
        assert found[1] == found[0]


class TestSubgroups:
    def test_bases_go_by_the_rank_in_the_group(self, ranks):
        from tests.kernels.tasks import Case

        found = ranks.run(4, f"{TASKS}:on_subgroup", members=[[1, 3]], case=Case("push", FIELDS))
        assert found[0] == found[2] == {}
        for group_rank, world_rank in enumerate((1, 3)):
            assert found[world_rank] == {
                "rank": group_rank,
                "world ranks seen": [1, 3],
                "complaints": [],
            }

    def test_groups_of_one_world_do_not_meet(self, ranks):
        from tests.kernels.tasks import Case

        members = [[0, 3], [1, 2]]
        found = ranks.run(4, f"{TASKS}:on_subgroup", members=members, case=Case("pull", FIELDS))
        assert [rank["world ranks seen"] for rank in found] == [[0, 3], [1, 2], [1, 2], [0, 3]]
        assert [rank["complaints"] for rank in found] == [[]] * 4


class TestLeavingNothingBehind:
    def test_heaps_are_anonymous_memory_that_goes_with_its_fabric(self, ranks):
        before = shared_memory()
        for names, more, left in ranks.run(2, f"{TASKS}:heaps_mapped"):
            assert names == {"/memfd:taxfree-heap (deleted)"}
            assert more == 2 * 2
            assert left == 0
        assert shared_memory() == before

    @pytest.mark.parametrize("ending", ["close", "kill"])
    def test_no_process_folder_or_shared_memory_stays(self, ending):
        from taxfree_tune.workers.group import WorkerGroup

        before = shared_memory()
        group = WorkerGroup(2, "host", HEAP_BYTES, TIMEOUT_S)
        pids, folder = processes(group), Path(group._folder.name)
        assert all(is_running(pid) for pid in pids)
        assert folder.is_dir()
        getattr(group, ending)()
        assert wait_until_gone(pids, 60) == []
        assert not folder.exists()
        assert not group.is_alive
        assert shared_memory() == before


class TestChoosing:
    @staticmethod
    def said(name, **variables):
        source = (
            "from taxfree_kernels.fabric.open import choose\n"
            "from taxfree_kernels.errors import FabricUnavailable\n"
            f"try: print(choose({name!r}))\n"
            "except FabricUnavailable as error: print(error.exit_code, error.message, error.hint)"
        )
        done = subprocess.run(
            [PYTHON, "-c", source],
            env=environment(CUDA_VISIBLE_DEVICES="", **variables),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def test_auto_is_the_host_where_there_is_no_gpu(self):
        assert self.said("auto", TRITON_INTERPRET="1") == "host"

    def test_a_fabric_that_cannot_serve_says_why(self):
        assert self.said("host").startswith("3 fabric host: kernels are not interpreted")
        assert self.said("cuda").startswith("3 fabric cuda: ")

    def test_an_unknown_fabric_is_refused_with_the_known_ones(self):
        assert "one of: auto, cuda, rocm, host" in self.said("ring", TRITON_INTERPRET="1")


def shared_memory():
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
