"""Public multi-GPU Triton kernels, each with a tiny problem, launched as its authors launch it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from taxfree_check.checker import World
from taxfree_check.checker.conventions import triton_dist
from taxfree_check.checker.conventions.iris import Iris

_GROUP = types.SimpleNamespace(group_name="world")


@dataclass(frozen=True)
class Case:
    """One kernel.

    Args:
        project: name of its checkout.
        kernel: its name.
        path: of its file in the checkout.
        run: checks it in a world.
        reading: what reading the source says of the verdict.
        confirmed: where its authors or others say so, or "".
        co_resident: its launch guarantees that all programs run at the same time.
        ranks: of the world.
    """

    project: str
    kernel: str
    path: str
    run: Callable[[World], object]
    reading: str = ""
    confirmed: str = ""
    co_resident: bool = False
    ranks: int = 2


class _Anything(types.ModuleType):
    """A module of whatever is asked for: what a host needs of a GPU, and a kernel does not."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _load(name: str, *stubs: str) -> Any:
    """Import a module of a checkout; `stubs` are modules that it need not have."""
    for stub in stubs:
        sys.modules.setdefault(stub, _Anything(stub))
    return importlib.import_module(name)


def _example(root: Path, path: str) -> Any:
    """Load a file of a checkout that belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_")[:-3], root / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Some have no guard around their main function, which needs GPUs; the kernels come before.
    with contextlib.suppress(AssertionError, AttributeError, KeyError, TypeError):
        spec.loader.exec_module(module)
    return module


# -- kraken ---------------------------------------------------------------------------------------


def _kraken(root: Path) -> Iterator[Case]:
    sys.path.insert(0, str(root))

    def case(file: str, check: Callable[[Any, World], None], reading: str = "") -> Case:
        """A kernel and its host function, which is named like its file."""
        name = file.rpartition("/")[2].removesuffix("_fused")
        module = _load(f"kraken.{file.replace('/', '.')}", "cuda", "cuda.bindings")
        run = partial(check, getattr(module, name))
        return Case("kraken", f"{name}_kernel", f"kraken/{file}.py", run, reading)

    def symmetric(world: World, *shape: int) -> Any:
        buffer = world.zeros(shape, torch.bfloat16, name="symm_mem buffer")
        for rank in range(world.ranks):
            buffer.local(rank).fill_(rank + 1)
        return buffer

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16)

    def one_shot(run: Any, world: World) -> None:
        x = symmetric(world, 64)
        world.run(lambda rank: run(x.local(rank), BLOCK_SIZE=32, num_warps=1))

    def two_shot(run: Any, world: World) -> None:
        x = ones(128)
        world.run(lambda rank: run(x, BLOCK_SIZE=32, num_warps=1, group=_GROUP))

    def bias(run: Any, world: World) -> None:
        buffer, x, add = symmetric(world, 128), ones(128), ones(128)
        outs = [torch.empty_like(x) for _ in range(world.ranks)]
        world.run(lambda rank: run(buffer.local(rank), x, add, outs[rank], BLOCK_SIZE=32))

    def norm(run: Any, world: World) -> None:
        buffer, x, add, w = symmetric(world, 4, 32), ones(4, 32), ones(4, 32), ones(32)
        outs = [torch.empty_like(x) for _ in range(world.ranks)]
        world.run(lambda rank: run(buffer.local(rank), x, add, w, outs[rank]))

    def gemm(run: Any, world: World) -> None:
        a, b = torch.ones(32, 16), torch.ones(16, 16)
        blocks = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16}
        world.run(lambda rank: run(a, b, group=_GROUP, **blocks))

    relaxed = (
        "the first symm_mem_sync says hasPreviousMemAccess=False, so its signal is relaxed, "
        "though the kernel has stored its product before; its docstring asks for both flags"
    )
    yield case("comm/one_shot_all_reduce", one_shot)
    yield case("comm/two_shot_all_reduce", two_shot)
    for shots in ("one_shot", "two_shot"):
        yield case(f"fused/{shots}_all_reduce_bias", bias)
        yield case(f"fused/{shots}_all_reduce_bias_rms_norm", norm)
    yield case("fused/gemm_one_shot_all_reduce_fused", gemm, relaxed)
    yield case("fused/gemm_reduce_scatter_fused", gemm, relaxed)


# -- PyTorch symmetric memory recipes -------------------------------------------------------------


def _recipes(root: Path) -> Iterator[Case]:
    sys.path.insert(0, str(root))
    barrier = _load("symm_mem_recipes.triton_barrier")
    reduce = _load("symm_mem_recipes.triton_one_shot_all_reduce", "symm_mem_recipes.utils")
    symm_mem = importlib.import_module("torch.distributed._symmetric_memory")

    def barrier_alone(world: World) -> None:
        x = world.zeros((8,), name="symm_mem buffer")

        def call(rank: int) -> None:
            handle = symm_mem.rendezvous(x.local(rank))
            barrier.barrier_test_kernel[(4,)](
                handle.signal_pad_ptrs_dev, RANK=rank, WORLD_SIZE=world.ranks
            )

        world.run(call)

    def all_reduce(blocks: int) -> Callable[[World], None]:
        def check(world: World) -> None:
            x = world.full((256,), 1, torch.bfloat16, name="symm_mem buffer")
            outs = [torch.empty(256, dtype=torch.bfloat16) for _ in range(world.ranks)]

            def call(rank: int) -> None:
                handle = symm_mem.rendezvous(x.local(rank))
                x.local(rank).fill_(1)
                reduce.one_shot_all_reduce_kernel[(blocks,)](
                    handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, outs[rank], numel=256,
                    rank=rank, world_size=world.ranks, BLOCK_SIZE=16, NUMEL_PER_THREAD=8,
                )  # fmt: skip

            world.run(call, calls=1)

        return check

    path = "symm_mem_recipes/triton_one_shot_all_reduce.py"
    yield Case(
        "symm-mem-recipes", "barrier_test_kernel", "symm_mem_recipes/triton_barrier.py",
        barrier_alone,
    )  # fmt: skip
    yield Case("symm-mem-recipes", "one_shot_all_reduce_kernel, 1 block", path, all_reduce(1))
    yield Case(
        "symm-mem-recipes", "one_shot_all_reduce_kernel, 2 blocks", path, all_reduce(2),
        "blockwise_barrier acquires the words of block 0, whatever the block: its wait is a "
        "relaxed compare-and-swap, and the acquiring loads leave block_id * WORLD_SIZE out",
    )  # fmt: skip


# -- Iris -----------------------------------------------------------------------------------------


def _iris(root: Path) -> Iterator[Case]:
    sys.path.insert(0, str(root))
    package = types.ModuleType("iris")  # its own module looks for a GPU's libraries
    package.__path__ = [str(root / "iris")]
    sys.modules["iris"] = package
    functions = _load("iris.iris", "iris._hip", "iris._mpi_helpers")
    package.__dict__.update({k: v for k, v in vars(functions).items() if not k.startswith("__")})

    def hosts(world: World) -> list[Iris]:
        return [Iris(world, rank) for rank in range(world.ranks)]

    def bench(name: str, kernel: str, *, of_all: bool, has_result: bool) -> Callable[[World], None]:
        """A bench's kernel: all ranks reach into all memories, or rank 0 into that of rank 1."""

        def check(world: World) -> None:
            function = getattr(_example(root, f"examples/{name}.py"), kernel)
            ranks, dtype = hosts(world), torch.float32 if of_all else torch.int32
            source = [each.zeros(64, dtype=dtype) for each in ranks]
            result = [each.zeros(64, dtype=dtype) for each in ranks]

            def call(rank: int) -> None:
                buffers = (source[rank], result[rank]) if has_result else (source[rank],)
                numbers = (rank, 64, world.ranks, 32) if of_all else (64, 0, 1, 32)
                if of_all or rank == 0:
                    function[(2,)](*buffers, *numbers, ranks[rank].get_heap_bases())
                world.barrier()

            world.run(call)

        return check

    def messages(name: str) -> Callable[[World], None]:
        def check(world: World) -> None:
            module = _example(root, f"examples/06_message_passing/{name}.py")
            ranks = hosts(world)
            source = [each.zeros(64, dtype=torch.float32) for each in ranks]
            target = [each.randn(64, dtype=torch.float32) for each in ranks]
            flags = [each.zeros(2, dtype=torch.int32) for each in ranks]

            def call(rank: int) -> None:
                bases = ranks[rank].get_heap_bases()
                if rank == 0:
                    module.producer_kernel[(2,)](
                        source[0], target[0], flags[0], 64, 0, 1, 32, bases
                    )
                else:
                    module.consumer_kernel[(2,)](target[1], flags[1], 64, 1, 32, bases)
                world.barrier()

            world.run(call, calls=1)

        return check

    def gemm(folder: str, file: str, kernel: str) -> Callable[[World], None]:
        def check(world: World) -> None:
            function = getattr(_example(root, f"examples/{folder}/{file}.py"), kernel)
            ranks = hosts(world)
            m, n, k = 32, 16, 16
            a, b = torch.ones(m, k), torch.ones(k, n)
            wide = n * world.ranks if "scatter" in folder else n
            part = [each.zeros((m, n), dtype=torch.float32) for each in ranks]
            whole = [each.zeros((m, wide), dtype=torch.float32) for each in ranks]
            done = [each.zeros(4, dtype=torch.int32) for each in ranks]

            def call(rank: int) -> None:
                function[(2,)](
                    a, b, part[rank], whole[rank], None, None, None, done[rank], m, n, k,
                    *a.stride(), *b.stride(), *part[rank].stride(), *whole[rank].stride(), 0,
                    BLOCK_SIZE_M=16, BLOCK_SIZE_N=16, BLOCK_SIZE_K=16, GROUP_SIZE_M=1, NUM_SMS=2,
                    STREAMK_TILES=0, NUM_XCDS=1, BIAS=False, EVEN_K=True,
                    heap_bases=ranks[rank].get_heap_bases(), cur_rank=rank, world_size=world.ranks,
                )  # fmt: skip
                world.barrier()

            world.run(call)

        return check

    local_flag = (
        "the producer sets the flag in its own memory, by a plain store, and the consumer polls "
        "its own copy by plain loads; no signal reaches it"
    )
    assumed = "pid_m and pid_n are assumed to be positive, but are 0 in the first tiles"
    for name, kernel, of_all, has_result in (
        ("00_load/load_bench", "load_kernel", False, True),
        ("01_store/store_bench", "store_kernel", False, False),
        ("04_atomic_add/atomic_add_bench", "atomic_add_kernel", False, True),
        ("05_atomic_xchg/atomic_xchg_bench", "atomic_xchg_kernel", False, True),
        ("02_all_load/all_load_bench", "all_read_kernel", True, True),
        ("03_all_store/all_store_bench", "all_store_kernel", True, False),
    ):
        run = bench(name, kernel, of_all=of_all, has_result=has_result)
        yield Case("iris", kernel, f"examples/{name}.py", run)
    for name in ("message_passing_load_store", "message_passing_put"):
        path = f"examples/06_message_passing/{name}.py"
        yield Case(
            "iris", f"{name}: producer, consumer", path, messages(name), local_flag,
            "pull request 215 of ROCm/iris (merged) is about flags by loads and stores",
        )  # fmt: skip
    atomic = "atomic adds into the memory of peers have no scope argument, and the default is gpu"
    for folder, kernel, reading in (
        ("07_gemm_all_scatter", "persistent_gemm_all_scatter", assumed),
        ("08_gemm_atomics_all_reduce", "persistent_gemm_all_reduce", atomic),
        ("09_gemm_one_shot_all_reduce", "persistent_gemm_all_reduce", assumed),
    ):
        file = folder[3:]
        path = f"examples/{folder}/{file}.py"
        confirmed = "the example at commit 262838cb7309 assumes >= 0" if folder[1] == "7" else ""
        yield Case("iris", kernel, path, gemm(folder, file, kernel), reading, confirmed)


