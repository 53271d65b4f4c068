"""Run a variant's compiled kernels on all ranks, and compare the results with the reference.

The ranks' plans are those of any other fabric. Their kernels are compiled for an AMD GPU by
Triton's own launcher, decoded, and executed, all ranks at once, in an order that a seed draws.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from random import Random
from typing import Any

import numpy as np
import torch

from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import Launch, flat
from taxfree_check.executed.caches import DeviceMemory, GpuMemory
from taxfree_check.executed.decode import Listing, decode
from taxfree_check.executed.errors import ExecutionError, Hang, UnknownInstruction
from taxfree_check.executed.fabric import ExecutedFabric, arena_bytes
from taxfree_check.executed.flight import OperationTiming
from taxfree_check.executed.operands import bits_of_float
from taxfree_check.executed.program import KernelRun, Program
from taxfree_check.executed.tactics import Tactics
from taxfree_check.groupless import NoGroup
from taxfree_kernels import variant as registry
from taxfree_kernels.errors import HeapExhausted, PeerTimeout
from taxfree_kernels.fp8 import dtype_of, host_multiplies
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.launch import Kernel, launching_through
from taxfree_kernels.variant import Config, Problem, Ready

#: architecture -> the device that kernels are compiled for
DEVICES = {"gfx942": "mi300x", "gfx950": "mi350x"}

CALLS = 4  # of a run, back to back: the third uses the first slot again, or else the fourth does
MOST_INSTRUCTIONS = 5_000_000  # of all waves in a run; more is a hang
NEVER = 1 << 40  # polls
FEW_POLLS = 20
_ROOM = (1, 4, 16)  # times the problem's slots: caches copy all memory, so it should be small

_PRIORITY = attrgetter("priority")
_IDLE = 32  # rounds in which every wave polls again, and nothing changes: a hang


@dataclass
class ExecutedCall:
    """The result of a run.

    Args:
        op, variant, problem, config: what ran.
        architecture: it was compiled for.
        seed: of the order, the timing, and the inputs.
        verdict: "right", "wrong", "hang", "error", or "nothing to run": the library serves it.
        details: of an error or a hang; else empty.
        error: the largest difference from the reference, in units of what rounding allows.
        instructions: that waves executed.
        seconds: of executing, without compiling.
        silent: a rank that launched nothing, or None. The others had to give up: then "right" says
            that they ended, reported it, and returned only NaN and right numbers.
        gave_up: what a rank reported that waited for it; empty if none did.
    """

    op: str
    variant: str
    problem: Problem
    config: Config
    architecture: str
    seed: int
    verdict: str = "right"
    details: str = ""
    error: float = 0.0
    instructions: int = 0
    seconds: float = 0.0
    silent: int | None = None
    gave_up: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"config": dict(self.config)}


def run(
    op: str,
    variant: str,
    problem: Problem,
    config: Config | None = None,
    seed: int = 0,
    architecture: str = "gfx942",
    *,
    most_instructions: int = MOST_INSTRUCTIONS,
    patience: int = NEVER,
    silent: int | None = None,
    tactics: Tactics | None = None,
    programs: dict[str, Program] | None = None,
) -> ExecutedCall:
    """Execute four calls of a variant on each of its problem's ranks.

    The driver of Triton in this process is replaced, as by
    :func:`taxfree_check.cross_compile.compile.compile_launch`.

    Args:
        config: None for the first one.
        seed: draws the order of waves, how late accesses take effect, how long caches keep
            lines, and the inputs.
        architecture: "gfx942" or "gfx950".
        most_instructions: of all waves; a run that needs more hangs.
        patience: polls until a kernel gives up waiting; few at most where a rank is silent.
        silent: a rank that launches nothing. The others make one call.
        tactics: None draws them.
        programs: kernels that earlier runs decoded, to be used again; by Triton's key.

    Raises:
        PlanError: the variant refuses the problem or config.
        UnknownInstruction: the executor cannot run its code.
    """
    hardware = KNOWN[DEVICES[architecture]]
    if config is None:
        config = registry.variants(op)[variant].seed_configs(problem, hardware)[0]
    shown = ExecutedCall(op, variant, problem, config, architecture, seed, silent=silent)
    if silent is not None:
        patience = min(patience, FEW_POLLS)
    session = Session(shown, hardware, most_instructions, patience, tactics, programs)
    begin = time.perf_counter()
    try:
        with np.errstate(all="ignore"), host_multiplies(dtype_of(architecture)):
            session.run()
    except NoGroup:
        shown.verdict = "nothing to run"
    except Hang as error:
        shown.verdict, shown.details = "hang", f"{error.message} {error.hint}"
    except UnknownInstruction:
        raise
    except ExecutionError as error:
        shown.verdict, shown.details = "error", f"{error.message} {error.hint}"
    shown.seconds = time.perf_counter() - begin - session.compiling
    return shown


class Host(threading.Thread):
    """Calls a rank's plan; each launch waits until the session has executed it."""

    def __init__(self, rank: int, calls: Iterable[Callable[[], Any]]) -> None:
        super().__init__(daemon=True)
        self.rank, self._calls = rank, calls
        self.asked: tuple[Kernel, tuple[Any, ...]] | None = None
        self.calls_done = 0
        self.failure: BaseException | None = None
        self.is_abandoned = False
        self._goes_on, self.has_stopped = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        try:
            with launching_through(self._launch):
                for call in self._calls:
                    call()
                    self.calls_done += 1
        except BaseException as error:
            self.failure = error
        self.has_stopped.release()

    def _launch(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        self.asked = kernel, args
        self.pause()

    def pause(self) -> None:
        """Wait until the session lets it go on."""
        self.has_stopped.release()
        self._goes_on.acquire()
        if self.is_abandoned:
            raise SystemExit

    def go_on(self) -> None:
        """Let it run until its next launch, or its end."""
        self.asked = None
        self._goes_on.release()
        self.wait()

    def wait(self) -> None:
        self.has_stopped.acquire()
        if self.failure is not None:
            raise self.failure

    def abandon(self) -> None:
        self.is_abandoned = True
        self._goes_on.release()


class Session:
    """One run: memory, GPUs, hosts, and the launches that are in flight."""

    def __init__(
        self,
        shown: ExecutedCall,
        hardware: Hardware,
        most_instructions: int,
        patience: int,
        tactics: Tactics | None,
        programs: dict[str, Program] | None = None,
    ) -> None:
        self._shown, self._hardware, self._most = shown, hardware, most_instructions
        self._patience = patience
        self._programs = {} if programs is None else programs
        # the reference of a sum in fp8 knows how integers are rounded
        self._of_integers = getattr(shown.problem, "out_scales", "none") != "none"
        self.compiling = 0.0
        rng = self._rng = Random(shown.seed)
        self._tactics = tactics or Tactics.drawn(rng)
        self._timing = OperationTiming(rng, self._tactics)
        self._mirrors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._launches: dict[int, KernelRun] = {}

    def run(self) -> None:
        """Run all calls of all ranks, and compare.

        Raises:
            ExecutionError: what went wrong.
        """
        problem, op = self._shown.problem, registry.operation(self._shown.op)
        fabrics, plans = self._planned(problem)
        self._gpus = [GpuMemory(self._memory) for _ in fabrics]
        cpu = torch.device("cpu")
        self._outputs: list[list[torch.Tensor]] = []
        hosts = []
        for rank, plan in enumerate(plans):
            calls = []
            self._outputs.append([])
            for call in range(CALLS if self._shown.silent is None else 1):
                seed = self._shown.seed + call
                inputs = op.make_inputs(problem, rank, seed, cpu, self._of_integers)
                kept = [
                    value if value is None else self._memory.copy_of(value, rank)
                    for value in inputs
                ]
                empty = op.empty_output(problem, cpu)
                output = self._memory.copy_of(empty, rank).fill_(float("nan"))
                self._outputs[rank].append(output)
                calls.append(lambda plan=plan, tensors=(*kept, output): plan(*tensors))
            hosts.append(Host(rank, calls))
        try:
            self._execute(hosts)
        finally:
            for host in hosts:
                host.abandon()
        if self._shown.silent is not None:
            for rank, fabric in enumerate(fabrics):
                if rank != self._shown.silent:
                    self._compare_given_up(rank, fabric)
        if not self._shown.instructions:
            self._shown.verdict = "nothing to run"

    def _planned(self, problem: Problem) -> tuple[list[ExecutedFabric], list[Ready]]:
        """Every rank's fabric and plan, in the first memory that has room for what a config sends.

        Raises:
            HeapExhausted: none has.
        """
        variant = registry.variants(self._shown.op)[self._shown.variant]
        for slot_bytes in (problem.slot_bytes * factor for factor in _ROOM):
            self._memory = self.new_memory()
            fabrics = self._fabrics(problem.world_size, slot_bytes)
            try:
                config = self._shown.config
                return fabrics, [Ready(variant.plan(problem, fabric, config)) for fabric in fabrics]
            except HeapExhausted as error:
                exhausted = error
        raise exhausted

    def new_memory(self) -> DeviceMemory:
        """Memory without tensors, as GPUs of this run cache it."""
        return DeviceMemory(self._tactics.grain)

    def _fabrics(self, world_size: int, slot_bytes: int) -> list[ExecutedFabric]:
        size = arena_bytes(world_size, slot_bytes)
        arenas = [self._memory.empty(size, torch.uint8, rank) for rank in range(world_size)]
        for arena in arenas:
            arena.fill_(0xFF)
        return [
            ExecutedFabric(rank, arenas, self._memory, self._hardware, slot_bytes, self._patience)
            for rank in range(world_size)
        ]

    def _execute(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            if host.rank != self._shown.silent:
                host.start()
                host.wait()
                self._take(host)
        weights = [self._rng.choice((1, 1, 4, 20)) for _ in hosts]
        idle, version, compared = 0, -1, 0
        while self._launches and self._shown.verdict == "right":
            every = {rank: launch.ready() for rank, launch in self._launches.items()}
            ready = {rank: waves for rank, waves in every.items() if waves}
            if not ready:
                idle = idle + 1 if self._memory.version == version else 0
                if idle > _IDLE and self._patience >= NEVER:
                    raise Hang("all waves wait for what does not happen", self._where())
                for launch in self._launches.values():
                    launch.wake()
                version = self._memory.version
                continue
            if self._tactics.by_priority:
                first = {rank: max(waves, key=_PRIORITY) for rank, waves in ready.items()}
                rank = max(first, key=lambda rank: first[rank].priority)
                wave = first[rank]
            else:
                rank = self._rng.choices(list(ready), [weights[rank] for rank in ready])[0]
                wave = self._rng.choice(ready[rank])
            launch = self._launches[rank]
            self._shown.instructions += launch.turn(wave)
            if launch.has_ended:
                self._finish(hosts[rank])
                while compared < min(host.calls_done for host in hosts):
                    self._compare(compared)
                    compared += 1
            elif self._shown.instructions > self._most:
                raise Hang(f"no end after {self._most:,} instructions", self._where())

    def _where(self) -> str:
        return " | ".join(f"rank {rank} {one.places()}" for rank, one in self._launches.items())

    def _take(self, host: Host) -> None:
        """Begin what a host asks for."""
        if host.asked is None:
            return
        kernel, args = host.asked
        begin = time.perf_counter()
        compiled = compile_launch(Launch(kernel, args), self._hardware)
        program = self._programs.get(compiled.cache_key)
        if program is None:
            program = self._programs[compiled.cache_key] = Program(decode(compiled.text))
        self.compiling += time.perf_counter() - begin
        address = partial(self._address, home=host.rank)
        values = list(_values(kernel, args, program.listing, address))
        grid, tactics = _dimensions(kernel.grid), self._tactics
        if kernel.options.get("launch_cooperative_grid"):
            tactics = replace(tactics, resident=max(tactics.resident, math.prod(grid)))
        self._launches[host.rank] = KernelRun(
            program, grid, values, compiled.resources.shared_memory, self._gpus[host.rank],
            self._timing, tactics,
        )  # fmt: skip

    def _finish(self, host: Host) -> None:
        """A launch has ended: let its host go on."""
        del self._launches[host.rank]
        assert host.asked is not None
        for arg in flat(host.asked[1]):
            if isinstance(arg, torch.Tensor) and not self._memory.holds(arg):
                storage, copy = self._mirrors[arg.untyped_storage().data_ptr()]
                storage.copy_(copy)
        host.go_on()
        self._take(host)

    def _address(self, tensor: torch.Tensor, home: int) -> int:
        """A tensor's address for kernels; a plan's own memory is copied in, and later out."""
        if self._memory.holds(tensor):
            return tensor.data_ptr()
        storage = tensor.untyped_storage()
        mirror = self._mirrors.get(storage.data_ptr())
        if mirror is None or mirror[0].numel() != storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            mirror = flat, self._memory.empty(storage.nbytes(), torch.uint8, home)
            self._mirrors[storage.data_ptr()] = mirror
        mirror[1].copy_(mirror[0])
        return mirror[1].data_ptr() + int(tensor.storage_offset()) * tensor.element_size()

    def _compare(self, call: int) -> None:
        """Compare the results of a call that all ranks have made."""
        for rank in range(self._shown.problem.world_size):
            worst = self._difference(rank, call).max().item()
            self._shown.error = max(self._shown.error, worst if worst == worst else float("inf"))
            if self._shown.error > 1:
                self._shown.verdict = "wrong"

    def _compare_given_up(self, rank: int, fabric: ExecutedFabric) -> None:
        """What a rank returns that waited in vain is NaN or right, and it says so."""
        difference = self._difference(rank, 0)
        is_nan = difference.isnan()
        try:
            fabric.pool.check()
        except PeerTimeout as error:
            self._shown.gave_up = error.message
        else:
            if is_nan.any():
                self._fail_to_give_up(f"rank {rank} returned NaN, and reported no timeout")
        if (difference[~is_nan] > 1).any():
            self._fail_to_give_up(f"rank {rank} returned wrong numbers where it gave up")

    def _fail_to_give_up(self, details: str) -> None:
        self._shown.verdict, self._shown.details = "wrong", details

    def _difference(self, rank: int, call: int) -> torch.Tensor:
        """From the reference, in units of what is allowed: each part may be rounded once."""
        problem, op = self._shown.problem, registry.operation(self._shown.op)
        output = op.result(problem, self._outputs[rank][call])
        seed, cpu = self._shown.seed + call, torch.device("cpu")
        expected = op.reference(problem, rank, seed, cpu, self._of_integers)
        step = problem.world_size * torch.finfo(getattr(torch, problem.dtype)).eps
        allowed = step * (expected.abs() + expected.abs().max() / 4 + 1e-30)
        return (output.double() - expected).abs() / allowed


def _dimensions(grid: int | tuple[int, ...]) -> tuple[int, int, int]:
    """A grid in three dimensions."""
    x, y, z = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
    return x, y, z


def _values(
    kernel: Kernel, args: tuple[Any, ...], listing: Listing, address: Callable[[torch.Tensor], int]
) -> Iterator[int]:
    """The arguments that the compiled kernel still has: neither constants nor ones.

    Raises:
        ExecutionError: they are not those that its text names.
    """
    named = [argument for argument in listing.arguments if not argument.kind.startswith("hidden_")]
    kinds = iter(named)
    params = [parameter for parameter in kernel.function.params if not parameter.is_constexpr]
    for param, value in zip(params, args, strict=False):
        for arg in flat((value,)):
            if arg is None or (type(arg) is int and arg == 1 and not param.do_not_specialize):
                continue
            is_tensor = isinstance(arg, torch.Tensor)
            expected = next(kinds, None)
            if expected is None or is_tensor != (expected.kind == "global_buffer"):
                raise ExecutionError(f"{listing.name}: argument {param.name} is not in its text")
            if is_tensor:
                yield address(arg)
            else:
                yield bits_of_float(arg) if isinstance(arg, float) else int(arg)
