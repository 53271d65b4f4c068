"""The life of a runtime: opened, closed, opened again, forked; how processes end that have one."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from taxfree.errors import UsageError
from taxfree_kernels.variant import operation, problem_class
from tests.ranks import PYTHON, ROOT, TIMEOUT_S, Ranks, environment
from tests.sample import Sample
from tests.taxfree import runtime_tasks
from tests.taxfree.endings import ENDINGS
from tests.taxfree.test_runtime import problem_of, record_of, tensors_of

PAIRS = list(zip(*[iter(ENDINGS)] * 2, strict=True))
DB = "/nowhere/tuning.sqlite"
HEAP_BYTES = 4 << 20


def run(ranks: Ranks, scenario: str, world_size: int = 2) -> list[Any]:
    return ranks.run(world_size, f"{__name__}:on_rank", scenario=scenario)


def on_rank(fabric: Any, scenario: str) -> Any:
    return globals()[scenario](fabric)


# -- what runs on the ranks --------------------------------------------------------------------


def init(**arguments: Any) -> Any:
    import taxfree

    return taxfree.init(**{"db": DB, "heap_bytes": HEAP_BYTES, "timeout_s": 10} | arguments)


def with_a_record(fabric: Any, group: Any = None) -> tuple[Any, Any]:
    """A runtime that runs a fused variant on the group's heap, and its problem."""
    problem = problem_of(gather_dim=0, world_size=dist.get_world_size(group))
    records = (record_of(fabric, problem),)
    with mock.patch("taxfree._runtime.startup.shipped_records", return_value=records):
        return init(group=group), problem


def is_right(rt: Any, problem: Any, seed: int = 1) -> bool:
    (a, weight, bias), expected = tensors_of(rt._fabric, problem, seed)
    y = rt.all_gather_matmul(a, weight, bias, gather_dim=problem.gather_dim, m=problem.m)
    return torch.equal(y, expected) and rt.choice(problem).variant == "push"


def held() -> tuple[int, int, int, int]:
    """Mapped heaps, KiB of shared memory, open files and threads of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:taxfree-heap")
    status = Path("/proc/self/status").read_text()
    shared = int(status.partition("RssShmem:")[2].split()[0])
    return maps, shared, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def open_and_close(fabric: Any) -> Any:
    rt, problem = with_a_record(fabric)
    right = [is_right(rt, problem)]
    rt.close()
    before = held()
    for _ in range(4):
        rt, _ = with_a_record(fabric)
        open_ = held()
        right.append(is_right(rt, problem))
        rt.close()
        rt.close()
    return all(right), before, open_, held()


def under_settings_of_the_process(fabric: Any) -> list[bool]:
    """Begin under a default device, a default dtype and inference mode; go on without them."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode():
            rt, problem = with_a_record(fabric)
        decode = runtime_tasks.problem_of("flash_decode", head_dim=32)
        rt.prepare([decode])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    rt.reset()
    (q, k, v, kv_lens, *_), expected = runtime_tasks.tensors_of(fabric, decode)
    right = [is_right(rt, problem), torch.equal(rt.flash_decode(q, k, v, kv_lens), expected)]
    rt.close()
    return right


def closed(fabric: Any) -> list[str]:
    rt = init()
    rt.close()
    said = []
    for refused in (rt.check, rt.reset, rt.memory, lambda: rt.prepare([])):
        with pytest.raises(UsageError) as error:
            refused()
        said.append(error.value.message)
    return said


def on_a_mesh(fabric: Any) -> Any:
    """Interleaved calls on the rows, the columns and the whole of a 2 x 2 mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(fabric.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    groups = [mesh.get_group("tensor"), mesh.get_group("data"), None]
    runtimes = [with_a_record(fabric, group) for group in groups]
    right = [is_right(*each, seed) for seed in range(3) for each in runtimes]
    runtimes[0][0].close()
    right += [is_right(*each) for each in runtimes[1:]]
    for rt, _ in runtimes:
        rt.close()
    return [rt.world_size for rt, _ in runtimes], right, held()[0]


def after_its_group(fabric: Any) -> Any:
    """Close a runtime whose group was destroyed; rank 1 does when rank 0 has."""
    group = dist.new_group()
    rt, problem = with_a_record(fabric, group)
    right, before = is_right(rt, problem), held()[0]
    del group
    dist.destroy_process_group(rt._fabric.group)
    begin = time.monotonic()
    for rank in range(fabric.world_size):
        if rank == fabric.rank:
            rt.close()
        dist.barrier()
    return right, before - held()[0], time.monotonic() - begin


def raises_on_one_rank(fabric: Any) -> Any:
    before = held()[0]
    rt, problem = with_a_record(fabric)
    is_right(rt, problem)
    begin = time.monotonic()
    if fabric.rank == 0:
        with pytest.raises(KeyError, match="of the caller"), rt:
            raise KeyError("of the caller")
    dist.barrier()
    if fabric.rank != 0:
        rt._release()
    return time.monotonic() - begin, held()[0] - before


def as_a_block(fabric: Any) -> Any:
    before = held()[0]
    with init() as rt:
        within = held()[0] - before
    with pytest.raises(UsageError, match="is closed"):
        rt.check()
    return within, held()[0] - before


def promised(fabric: Any) -> list[Any]:
    """Each promise, first not made, then by rank 0 alone."""
    found = []
    for name in ("static_weights", "static_cache"):
        for arguments in ({}, {name: fabric.rank == 0}):
            with init(**arguments) as rt:
                found.append(getattr(rt._fabric, name))
    return found


def in_a_fork(fabric: Any) -> Any:
    rt, problem = with_a_record(fabric)
    right = [is_right(rt, problem)]
    (a, weight, bias), _ = tensors_of(rt._fabric, problem)
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        said = []
        for call in (
            lambda: rt.all_gather_matmul(a, weight, bias, gather_dim=0, m=problem.m),
            lambda: torch.ops.taxfree.all_gather_matmul(
                a, weight, bias, 0, problem.m, rt.group_name
            ),
            lambda: rt.prepare([problem]),
            rt.check,
        ):
            try:
                call()
                said.append("no error")
            except UsageError as error:
                said.append(error.message)
        rt.close()
        os.write(theirs, "\n".join(said).encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as pipe:
        said = pipe.read().splitlines()
    status = os.waitpid(process, 0)[1]
    right.append(is_right(rt, problem))
    rt.close()
    return right, status, said, os.getpid()


def gpu_memory(fabric: Any) -> Any:
    """Bytes in use by the driver's count: with a runtime, and after each of some lives."""
    heap_bytes = 256 << 20

    def used() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()
        free, total = torch.cuda.mem_get_info()
        dist.barrier()
        return total - free

    found = []
    for _ in range(4):
        before = used()
        rt = init(heap_bytes=heap_bytes)
        rt.matmul_all_reduce(
            torch.ones(8, 64, dtype=torch.bfloat16, device=fabric.device),
            torch.ones(64, 64, dtype=torch.bfloat16, device=fabric.device),
        )
        rt.check()
        within = used()
        rt.close()
        found.append((within - before, used() - before))
    return heap_bytes, found


