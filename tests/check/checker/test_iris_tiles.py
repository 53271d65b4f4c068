"""Iris' tiles and views, and its operations from where it is installed."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from taxfree_check.checker import CheckFailed, World
from taxfree_check.checker.conventions import iris
from tests.ranks import ROOT

CONTRACT = json.loads((ROOT / "tests/kernels/iris_contract.json").read_text())
M, N, BLOCK = 4, 8, 4


@triton.jit
def exchange(
    context, x, aux, out, locks, rank: tl.constexpr, world: tl.constexpr, call,
    HOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One tile a program; the sum of all ranks, or all of their tiles."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    program = tl.program_id(0)
    pid_m = program // tl.cdiv(COLUMNS, SIZE)
    pid_n = program % tl.cdiv(COLUMNS, SIZE)
    mine = iris.make_tensor_view(x, ROWS, COLUMNS, COLUMNS, 1)
    source = iris.make_tensor_view(aux, ROWS, COLUMNS, COLUMNS, 1)
    target = iris.make_tensor_view(out, ROWS, COLUMNS, COLUMNS, 1)
    place = iris.TileView(pid_m, pid_n, SIZE, SIZE)
    address, inside = mine.tile_ptr(place)
    values = tl.load(address, mask=inside, other=0.0)
    tile = iris.Tile(pid_m, pid_n, SIZE, SIZE, values)
    if HOW == "all_gather":
        wide = iris.make_tensor_view(out, ROWS * world, COLUMNS, COLUMNS, 1)
        ctx.all_gather(tile, wide, 0)
    elif HOW == "all_reduce_atomic":
        ctx.all_reduce_atomic(tile, target)
    elif HOW == "all_reduce_spinlock":
        ctx.all_reduce_spinlock(tile, target, locks)
    elif HOW == "all_reduce_ring":
        ctx.all_reduce_ring(place, mine, target)
    elif HOW == "all_to_all":
        ctx.all_to_all(place, mine, target, COLUMNS // world)
    elif HOW == "gather":
        total = ctx.gather(place, mine, 0)
        for peer in range(1, world):
            total += ctx.gather(place, mine, peer)
        tl.store(target.tile_ptr(place)[0], total)
    else:
        tl.store(source.tile_ptr(place)[0], values)
        tl.atomic_xchg(locks + program, call + 1, sem="release", scope="sys")
        if HOW == "all_reduce_one_shot":
            ctx.all_reduce_one_shot(tile, source, target, locks, call + 1)
        elif HOW == "all_reduce_two_shot":
            ctx.all_reduce_two_shot(tile, source, target, locks, call + 1)
        else:
            ctx.reduce_scatter(tile, source, target, locks)


def run(how: str, calls: int = 1) -> list[torch.Tensor]:
    """What each rank has in the end."""
    with World(2, seeds=10, covered=False) as world:
        hosts = [iris.Iris(world, rank) for rank in range(2)]
        rows = M * 2 if how == "all_gather" else M
        xs, auxs = ([host.zeros(M, N) for host in hosts] for _ in range(2))
        outs = [host.zeros(rows, N) for host in hosts]
        locks = [host.zeros(2, dtype=torch.int32) for host in hosts]
        for rank, x in enumerate(xs):
            x.copy_(torch.arange(M * N).view(M, N) + 100 * rank)

        def call(rank: int, number: int) -> None:
            exchange[(2,)](
                hosts[rank].get_device_context(), xs[rank], auxs[rank], outs[rank], locks[rank],
                rank, 2, number, how, M, N, BLOCK,
            )  # fmt: skip
            hosts[rank].barrier()

        world.run(call, calls=calls)
    return outs


X = [torch.arange(M * N).view(M, N).float() + 100 * rank for rank in range(2)]


@pytest.mark.parametrize("how", ["gather", "all_reduce_one_shot", "all_reduce_two_shot"])
def test_a_sum_of_tiles_is_that_of_all_ranks(how):
    assert all(torch.equal(out, X[0] + X[1]) for out in run(how, calls=2))


def test_a_lock_orders_who_adds():
    assert all(torch.equal(out, X[0] + X[1]) for out in run("all_reduce_spinlock"))


def test_tiles_are_gathered_and_exchanged():
    assert all(torch.equal(out, torch.cat(X)) for out in run("all_gather"))
    halves = [x.view(M, 2, N // 2) for x in X]
    for rank, out in enumerate(run("all_to_all")):
        assert torch.equal(out, torch.cat([half[:, rank] for half in halves], 1))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("all_reduce_ring", "no wait"),  # it copies sums that nobody says are there
        ("reduce_scatter", "scope too narrow"),  # flags of peers are read at gpu scope
    ],
)
def test_what_iris_leaves_unordered_is_found(how, reason):
    with pytest.raises(CheckFailed, match=reason):
        run(how)


@pytest.mark.parametrize("name", CONTRACT["tile_signatures"])
def test_a_stand_in_takes_what_iris_tiles_take(name):
    owner, _, method = name.partition(".")
    called = getattr(getattr(iris, owner), method) if method else getattr(iris, owner)
    taken = [each for each in inspect.signature(called).parameters.values() if each.name != "self"]
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in taken]
    assert str(inspect.Signature(bare)) == CONTRACT["tile_signatures"][name]


def check(program: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "taxfree_cli.app", "check", f"{program}::main"]
    options = ["--ranks", "2", "--seeds", "3", "--program", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.run([*command, *options], env=environment, capture_output=True, text=True)


def test_operations_come_from_where_iris_is_installed(tmp_path):
    """Its package looks for a GPU; its operations use what has a stand-in, and aggregates."""
    (tmp_path / "iris/ops").mkdir(parents=True)
    (tmp_path / "iris/__init__.py").write_text("raise OSError('libamdhip64.so: not found')\n")
    (tmp_path / "iris/ops/__init__.py").write_text("""
