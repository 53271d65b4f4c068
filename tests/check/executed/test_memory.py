"""When accesses take effect, where they end, and what caches keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from taxfree_check.executed.caches import DeviceMemory, GpuMemory
from taxfree_check.executed.errors import BadAccess, UnknownInstruction
from taxfree_check.executed.tactics import POISON
from tests.check.executed.machine import LATE, Machine

RELEASED = {  # how a store is released -> who sees it behind an acquire at that scope
    "": (),
    "buffer_wbl2 sc1": ("same GPU",),
    "buffer_wbl2 sc0 sc1": ("same GPU", "peer"),
}


@pytest.fixture
def gpus():
    memory = DeviceMemory()
    made = [GpuMemory(memory), GpuMemory(memory)]
    word = memory.empty(64, torch.int32).zero_()
    for gpu in made:
        gpu.begin_launch()
    return made, word


def wave_on(view, tensor, promptness=1.0):
    machine = Machine(promptness, view)
    machine.wave.s[2:4] = tensor.data_ptr() & 0xFFFFFFFF, tensor.data_ptr() >> 32
    machine.set(0, 0)
    return machine


def reads(machine, *instructions):
    machine.run(*instructions, "global_load_dword v1, v0, s[2:3]", "s_waitcnt vmcnt(0)")
    return int(machine.get(1)[0])


def write(machine, *instructions, scope=""):
    machine.set(1, 42)
    machine.run(f"global_store_dword v0, v1, s[2:3] {scope}", *instructions, "s_waitcnt vmcnt(0)")


@pytest.mark.parametrize("release", RELEASED)
def test_a_release_reaches_as_far_as_its_scope(gpus, release):
    (first, second), word = gpus
    write(wave_on(first.views[0][0], word), *([release] if release else []))
    places = {
        "same GPU": (first.views[1][0], "buffer_inv sc1"),
        "peer": (second.views[0][0], "buffer_inv sc0 sc1"),
    }
    for name, (view, acquire) in places.items():
        assert reads(wave_on(view, word), acquire) == (42 if name in RELEASED[release] else 0)


@pytest.mark.parametrize(
    ("acquire", "seen"), [("", 0), ("buffer_inv sc1", 0), ("buffer_inv sc0 sc1", 42)]
)
def test_what_was_cached_stays_until_an_acquire_of_its_scope(gpus, acquire, seen):
    (first, second), word = gpus
    write(wave_on(first.views[0][0], word), "buffer_wbl2 sc0 sc1")
    reader = wave_on(second.views[0][0], word)
    assert reads(reader, *([acquire] if acquire else [])) == seen


@pytest.mark.parametrize(("scope", "seen"), [("", 0), ("sc1", 0), ("sc0 sc1", 42)])
def test_loads_and_stores_go_as_far_as_their_bits(gpus, scope, seen):
    (first, second), word = gpus
    write(wave_on(first.views[0][0], word), scope=scope)
    machine = wave_on(second.views[0][0], word)
    machine.run("global_load_dword v1, v0, s[2:3] sc0 sc1")
    assert machine.get(1)[0] == seen


def test_atomics_meet_at_their_scope(gpus):
    (first, second), word = gpus
    for gpu, scope in ((first, " sc1"), (second, " sc1"), (second, "")):
        machine = wave_on(gpu.views[0][0], word)
        machine.set(1, 1)
        machine.run("s_mov_b64 exec, 1", f"global_atomic_add v2, v0, v1, s[2:3] sc0{scope}")
    assert machine.get(2)[0] == 2
    assert word[0] == 2  # the one at agent scope has not left its GPU


def test_atomic_sums_of_floats_are_of_all_lanes(gpus):
    (first, _), word = gpus
    machine = wave_on(first.views[0][0], word)
    machine.set(1, np.float32(0.375).view(np.uint32))
    machine.run("s_mov_b64 exec, 7", "global_atomic_add_f32 v0, v1, s[2:3] sc1")
    assert word[:1].view(torch.float32) == 3 * 0.375


def test_a_workgroup_sees_its_own_stores_and_the_chiplet_what_is_invalidated(gpus):
    (first, _), word = gpus
    view, neighbour = first.views[0]
    write(wave_on(view, word))
    assert reads(wave_on(view, word)) == 42
    assert reads(wave_on(neighbour, word)) == 0
    assert reads(wave_on(neighbour, word), "buffer_inv sc0") == 42


def test_a_destination_is_undefined_until_the_wait(gpus):
    (first, _), word = gpus
    machine = wave_on(first.views[0][0], word, LATE)
    machine.run("global_load_dword v1, v0, s[2:3]")
    assert machine.get(1)[0] == POISON
    machine.run("s_waitcnt vmcnt(0)")
    assert machine.get(1)[0] == 0


def test_waits_leave_the_youngest_in_flight(gpus):
    (first, _), word = gpus
    machine = wave_on(first.views[0][0], word, LATE)
    machine.run(
        "global_load_dword v1, v0, s[2:3]",
        "global_load_dword v2, v0, s[2:3] offset:4",
        "s_waitcnt vmcnt(1)",
    )
    assert machine.get(1)[0] == 0
    assert machine.get(2)[0] == POISON


def test_only_accesses_to_other_bytes_overtake(gpus):
    (first, _), word = gpus
    machine = wave_on(first.views[0][0], word, LATE)
    machine.set(1, 5)
    machine.run("global_store_dword v0, v1, s[2:3]", "global_load_dword v2, v0, s[2:3]")
    store, load = machine.wave.vector_queue
    assert not load.may_pass(store)
    machine.run("global_load_dword v3, v0, s[2:3] offset:64")
    assert machine.wave.vector_queue[-1].may_pass(store)


def test_of_two_loads_into_a_register_the_later_one_stays(gpus):
    (first, _), word = gpus
    machine = wave_on(first.views[0][0], word, LATE)
    machine.run(
        "global_load_dwordx2 v[4:5], v0, s[2:3]",
        "global_load_dwordx2 v[3:4], v0, s[2:3] offset:64",
    )
    earlier, later = machine.wave.vector_queue
    assert not later.may_pass(earlier)


def test_an_access_behind_a_tensor_is_an_error(gpus):
    (first, _), word = gpus
    machine = wave_on(first.views[0][0], word)
    with pytest.raises(BadAccess, match="outside of all tensors"):
        machine.run("global_load_dword v1, v0, s[2:3] offset:256")
    machine.run("s_mov_b64 exec, 0", "global_load_dword v1, v0, s[2:3] offset:256")


def test_beyond_the_end_of_a_buffer_loads_give_zero_and_stores_do_nothing(gpus):
    (first, _), word = gpus
    word.fill_(7)
    first.begin_launch()
    machine = wave_on(first.views[0][0], word)
    machine.wave.s[4:8] = *machine.wave.s[2:4], 8, 0
    machine.set(0, 4 * np.arange(64))
    machine.set(1, 9)
    machine.run(
        "buffer_store_dword v1, v0, s[4:7], 0 offen", "buffer_load_dword v2, v0, s[4:7], 0 offen"
    )
    assert machine.get(2).tolist() == [9, 9] + [0] * 62
    first.end_launch()
    assert word.tolist() == [9, 9] + [7] * 62


def test_shared_memory_is_undefined_checked_and_in_order():
    machine = Machine(LATE)
    machine.set(0, 4 * np.arange(64))
    machine.set(1, np.arange(64))
    machine.run("ds_read_b32 v2, v0 offset:512", "ds_write_b32 v0, v1", "ds_read_b32 v3, v0")
    machine.run("s_waitcnt lgkmcnt(0)")
    assert (machine.get(2) == POISON).all()
    assert machine.get(3).tolist() == list(range(64))
    with pytest.raises(BadAccess, match="of LDS"):
        machine.run("ds_read_b32 v2, v0 offset:1000", "s_waitcnt lgkmcnt(0)")


def test_transposed_reads_give_each_lane_a_column():
    machine = Machine()
    halves = np.arange(256, dtype=np.uint16)
    machine.wave.group.shared.store(np.arange(0, 512, 8), halves.view(np.uint32).reshape(64, 2))
    machine.set(0, 8 * np.arange(64))
    machine.run("ds_read_b64_tr_b16 v[2:3], v0", "s_waitcnt lgkmcnt(0)")
    column = machine.wave.registers[2:4, 5].copy().view(np.uint16)
    assert column.tolist() == [5, 21, 37, 53]


def test_evicting_loses_nothing(gpus):
    (first, _), word = gpus
    write(wave_on(first.views[0][0], word))
    first.chiplets[0].write_back(first.memory.used)
    first.agent.write_back(first.memory.used)
    assert word[0] == 42


def test_a_wave_reads_the_number_of_its_chiplet(gpus):
    (gpu, _), _ = gpus
    for number, units in enumerate(gpu.views):
        for view in units:
            machine = Machine(view=view)
            machine.run("s_getreg_b32 s4, hwreg(HW_REG_XCC_ID)")
            assert machine.wave.s[4] == number


def test_other_hardware_registers_are_unknown(gpus):
    with pytest.raises(UnknownInstruction, match="HW_REG_MODE"):
        Machine().run("s_getreg_b32 s4, hwreg(HW_REG_MODE)")
