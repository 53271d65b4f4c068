"""Programs of a launcher: the command runs them as they are on a world's ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from taxfree_cli.app import run

MAIN = f"{Path(__file__).with_name('program_example.py')}::main"


@pytest.fixture(autouse=True)
def _without_the_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "iris"]:
        monkeypatch.delitem(sys.modules, name)


def check(capfd: pytest.CaptureFixture[str], arguments: str) -> tuple[int, str, str]:
    code = run(["check", MAIN, "--ranks", "2", "--seeds", "5", "--program", arguments])
    return code, *capfd.readouterr()


def test_a_right_program_passes_and_leaves_nothing_behind(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = dict(os.environ), list(sys.argv)
    code, out, err = check(capfd, "--size 48")
    assert code == 0, err
    assert "right" not in out
    assert (dict(os.environ), list(sys.argv)) == before


def test_a_race_is_found_and_replayed(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capfd, "--size 48 --sem relaxed")
    assert code == 4
    assert "no acquire" in out
    assert "--program '--size 48 --sem relaxed' --first-seed" in err


def test_what_its_arguments_do_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = check(capfd, "--sizes")
    assert code == 1
    assert "raised SystemExit: 2" in err


SPAWNED = """
import iris, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def worker(local_rank, world_size, value):
    dist.init_process_group(backend="gloo", rank=local_rank, world_size=world_size)
    shmem = iris.iris()
    assert shmem.get_rank() == local_rank
    x = shmem.zeros_like(shmem.randint(0, 9, (4,), device="cuda", dtype=torch.int32))
    assert shmem.broadcast(local_rank * value, 1) == value
    assert iris.do_bench(lambda: x.add_(1), shmem.barrier, lambda: x.zero_()) > 0
    assert x.tolist() == [1] * 4
    peer = torch.zeros(4, dtype=torch.int32, device="cuda")
    launch[(1,)](x, peer, local_rank, 1 - local_rank, shmem.get_heap_bases())
    shmem.barrier()
    assert peer.tolist() == [1] * 4
    dist.destroy_process_group()

import triton
import triton.language as tl

@triton.jit
def launch(x, peer, rank, other, bases):
    at = tl.arange(0, 4)
    tl.store(peer + at, iris.load(x + at, rank, other, bases))

def main():
    mp.spawn(fn=worker, args=(2, 7), nprocs=2, join=True)
"""


def test_a_program_may_spawn_its_ranks_and_use_what_iris_hosts_have(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spawned.py").write_text(SPAWNED)
    target = f"{tmp_path / 'spawned.py'}::main"
    code = run(["check", target, "--ranks", "2", "--seeds", "5", "--program", ""])
    assert code == 0, "".join(capfd.readouterr())