import iris, triton, triton.language as tl
from iris.host.tracing.kernel_artifacts import iris_launch
from triton.language.core import _aggregate as aggregate

@aggregate
class Place:
    size: tl.constexpr
    @triton.constexpr_function
    def __init__(self, size):
        self.size = tl.constexpr(size)
    @triton.jit
    def at(self):
        return tl.arange(0, self.size)

@triton.jit
def kernel(out, context, rank: tl.constexpr, world: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    at = Place(4).at()
    ctx.store(out + at, at.to(tl.float32), 1 - rank)

def fill(shmem, out):
    place = shmem.get_device_context(), shmem.get_rank(), shmem.get_num_ranks()
    iris_launch(kernel, (1,), out, *place, algorithm="fill", rank=shmem.get_rank())
    shmem.barrier()
""")
    (tmp_path / "mine.py").write_text("""
import iris, torch
from iris import ops

def main():
    shmem = iris.iris()
    out = shmem.zeros(4, dtype=torch.float32)
    shmem.barrier()
    ops.fill(shmem, out)
    assert out.tolist() == [0, 1, 2, 3]
""")
    for name in ("", "host", "host/tracing"):
        (tmp_path / "iris" / name).mkdir(exist_ok=True)
        if name:
            (tmp_path / "iris" / name / "__init__.py").touch()
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = check(tmp_path / "mine.py", "", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_of_iris_operations_runs_as_it_is():
    """From checkouts, as they were read: at the commits of the contract."""
    found = [PathFinder.find_spec(name) for name in ("iris", "tritonblas")]
    if None in found:
        pytest.skip(
            "no checkouts of github.com/ROCm/iris and github.com/ROCm/tritonBLAS: "
            "PYTHONPATH=iris:tritonBLAS/include"
        )
    done = check(Path(__file__).with_name("iris_op.py"), "all_gather_matmul")
    assert done.returncode == 0, done.stdout + done.stderr
