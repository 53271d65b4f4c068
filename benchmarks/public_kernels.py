"""Checks public multi-GPU Triton kernels, from checkouts of their repositories.

    python -m benchmarks.public_kernels --checkouts FOLDER    # check, and write the results
    python -m benchmarks.public_kernels                       # write the page from the results

FOLDER holds the checkouts by name: ``iris``, ``kraken``, ``symm-mem-recipes`` and
``Triton-distributed``; those that are missing are left out. Kernels run as their authors launch
them, on tiny problems; nothing of theirs is stored here but the report's line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from taxfree_kernels.checker import CheckFailed, World
from taxfree_kernels.checker.conventions import triton_dist
from taxfree_kernels.checker.conventions.iris import Iris

RESULTS = Path(__file__).parent / "results" / "check" / "public_kernels.json"
PAGE = Path(__file__).parents[1] / "docs" / "public-kernels.md"
_REPOSITORIES = {
    "kraken": "meta-pytorch/kraken",
    "symm-mem-recipes": "yifuwang/symm-mem-recipes",
    "iris": "ROCm/iris",
    "Triton-distributed": "ByteDance-Seed/Triton-distributed",
}
_GROUP = types.SimpleNamespace(group_name="world")
_RANKS = 2


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
    ranks: int = _RANKS


@dataclass(frozen=True)
class Row:
    """The result of one kernel; the fields are those of the table."""

    project: str
    commit: str
    kernel: str
    path: str
    ranks: int
    verdict: str
    schedules: int
    report: str
    reading: str
    confirmed: str
    lines: list[str] = field(default_factory=list)


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
    modules = {
        name: _load(f"kraken.{name}", "cuda", "cuda.bindings")
        for name in (
            "comm.one_shot_all_reduce",
            "comm.two_shot_all_reduce",
            "fused.one_shot_all_reduce_bias",
            "fused.two_shot_all_reduce_bias",
            "fused.one_shot_all_reduce_bias_rms_norm",
            "fused.two_shot_all_reduce_bias_rms_norm",
            "fused.gemm_one_shot_all_reduce_fused",
            "fused.gemm_reduce_scatter_fused",
        )
    }

    def symmetric(world: World, *shape: int) -> Any:
        buffer = world.zeros(shape, torch.bfloat16, name="symm_mem buffer")
        for rank in range(world.ranks):
            buffer.local(rank).fill_(rank + 1)
        return buffer

    def one_shot(world: World) -> None:
        x = symmetric(world, 64)
        run = modules["comm.one_shot_all_reduce"].one_shot_all_reduce
        world.run(lambda rank: run(x.local(rank), BLOCK_SIZE=32, num_warps=1))

    def two_shot(world: World) -> None:
        run = modules["comm.two_shot_all_reduce"].two_shot_all_reduce
        x = torch.ones(128, dtype=torch.bfloat16)
        world.run(lambda rank: run(x, BLOCK_SIZE=32, num_warps=1, group=_GROUP))

    def bias(shots: str) -> Callable[[World], None]:
        def check(world: World) -> None:
            buffer = symmetric(world, 128)
            x, add = torch.ones(128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
            outs = [torch.empty_like(x) for _ in range(world.ranks)]
            run = getattr(modules[f"fused.{shots}_all_reduce_bias"], f"{shots}_all_reduce_bias")
            world.run(lambda rank: run(buffer.local(rank), x, add, outs[rank], BLOCK_SIZE=32))

        return check

    def norm(shots: str) -> Callable[[World], None]:
        def check(world: World) -> None:
            buffer = symmetric(world, 4, 32)
            x, add = (
                torch.ones(4, 32, dtype=torch.bfloat16),
                torch.ones(4, 32, dtype=torch.bfloat16),
            )
            w = torch.ones(32, dtype=torch.bfloat16)
            outs = [torch.empty_like(x) for _ in range(world.ranks)]
            name = f"{shots}_all_reduce_bias_rms_norm"
            run = getattr(modules[f"fused.{name}"], name)
            world.run(lambda rank: run(buffer.local(rank), x, add, w, outs[rank]))

        return check

    def gemm(name: str, file: str) -> Callable[[World], None]:
        def check(world: World) -> None:
            a, b = torch.ones(32, 16), torch.ones(16, 16)
            run = getattr(modules[f"fused.{file}"], name)
            blocks = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16}
            world.run(lambda rank: run(a, b, group=_GROUP, **blocks))

        return check

    relaxed = (
        "the first symm_mem_sync says hasPreviousMemAccess=False, so its signal is relaxed, "
        "though the kernel has stored its product before; its docstring asks for both flags"
    )
    yield Case(
        "kraken", "one_shot_all_reduce_kernel", "kraken/comm/one_shot_all_reduce.py", one_shot
    )
    yield Case(
        "kraken", "two_shot_all_reduce_kernel", "kraken/comm/two_shot_all_reduce.py", two_shot
    )
    for shots in ("one_shot", "two_shot"):
        name = f"{shots}_all_reduce_bias"
        yield Case("kraken", f"{name}_kernel", f"kraken/fused/{name}.py", bias(shots))
        name = f"{name}_rms_norm"
        yield Case("kraken", f"{name}_kernel", f"kraken/fused/{name}.py", norm(shots))
    yield Case(
        "kraken", "gemm_one_shot_all_reduce_kernel",
        "kraken/fused/gemm_one_shot_all_reduce_fused.py",
        gemm("gemm_one_shot_all_reduce", "gemm_one_shot_all_reduce_fused"), relaxed,
    )  # fmt: skip
    yield Case(
        "kraken", "gemm_reduce_scatter_kernel", "kraken/fused/gemm_reduce_scatter_fused.py",
        gemm("gemm_reduce_scatter", "gemm_reduce_scatter_fused"), relaxed,
    )  # fmt: skip


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

    def elements(name: str, kernel: str, *, after_result: bool) -> Callable[[World], None]:
        """A kernel of a bench in which rank 0 reaches into the memory of rank 1."""

        def check(world: World) -> None:
            function = getattr(_example(root, f"examples/{name}.py"), kernel)
            ranks = hosts(world)
            source = [each.zeros(64, dtype=torch.int32) for each in ranks]
            result = [each.zeros(64, dtype=torch.int32) for each in ranks]

            def call(rank: int) -> None:
                buffers = (source[rank], result[rank]) if after_result else (source[rank],)
                if rank == 0:
                    function[(2,)](*buffers, 64, 0, 1, 32, ranks[rank].get_heap_bases())
                world.barrier()

            world.run(call)

        return check

    def of_all(name: str, kernel: str, *, loads: bool) -> Callable[[World], None]:
        def check(world: World) -> None:
            function = getattr(_example(root, f"examples/{name}.py"), kernel)
            ranks = hosts(world)
            source = [each.zeros(64, dtype=torch.float32) for each in ranks]
            result = [each.zeros(64, dtype=torch.float32) for each in ranks]

            def call(rank: int) -> None:
                buffers = (source[rank], result[rank]) if loads else (source[rank],)
                bases = ranks[rank].get_heap_bases()
                function[(2,)](*buffers, rank, 64, world.ranks, 32, bases)
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
    for name, kernel, after in (
        ("00_load/load_bench", "load_kernel", True),
        ("01_store/store_bench", "store_kernel", False),
        ("04_atomic_add/atomic_add_bench", "atomic_add_kernel", True),
        ("05_atomic_xchg/atomic_xchg_bench", "atomic_xchg_kernel", True),
    ):
        run = elements(name, kernel, after_result=after)
        yield Case("iris", kernel, f"examples/{name}.py", run)
    for name, kernel, loads in (
        ("02_all_load/all_load_bench", "all_read_kernel", True),
        ("03_all_store/all_store_bench", "all_store_kernel", False),
    ):
        yield Case("iris", kernel, f"examples/{name}.py", of_all(name, kernel, loads=loads))
    for name in ("message_passing_load_store", "message_passing_put"):
        path = f"examples/06_message_passing/{name}.py"
        yield Case(
            "iris", f"{name}: producer, consumer", path, messages(name), local_flag,
            "pull request 215 of ROCm/iris (merged) is about flags by loads and stores",
        )  # fmt: skip
    for folder, file, kernel, reading in (
        (
            "07_gemm_all_scatter", "gemm_all_scatter", "persistent_gemm_all_scatter", assumed,
        ),
        (
            "08_gemm_atomics_all_reduce", "gemm_atomics_all_reduce", "persistent_gemm_all_reduce",
            "atomic adds into the memory of peers have no scope argument, and the default is gpu",
        ),
        (
            "09_gemm_one_shot_all_reduce", "gemm_one_shot_all_reduce",
            "persistent_gemm_all_reduce", assumed,
        ),
    ):  # fmt: skip
        path = f"examples/{folder}/{file}.py"
        confirmed = (
            "later versions of the example have no such assumptions" if folder[1] == "7" else ""
        )
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


_PROJECTS: dict[str, Callable[[Path], Iterator[Case]]] = {
    "kraken": _kraken,
    "symm-mem-recipes": _recipes,
    "iris": _iris,
    "Triton-distributed": _triton_distributed,
}


def _check(case: Case, commit: str, seeds: int) -> Row:
    """Check one kernel."""
    world = World(case.ranks, seeds, co_resident=case.co_resident, covered=False)
    report, lines = "", []
    try:
        with world:
            case.run(world)
    except CheckFailed as error:
        violation = error.checked.violation
        assert violation is not None
        lines_of = [line.strip().rstrip(":") for line in violation.details]
        waits = [line for line in lines_of if line.startswith("for ")]
        report = f"{violation.reason.title}: {(waits or lines_of)[0]}"
        lines = list(violation.lines)
        print(error)
    checked = world.checks[-1]
    verdict = "pass" if checked.violation is None else checked.violation.reason.title
    print(f"{case.project} {case.kernel}: {verdict}, {checked.rate}", flush=True)
    return Row(
        case.project, commit, case.kernel, case.path, case.ranks, verdict, checked.schedules,
        report, case.reading if report else "", case.confirmed if report else "", lines,
    )  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """The page that shows the results."""
    seeds = max(row["schedules"] for row in rows)
    lines = [
        "# Public kernels, checked",
        "",
        "<!-- Written by `python -m benchmarks.public_kernels`: change that, not this page. -->",
        "",
        f"Kernels of {len({row['project'] for row in rows})} projects that have nothing to do with "
        "taxfree ran in [the checker](check.md), from checkouts of",
        "their repositories, on tiny problems, launched as their authors launch them, or as their "
        f"benchmarks do: up to {seeds}",
        "schedules each. `reported` is what the checker says of this commit, under the memory "
        "model of PTX; each report was",
        "compared with the source. It does not say that hardware shows it. `pass` means that these "
        "schedules showed nothing.",
        "The lines of each report are in `benchmarks/results/check/public_kernels.json`.",
        "",
    ]
    commits = {row["project"]: row["commit"] for row in rows}
    lines += ["| project | repository | commit |", "|---|---|---|"]
    lines += [
        f"| {name} | {_REPOSITORIES[name]} | `{each[:12]}` |" for name, each in commits.items()
    ]
    lines += [
        "",
        "| project | kernel | file | ranks | schedules | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = row["verdict"] if row["verdict"] == "pass" else f"reported: {row['verdict']}"
        cells = (row["project"], f"`{row['kernel']}`", row["path"], row["ranks"], row["schedules"])
        lines.append(f"| {' | '.join(map(str, cells))} | {verdict} |")
    lines += ["", "## What the reports say", ""]
    for row in rows:
        if row["report"]:
            end = row["confirmed"] or "no issue or pull request that says so was found"
            where = ", ".join(dict.fromkeys(row["lines"]))
            lines.append(
                f"- **{row['project']}, `{row['kernel']}`.** {row['report']} ({where}). "
                f"The source: {row['reading']}. Elsewhere: {end}."
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Check what the arguments name, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument(
        "--only", default="", help="a part of project and kernel: nothing is written"
    )
    given = parser.parse_args()
    rows = []
    for project, cases in _PROJECTS.items() if given.checkouts else ():
        root = given.checkouts / project
        if not root.is_dir():
            continue
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        for case in cases(root):
            if given.only in f"{project} {case.kernel}":
                rows.append(_check(case, commit, given.seeds))
    if rows and not given.only:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if not given.only:
        PAGE.write_text(page(json.loads(RESULTS.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