# -- tests -------------------------------------------------------------------------------------


class TestClose:
    def test_it_gives_all_back_and_init_takes_no_more_each_time(self, ranks: Ranks) -> None:
        for right, before, open_, after in run(ranks, "open_and_close"):
            assert right
            assert open_[0] == before[0] + 2  # this rank's heap, and its view of the peer's
            assert open_[1] > before[1] + 1024
            assert after[0] == before[0]
            assert after[1] <= before[1] + 64
            assert after[2:] == before[2:]

    @pytest.mark.gpu
    def test_it_gives_the_memory_of_gpus_back(self, started: dict[str, Ranks]) -> None:
        world_size = started["cuda"].few
        for heap_bytes, found in run(started["cuda"], "gpu_memory", world_size):
            assert found[-1][0] >= heap_bytes
            for _, left in found[1:]:  # the first loads kernels and opens the vendor's libraries
                assert left < 8 << 20

    def test_what_holds_in_the_callers_process_leaves_no_mark(self, ranks: Ranks) -> None:
        assert run(ranks, "under_settings_of_the_process") == [[True, True]] * 2

    def test_what_needs_an_open_runtime_is_refused(self, ranks: Ranks) -> None:
        for said in run(ranks, "closed"):
            assert said == ["the runtime is closed"] * 4

    def test_without_its_group_it_waits_for_nobody(self, ranks: Ranks) -> None:
        for right, given_back, seconds in run(ranks, "after_its_group"):
            assert right
            assert given_back == 2
            assert seconds < TIMEOUT_S

    def test_the_end_of_a_block_closes(self, ranks: Ranks) -> None:
        for within, after in run(ranks, "as_a_block"):
            assert within == 2
            assert after == 0

    def test_plans_see_what_their_rank_promises(self, ranks: Ranks) -> None:
        assert run(ranks, "promised") == [[False, True] * 2, [False] * 4]

    def test_an_error_in_a_block_waits_for_nobody(self, ranks: Ranks) -> None:
        for seconds, left in run(ranks, "raises_on_one_rank"):
            assert seconds < TIMEOUT_S
            assert left == 0


class TestGroups:
    def test_groups_of_a_mesh_have_a_runtime_each(self, ranks: Ranks) -> None:
        for sizes, right, mapped in run(ranks, "on_a_mesh", world_size=4):
            assert sizes == [2, 2, 4]
            assert all(right)
            assert mapped == 4  # of the fabric that the worker itself has


class TestForks:
    def test_a_fork_is_refused_and_its_parent_goes_on(self, ranks: Ranks) -> None:
        for right, status, said, pid in run(ranks, "in_a_fork"):
            assert all(right)
            assert status == 0
            assert len(said) == 4
            expected = f"the runtime belongs to process {pid}, of which this one is a fork"
            assert set(said) == {expected}


class TestEndOfTheProcess:
    def test_it_is_clean(self, sample: Sample) -> None:
        endings = [name for pair in sample.one_of(PAIRS) for name in pair]
        variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            [PYTHON, "-m", "tests.taxfree.endings", "1", *endings],
            cwd=ROOT,
            env=environment(**variables),
            capture_output=True,
            text=True,
            check=False,
        )
        clean = [f"{ending}: 1 of 1" for ending in endings]
        assert done.stdout.splitlines() == clean, done.stderr
        assert done.returncode == 0


def test_nothing_that_is_imported_asks_the_default_device():
    script = """
import importlib, pkgutil, torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.bfloat16)
import taxfree, taxfree_kernels
for package in (taxfree, taxfree_kernels):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            importlib.import_module(module.name)
        except ImportError:  # of what is not installed
            pass
"""
    done = subprocess.run(
        [PYTHON, "-c", script],
        env=environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("op", ["attention", "flash_decode"])
def test_inputs_of_a_trial_are_drawn_on_the_cpu(op):
    """An engine that tunes may have another default device."""
    sizes = {"batch": 2, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "world_size": 1}
    rows = {"length": 8, "packed": True} if op == "attention" else {"kv_len_per_rank": 8}
    problem = problem_class(op)(**sizes, **rows)
    torch.set_default_device("meta")
    try:
        drawn = operation(op).make_inputs(problem, 0, 7, torch.device("cpu"), True)
    finally:
        torch.set_default_device(None)
    assert drawn[0].device.type == "cpu"
