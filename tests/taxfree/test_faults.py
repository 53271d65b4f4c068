"""Ranks that die, stop or come late, as real processes: nobody hangs, and everybody is told."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest

from tests.ranks import (
    HEAP_BYTES,
    PYTHON,
    TIMEOUT_S,
    environment,
    gather_dims,
    on_every_fabric,
    our_names,
    processes,
    replies_of_survivors,
    require,
    several,
    start_group,
    wait_until_gone,
    workers_of,
)
from tests.taxfree import fault_tasks

TASKS = fault_tasks.__name__
BOUND = 1.0
ALLOWED = BOUND + 2
#: fabric -> a bound, and how late a rank comes then. On GPUs a bound is counted in polls of one
#: signal; a poll of many words may take three times as long.
LATE = {
    "host": {"bound_s": BOUND, "late_s": 2 * BOUND},
    "cuda": {"bound_s": BOUND / 4, "late_s": BOUND},
}
GATHER, ALL_REDUCE, SCATTER = "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"
DECODE = "flash_decode"
#: two chunks of rows, so that push has four signals to send among three ranks, pull two; rows of
#: sums start at multiples of 16 bytes
FIELDS = {
    GATHER: {"m": 5, "n": 16, "k": 48},
    ALL_REDUCE: {"m": 5, "n": 48, "k": 24},
    SCATTER: {"m": 5, "n": 48, "k": 24},
    DECODE: {"batch": 2, "q_heads": 3, "kv_heads": 1, "head_dim": 16, "kv_len_per_rank": 20},
}
#: name -> operation, variant, what differs from its default config
TRIED = {
    f"{op} {name}": (op, name, {"CHUNKS": 2} if op == GATHER else {})
    for op in (GATHER, ALL_REDUCE, SCATTER)
    for name in our_names(op)
}
TRIED["matmul_all_reduce in place by signals"] = (ALL_REDUCE, "push_in_place", {"LL": False})
# Those that stand for flash_decode's ways to tell peers.
TRIED |= {
    "flash_decode fused": (DECODE, "fused", {"CHUNKS": 3, "ROWS": 2}),
    "flash_decode in words": (DECODE, "fused", {"CHUNKS": 3, "ROWS": 2, "LL": True}),
    "flash_decode persistent": (DECODE, "persistent", {}),
}
PUSH = f"{GATHER} push"
ONE_OF_EACH = (PUSH, f"{ALL_REDUCE} push", f"{SCATTER} push", "flash_decode fused")


def case(tried=PUSH):
    from tests.kernels.tasks import Case

    op, variant, config = TRIED[tried]
    fields = FIELDS[op] | ({"gather_dim": gather_dims(variant)[-1]} if op == GATHER else {})
    return Case(variant, fields, config, op=op)


@contextlib.contextmanager
def ranks_to_lose(fabric):
    require(several(fabric), fabric)  # ranks that share a GPU count the bound more slowly
    found = start_group(several(fabric), fabric)
    pids = processes(found)
    yield found
    found.kill()
    assert wait_until_gone(pids, 60) == []


@pytest.fixture
def group(fabric):
    with ranks_to_lose(fabric) as found:
        yield found


def survive(group, interrupted, kind, phase):
    survivors = range(group.world_size - 1)
    found = replies_of_survivors(
        group, f"{TASKS}:call_with_a_fault", 30, [*survivors],
        case=interrupted, kind=kind, phase=phase, bound_s=BOUND,
    )  # fmt: skip
    assert found.keys() == set(survivors)
    assert all(each["before"] for each in found.values())
    return [found[rank]["calls"] for rank in survivors]


def assert_told(call, world_size):
    _, error, seconds = call
    assert error is not None
    assert seconds < ALLOWED
    assert f"rank {world_size - 1}" in error, error


PHASES = ("before", "during", "after")
DEATHS = [(PUSH, "before"), (PUSH, "after")]
DEATHS += [
    (name, "during") for name in (f"{GATHER} pull", f"{SCATTER} push", "flash_decode in words")
]


class TestARankThatDies:
    def test_is_named_by_all_survivors_within_the_bound(self, group):
        self.die(group, PUSH, "during")

    @pytest.mark.timeout(900)
    def test_is_named_whatever_it_ran(self, sample):
        for tried, phase in sample.of(DEATHS):
            with ranks_to_lose("host") as group:
                self.die(group, tried, phase)

    @pytest.mark.gpu
    @pytest.mark.parametrize("phase", PHASES)
    @pytest.mark.parametrize("fabric", ["cuda"], indirect=True)
    def test_is_named_in_each_phase_on_gpus(self, group, phase):
        self.die(group, PUSH, phase)

    @pytest.mark.soak
    @pytest.mark.parametrize(("tried", "phase"), list(product(TRIED, PHASES)))
    def test_is_named_whatever_it_ran_and_when(self, group, tried, phase):
        self.die(group, tried, phase)

    @staticmethod
    def die(group, tried, phase):
        for calls in survive(group, case(tried), signal.SIGKILL, phase):
            assert_told(calls[-1], group.world_size)
            if phase == "after":  # its part of the first call was done
                assert len(calls) == 2
                assert calls[0][:2] == (True, None)
            else:
                assert len(calls) == 1 or calls[0][0]


class TestARankThatStops:
    @on_every_fabric
    def test_is_named_and_after_it_goes_on_a_reset_helps(self, group):
        for calls in survive(group, case(), signal.SIGSTOP, "during"):
            assert_told(calls[-1], group.world_size)
        os.kill(processes(group)[-1], signal.SIGCONT)
        state, _ = group._connections[-1].recv()
        assert state == "done"
        assert all(group.call(fault_tasks.call_again, 30, case=case()))

    def test_is_killed_with_its_group(self, group):
        from taxfree.errors import WorkerLost

        os.kill(processes(group)[1], signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="did not finish call_again in time"):
            group.call(fault_tasks.call_again, 2, case=case())
        assert not group.is_alive


@on_every_fabric
class TestARankThatIsLate:
    def test_by_less_than_the_bound_changes_nothing(self, ranks, sample):
        for tried in sample.of([name for name in TRIED if name.startswith(GATHER)]):
            found = self.run(ranks, case(tried), late_s=0.5, bound_s=10.0)
            assert {rank[:2] for rank in found} == {(True, None)}, tried
            assert all(rank[3] for rank in found), tried

    @pytest.mark.timeout(900)
    def test_by_more_than_the_bound_is_named_and_a_reset_helps(self, ranks, sample):
        require(ranks.several, ranks.fabric)
        for tried in dict.fromkeys([*ONE_OF_EACH, *sample.of([*TRIED])]):
            found = self.run(ranks, case(tried), **LATE[ranks.fabric])
            for _, error, seconds, _ in found[:-1]:
                assert_told((None, error, seconds), len(found))
            assert all(rank[3] for rank in found), tried

    @pytest.mark.timeout(900)
    def test_whoever_goes_on_is_told_at_the_next_check(self, ranks, sample):
        """Also the late one, which may take signals of later calls for those it waits for."""
        require(ranks.several, ranks.fabric)
        task = f"{TASKS}:call_on_after_the_bound"
        for tried in sample.of([*TRIED]):
            found = ranks.run(ranks.several, task, case=case(tried), **LATE[ranks.fabric])
            for right, _, error in found:
                assert error is not None or all(right), tried
            assert found[0][1] is not None, tried

    @staticmethod
    def run(ranks, late, **times):
        return ranks.run(ranks.several, f"{TASKS}:call_with_a_late_rank", case=late, **times)


def shared_memory():
    """Names of shared memory.

    NCCL's own is left behind by ranks that die while it opens; PostgreSQL is that of other tests.
    """
    others = ("nccl-", "PostgreSQL.")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}


class TestALostController:
    def test_takes_busy_workers_with_it_and_leaves_no_shared_memory(self, tmp_path):
        source = (
            "import pathlib, sys\n"
            "from taxfree_tune.workers.group import WorkerGroup\n"
            f"from {fault_tasks.__name__} import be_busy\n"
            "group = WorkerGroup(2, 'host', 1 << 20, 30.0)\n"
            "print(*(process.pid for process in group._processes), flush=True)\n"
            "group.call(be_busy, 60, folder=pathlib.Path(sys.argv[1]))"
        )
        before = shared_memory()
        controller = subprocess.Popen(
            [PYTHON, "-c", source, str(tmp_path)],
            env=environment(TMPDIR=str(tmp_path)),
            stdout=subprocess.PIPE,
            text=True,
        )
        with controller:
            pids = [int(pid) for pid in controller.stdout.readline().split()]
            while not all((tmp_path / rank).exists() for rank in "01"):
                time.sleep(0.05)
            controller.kill()
        assert len(pids) == 2
        assert wait_until_gone(pids, 60) == []
        assert shared_memory() == before

    def test_that_dies_while_it_starts_them_leaves_none_behind(self, tmp_path):
        source = (
            "import os, taxfree_tune.workers.group as g\n"
            "g.WorkerGroup._replies = lambda *_: (print(*(p.pid for p in seen[0]._processes),"
            " flush=True), os.kill(os.getpid(), 9))\n"
            "start, seen = g.WorkerGroup._start, []\n"
            "g.WorkerGroup._start = lambda self, *rest: (seen.append(self), start(self, *rest))\n"
            "g.WorkerGroup(2, 'host', 1 << 20, 30.0)\n"
        )
        done = subprocess.run(
            [PYTHON, "-c", source],
            env=environment(TMPDIR=str(tmp_path)),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL
        pids = [int(pid) for pid in done.stdout.split()]
        assert len(pids) == 2
        assert wait_until_gone(pids, 30) == []


class TestAGroup:
    """What a group says of a worker that is gone, in whatever phase."""

    def test_says_who_died_how_and_where(self, group):
        from taxfree.errors import WorkerLost

        os.kill(processes(group)[1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"rank 1 died in call_again \(SIGKILL\)") as caught:
            group.call(fault_tasks.call_again, 30, case=case())
        assert caught.value.exit_code == 5
        assert not group.is_alive

    def test_that_cannot_open_its_fabric_says_why_and_is_gone(self):
        from taxfree_tune.workers.group import TaskFailed, WorkerGroup

        with pytest.raises(TaskFailed, match="fabric cuda: ") as caught:
            WorkerGroup(2, "cuda", HEAP_BYTES, TIMEOUT_S)
        assert caught.value.exit_code == 3

    def test_cleans_up_its_folder_however_it_ends(self, group):
        folder = Path(group._folder.name)
        assert folder.is_dir()
        group.kill()
        assert not folder.exists()


class TestTheCommandLine:
    @on_every_fabric
    def test_ends_with_code_5_when_a_rank_is_killed_and_leaves_nothing_behind(
        self, fabric, tmp_path
    ):
        require(2, fabric)
        before = shared_memory()
        bench = ["bench", "--fabric", fabric, "--gpus", "2", "--shapes", "m=5 n=32 k=32"]
        variables = {"TMPDIR": str(tmp_path), "TAXFREE_DB": str(tmp_path / "tuning.sqlite")}
        process = subprocess.Popen(
            [PYTHON, "-m", "taxfree_cli.app", *bench],
            env=environment(**variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            while len(pids := workers_of(process.pid)) < 2:
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(1.0)  # they open the fabric, or measure
            os.kill(pids[1], signal.SIGKILL)
            errors = process.stderr.read()
        assert process.returncode == 5
        assert re.search(r"^error: rank \d died in \w+ \(SIGKILL\)", errors, re.MULTILINE)
        assert "Traceback" not in errors
        assert wait_until_gone(pids, 60) == []
        assert shared_memory() == before
        assert list(tmp_path.glob("taxfree-*")) == []