# -- Triton-distributed ---------------------------------------------------------------------------


def _triton_distributed(root: Path) -> Iterator[Case]:
    sys.modules.update(triton_dist.modules())
    for stub in ("triton_dist.utils", "nvshmem", "nvshmem.core"):
        sys.modules.setdefault(stub, _Anything(stub))

    def queue(world: World) -> None:
        module = _example(root, "tutorials/01-distributed-notify-wait.py")
        inputs, size = 4, 2
        queue = world.zeros((size * 16,), name="queue")
        signals = world.zeros((size,), torch.int64, name="signal")
        given = torch.ones(inputs * 16)
        outs = [torch.zeros(inputs * 16) for _ in range(world.ranks)]

        def call(rank: int) -> None:
            module.producer_consumer_kernel[(2,)](
                rank, world.ranks, given, outs[rank], inputs, queue.local(rank),
                signals.local(rank), size, 16, 1, 1,
            )  # fmt: skip

        world.run(call, calls=1)

    yield Case(
        "Triton-distributed", "producer_consumer_kernel",
        "tutorials/01-distributed-notify-wait.py", queue,
        "both sides wait at gpu scope, which its compiler turns into ld.acquire.gpu, for words "
        "that a peer writes",
        co_resident=True,
    )  # fmt: skip


#: project -> the cases of its checkout
PROJECTS: dict[str, Callable[[Path], Iterator[Case]]] = {
    "kraken": _kraken,
    "symm-mem-recipes": _recipes,
    "iris": _iris,
    "Triton-distributed": _triton_distributed,
}
