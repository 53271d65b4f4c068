"""Programs made of decoded kernels, and launches of them: workgroups, waves, barriers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from random import Random
from typing import TypeAlias

import numpy as np
import torch

from taxfree_check.executed import (
    interpreter,
    matrix,
    scalar,
    scalar_memory,
    shared,
    vector,
    vector_memory,
)
from taxfree_check.executed.caches import GpuMemory, View
from taxfree_check.executed.decode import Instruction, Listing
from taxfree_check.executed.encoding import INSTRUCTION, Form, Row
from taxfree_check.executed.errors import BadAccess, Hang, UnknownInstruction
from taxfree_check.executed.flight import OperationTiming
from taxfree_check.executed.lanes import WORD
from taxfree_check.executed.lds import SharedMemory
from taxfree_check.executed.operands import row
from taxfree_check.executed.tactics import Tactics
from taxfree_check.executed.wave import AGAIN, ASLEEP, AT_BARRIER, END, Step, Wave

_QUANTUM = 100  # instructions of a wave's turn at most
_FICKLENESS = 0.05  # the chance, each turn, that a wave's priority changes


class Program:
    """A kernel ready to be executed.

    Args:
        listing: the decoded kernel.

    Attributes:
        rows: its instructions, as records.
        steps: functions for those that are not compiled; else None.
        hits: for each instruction, whether it was executed.

    Raises:
        UnknownInstruction: the executor does not know one; names it.
    """

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        _require_no_clamped_halves(listing)
        count = len(listing.instructions)
        self.rows = np.zeros(count + 1, INSTRUCTION)  # at the last one, compiled code stops
        self.steps: list[Step | None] = [None] * count
        self.hits = bytearray(count)
        for index, instruction in enumerate(listing.instructions):
            built = _build(instruction, listing.labels)
            if callable(built):
                self.steps[index] = built
            else:
                self.rows[index] = built
            if instruction.opcode == "s_waitcnt":
                vector, local = scalar.left_in_flight(instruction)
                self.rows[index] = row(Form.WAIT, vector=vector, local=local)

    def step(self, index: int) -> Step:
        """The function that executes an instruction."""
        return self.steps[index] or interpreter.alone(self.rows[index])

    def with_steps(self, steps: Mapping[int, Step]) -> Program:
        """The same, but for some steps; as if it had never run."""
        changed = copy(self)
        changed.rows, changed.steps = self.rows.copy(), self.steps.copy()
        changed.hits = bytearray(len(self.steps))
        for index, step in steps.items():
            changed.rows["form"][index], changed.steps[index] = Form.PYTHON, step
        return changed


def _require_no_clamped_halves(listing: Listing) -> None:
    """The mode in which conversions to fp8 clamp is also that of float16, where it is not modelled.

    Raises:
        UnknownInstruction: the kernel has both.
    """
    opcodes = {instruction.opcode for instruction in listing.instructions}
    if "s_setreg_imm32_b32" in opcodes and (halves := opcodes & vector.MAKES_HALVES):
        raise UnknownInstruction(
            f"{', '.join(sorted(halves))}: clamping of float16 is not modelled"
        )


def build_step(instruction: Instruction, labels: Mapping[str, int]) -> Step:
    """Make the function that an instruction is.

    Raises:
        UnknownInstruction: the executor does not know it.
    """
    built = _build(instruction, labels)
    return built if callable(built) else interpreter.alone(built)


def _build(instruction: Instruction, labels: Mapping[str, int]) -> Row | Step:
    family = instruction.opcode.split("_")[0]
    if family == "s":
        if instruction.opcode.startswith("s_load"):
            return scalar_memory.build(instruction)
        return scalar.build(instruction, labels)
    if family == "v":
        return (
            matrix.build(instruction) if "mfma" in instruction.opcode else vector.build(instruction)
        )
    return shared.build(instruction) if family == "ds" else vector_memory.build(instruction)


Grid: TypeAlias = tuple[int, int, int]


def argument_bytes(listing: Listing, values: Sequence[int], grid: Grid) -> bytes:
    """The block of a kernel's arguments.

    Args:
        values: integers and addresses, for the arguments that the caller gives.
        grid: workgroups in each dimension.
    """
    hidden = {
        **{f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid, strict=True)},
        "hidden_group_size_x": listing.threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1,
        "hidden_grid_dims": max(axis + 1 for axis in range(3) if grid[axis] > 1 or not axis),
    }  # fmt: skip
    block = bytearray(listing.argument_bytes)
    remaining = iter(values)
    for argument in listing.arguments:
        value = (
            hidden.get(argument.kind, 0)
            if argument.kind.startswith("hidden_")
            else next(remaining, 0)
        )
        mask = (1 << 8 * argument.size) - 1
        block[argument.offset : argument.offset + argument.size] = (value & mask).to_bytes(
            argument.size, "little"
        )
    return bytes(block)


class Workgroup:
    """The waves of one program, and what they share."""

    def __init__(self, launch: KernelRun, workgroup: Grid, view: View) -> None:
        listing = launch.program.listing
        ids = [
            id_ for id_, is_wanted in zip(workgroup, listing.wanted_ids, strict=True) if is_wanted
        ]
        self.shared = SharedMemory(launch.shared_bytes, launch.timing.poison)
        self.waves = [
            Wave(launch.program, self, view, launch.timing, wave)
            for wave in range(listing.threads // 64)
        ]
        for wave in self.waves:
            pointer = listing.pointer_register
            wave.s[pointer : pointer + 2] = launch.arguments & WORD, launch.arguments >> 32
            wave.s[listing.user_registers : listing.user_registers + len(ids)] = ids

    @property
    def has_ended(self) -> bool:
        return all(wave.state == END for wave in self.waves)

    def pass_barrier(self) -> None:
        """Let waves go on that wait at the barrier, if all that have not ended do."""
        if all(wave.state in (AT_BARRIER, END) for wave in self.waves):
            for wave in self.waves:
                if wave.state == AT_BARRIER:
                    wave.state = 0


class KernelRun:
    """A run of a kernel on one GPU: workgroups start in the order of their ids as others end.

    Args:
        program: what runs.
        grid: workgroups in each dimension.
        values: arguments: integers and addresses.
        shared_bytes: of LDS.
        gpu: where it runs.
        timing: of its memory operations.
        tactics: of the run.
    """

    def __init__(
        self,
        program: Program,
        grid: Grid,
        values: Sequence[int],
        shared_bytes: int,
        gpu: GpuMemory,
        timing: OperationTiming,
        tactics: Tactics,
    ) -> None:
        self.program, self.shared_bytes, self.timing = program, shared_bytes, timing
        self._gpu, self._tactics = gpu, tactics
        block = argument_bytes(program.listing, values, grid)
        kept = gpu.memory.empty(len(block), torch.uint8)
        kept.copy_(torch.frombuffer(bytearray(block), dtype=torch.uint8))
        self.arguments = kept.data_ptr()
        x, y, z = map(range, grid)
        self._waiting = enumerate((at_x, at_y, at_z) for at_z in z for at_y in y for at_x in x)
        self._groups: list[Workgroup] = []
        self._waves: list[Wave] = []
        gpu.begin_launch()
        for _ in range(tactics.resident):
            self._start_next()
        self._waves = [wave for group in self._groups for wave in group.waves]

    @property
    def has_ended(self) -> bool:
        return not self._groups

    def ready(self) -> list[Wave]:
        """The waves that can go on.

        Raises:
            Hang: all wait at barriers that others have passed.
        """
        waves = [
            wave
            for wave in self._waves
            if not wave.state or (wave.state == ASLEEP and wave.has_woken)
        ]
        if not waves and all(wave.state in (AT_BARRIER, END) for wave in self._waves):
            raise Hang(f"{self.program.listing.name}: all waves wait at barriers", self.places())
        return waves

    def turn(self, wave: Wave) -> int:
        """Let a wave run for a while; returns how many instructions it executed."""
        rng, before = self.timing.rng, wave.executed
        self._complete_some(wave, rng)
        try:
            stopped = interpreter.run(wave, rng.randint(1, _QUANTUM))
        except BadAccess as error:
            text = self.program.listing.instructions[wave.pc].text
            raise BadAccess(error.message, f"{self.program.listing.name}, at: {text}") from None
        if stopped in (AT_BARRIER, END, ASLEEP):
            wave.state = stopped
            self._regroup(next(group for group in self._groups if group is wave.group))
        if stopped == AGAIN:
            wave.priority -= rng.choice((1, 9))  # most others go first, for long
        elif rng.random() < _FICKLENESS:
            wave.priority = rng.random()
        if self._tactics.churn and rng.random() < self._tactics.churn:
            self._gpu.churn(rng)
        return wave.executed - before

    def wake(self) -> None:
        """Let all that is in flight take effect, and waves that sleep poll once more."""
        for wave in self._waves:
            self.timing.drain(wave.vector_queue, 0)
            wave.wake()

    def places(self) -> str:
        """Where the waves are."""
        instructions = self.program.listing.instructions
        texts = {instructions[wave.pc].text for wave in self._waves if wave.state != END}
        return "at: " + "; ".join(sorted(texts)[:4])

    def _complete_some(self, wave: Wave, rng: Random) -> None:
        if wave.vector_queue and rng.random() < self.timing.promptness:
            self.timing.complete_any(wave.vector_queue)

    def _regroup(self, group: Workgroup) -> None:
        if not group.has_ended:
            group.pass_barrier()
            return
        self._groups.remove(group)
        self._start_next()
        self._waves = [wave for group in self._groups for wave in group.waves]
        if self.has_ended:
            self._gpu.end_launch()

    def _start_next(self) -> None:
        number, position = next(self._waiting, (0, None))
        if position is None:
            return
        views = self._gpu.views[number % len(self._gpu.views)]
        self._groups.append(Workgroup(self, position, self.timing.rng.choice(views)))
