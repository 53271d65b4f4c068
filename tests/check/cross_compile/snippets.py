"""Small kernels that each break or keep one rule, compiled in a process of their own.

A script: its argument is the device, its output is JSON.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import Group, Peers

#: kernels that only Hopper can run.
HOPPER = (
    "bulk_store_then_signal",
    "bulk_copy_after_wait",
    "good_bulk_copy",
    "load_before_early_wait",
    "generation_before_early_wait",
    "ticket_before_early_wait",
    "early_wait_on_one_path",
    "early_without_a_wait",
    "early_wait_after_next_launch",
    "good_early_wait",
    "good_early_wait_behind",
    "good_early_wait_in_a_chain",
)
#: kernels that only CDNA can run.
CDNA = ("words_polled_once_by_one_warp",)


@triton.jit
def _drain(GROUP: tl.constexpr):
    if GROUP.BACKEND == "hip":
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _fill(data, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(data + at, at.to(data.dtype.element_ty))


@triton.jit
def _signal(word, want, GROUP: tl.constexpr):
    _drain(GROUP)
    tl.debug_barrier()
    tl.atomic_xchg(word, want, sem="release", scope="sys")


@triton.jit
def good_signal(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _fill(data, BLOCK)
    _signal(word, want, GROUP)


@triton.jit
def signal_without_barrier(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _fill(data, BLOCK)
    tl.atomic_xchg(word, want, sem="release", scope="sys")


@triton.jit
def signal_without_drain(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _fill(data, BLOCK)
    tl.debug_barrier()
    tl.atomic_xchg(word, want, sem="release", scope="sys")


@triton.jit
def signal_to_the_device(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _fill(data, BLOCK)
    _drain(GROUP)
    tl.debug_barrier()
    tl.atomic_xchg(word, want, sem="release", scope="gpu")


@triton.jit
def good_signal_of_a_chiplet(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _fill(data, BLOCK)
    peers = Peers(word, word, 0, want)
    counters = tl.cast(out, tl.pointer_type(tl.int32))
    sync.signal_by_chiplet(tl.program_id(0), 16, counters, peers, GROUP, 8)


@triton.jit
def arrival_without_drain(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _fill(data, BLOCK)
    tl.debug_barrier()
    if tl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == 1:
        _signal(word + 1, want, GROUP)


@triton.jit
def arrival_then_signal_to_the_device(
    data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    _fill(data, BLOCK)
    _drain(GROUP)
    tl.debug_barrier()
    if tl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == 1:
        _drain(GROUP)
        tl.debug_barrier()
        tl.atomic_xchg(word + 1, want, sem="release", scope="gpu")


@triton.jit
def bulk_store_then_signal(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    source = tl.make_tensor_descriptor(data, [BLOCK, BLOCK], [BLOCK, 1], [64, 64])
    target = tl.make_tensor_descriptor(out, [BLOCK, BLOCK], [BLOCK, 1], [64, 64])
    target.store([0, 0], source.load([0, 0]))
    _signal(word, want, GROUP)


@triton.jit
def _read(data, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(data + at))


@triton.jit
def _poll(word, want, limit):
    """Bounded: without its second condition 3.6 miscompiles the loop for CDNA."""
    seen = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
    polls = tl.zeros((), tl.int64)
    while (seen < want) & (polls < limit):
        seen = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
        polls += 1


@triton.jit
def _acquire_and_read(data, word, want, out, BLOCK: tl.constexpr):
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    if seen >= want:
        _read(data, out, BLOCK)


@triton.jit
def _wait(word, want):
    _poll(word, want, tl.load(word + 1))
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    return seen


@triton.jit
def good_wait(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _poll(word, want, tl.load(word + 1))
    _acquire_and_read(data, word, want, out, BLOCK)


@triton.jit
def good_relay(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Two waits and two signals: what one of them lacks, the other has."""
    for _ in tl.static_range(2):
        seen = _wait(word, want)
        if seen >= want:
            _read(data, out, BLOCK)
        _signal(word + 2, want, GROUP)
        word += 4


@triton.jit
def _read_box(data, out, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(data, [BLOCK, BLOCK], [BLOCK, 1], [64, 64])
    at = 64 * tl.arange(0, 64)[:, None] + tl.arange(0, 64)[None, :]
    tl.store(out + at, source.load([0, 0]))


@triton.jit
def bulk_copy_after_wait(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    seen = _wait(word, want)
    if seen >= want:
        _read_box(data, out, BLOCK)


@triton.jit
def good_bulk_copy(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    seen = _wait(word, want)
    if seen >= want:
        sync.before_tma_loads(GROUP)
        _read_box(data, out, BLOCK)


@triton.jit
def load_before_early_wait(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    first = tl.load(data)
    sync.gdc_wait(GROUP)
    tl.store(out, first.to(tl.float32))


@triton.jit
def generation_before_early_wait(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    generation = tl.atomic_add(word, 0, sem="relaxed", scope="gpu")
    sync.gdc_wait(GROUP)
    _read(data + generation, out, BLOCK)


@triton.jit
def ticket_before_early_wait(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    ticket = tl.atomic_add(word, 1, sem="relaxed", scope="gpu")
    sync.gdc_wait(GROUP)
    _read(data + ticket, out, BLOCK)


@triton.jit
def early_wait_on_one_path(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    if want > 0:
        sync.gdc_wait(GROUP)
    _read(data, out, BLOCK)


@triton.jit
def early_without_a_wait(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _read(data, out, BLOCK)


@triton.jit
def good_early_wait(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    sync.gdc_wait(GROUP)
    _read(data, out, BLOCK)


@triton.jit
def good_early_wait_behind(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    generation = tl.atomic_add(word, 0, sem="relaxed", scope="gpu")
    sync.gdc_wait(GROUP)
    _read(data + generation, out, BLOCK)


@triton.jit
def good_early_wait_in_a_chain(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    sync.gdc_wait(GROUP)
    sync.gdc_launch_dependents(GROUP)
    _read(data, out, BLOCK)


@triton.jit
def early_wait_after_next_launch(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    sync.gdc_launch_dependents(GROUP)
    sync.gdc_wait(GROUP)
    _read(data, out, BLOCK)


@triton.jit
def unbounded_wait(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    seen = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
    while seen < want:
        seen = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
    _acquire_and_read(data, word, want, out, BLOCK)


@triton.jit
def acquire_unused(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _poll(word, want, tl.load(word + 1))
    tl.atomic_add(word, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    _read(data, out, BLOCK)


@triton.jit
def poll_by_plain_load(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    while tl.load(word) < want:
        pass
    _acquire_and_read(data, word, want, out, BLOCK)


@triton.jit
def poll_by_volatile_load(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    seen = tl.load(word, volatile=True)
    while seen < want:
        seen = tl.load(word, volatile=True)
    _acquire_and_read(data, word, want, out, BLOCK)


@triton.jit
def poll_by_swap(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    while tl.atomic_cas(word, want, want, sem="acquire", scope="sys") < want:
        pass
    tl.debug_barrier()
    _read(data, out, BLOCK)


@triton.jit
def _send_and_receive(data, word, want, words, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    at = tl.arange(0, BLOCK)
    peers = Peers(word, word, 0, want)
    packets.send(peers, words + at + BLOCK, tl.load(data + at).to(tl.int32), 0)
    seen, arrived = packets.receive(peers, words + at, 0, GROUP)
    if arrived:
        tl.store(data + at, seen.to(tl.float16))


@triton.jit
def good_words(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    words = tl.cast(out, tl.pointer_type(tl.int64))
    _send_and_receive(data, word, want, words, BLOCK, GROUP)


@triton.jit
def good_lamport_words(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    words = tl.cast(out, tl.pointer_type(tl.int32))
    _send_and_receive(data, word, want, words, BLOCK, GROUP)


@triton.jit
def good_rows_of_words(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The second half of the rows is not sent."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, BLOCK)[None, :]
    words = tl.cast(out, tl.pointer_type(tl.int32)) + row * BLOCK + column
    payload = tl.load(data + row * BLOCK + column).to(tl.int32)
    packets.send(Peers(word, word, 0, want), words, payload, 1, mask=row < 8)


@triton.jit
def good_words_in_padded_rows(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Lanes behind the end of a row load its last word again."""
    row, column = tl.arange(0, 4)[:, None], tl.arange(0, BLOCK)[None, :]
    at = row * BLOCK + tl.minimum(column, BLOCK // 2)
    words = tl.cast(out, tl.pointer_type(tl.int64)) + at
    seen, arrived = packets.receive(Peers(word, word, 0, want), words, 0, GROUP)
    if arrived:
        tl.store(data + row * BLOCK + column, seen.to(tl.float16))


@triton.jit
def good_words_of_one_warp(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    words = tl.cast(out, tl.pointer_type(tl.int64)) + tl.arange(0, BLOCK)
    seen, arrived = packets.receive(Peers(word, word, 0, want), words, 0, GROUP)
    tl.store(data + tl.arange(0, BLOCK), tl.where(arrived, seen, 0).to(tl.float16))


@triton.jit
def words_polled_once_by_one_warp(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    words = tl.cast(out, tl.pointer_type(tl.int64)) + tl.arange(0, BLOCK)
    limit, polls = tl.load(word), tl.zeros((), tl.int64)
    seen = tl.load(words, volatile=True, cache_modifier=".cv")
    while (tl.min(seen >> 32) < want) & (polls < limit):
        seen = tl.load(words, volatile=True, cache_modifier=".cv")
        polls += 1
    tl.store(data + tl.arange(0, BLOCK), seen.to(tl.float16))


@triton.jit
def words_polled_by_several_threads(
    data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    words = tl.cast(out, tl.pointer_type(tl.int64)) + tl.arange(0, 32)
    seen, polls = packets._load_words(words, GROUP), tl.zeros((), tl.int64)
    while (tl.min(seen >> 32) < want) & (polls < tl.load(word)):
        seen = packets._load_words(words, GROUP)
        polls += 1
    tl.store(data + tl.arange(0, 32), seen.to(tl.float16))


@triton.jit
def words_polled_in_a_cache(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    at = tl.arange(0, BLOCK)
    words = tl.cast(out, tl.pointer_type(tl.int64)) + at
    seen, polls = tl.load(words, volatile=True), tl.zeros((), tl.int64)
    while (tl.min(seen >> 32) < want) & (polls < tl.load(word)):
        seen = tl.load(words, volatile=True)
        polls += 1
    tl.store(data + at, seen.to(tl.float16))


@triton.jit
def _multiply(data, word, want, out, steps, WAIT: tl.constexpr, ALIGNED: tl.constexpr):
    rows, inner = tl.arange(0, 64), tl.arange(0, 64)
    acc = tl.zeros((64, 64), tl.float32)
    first = tl.multiple_of(data + want * 64, 16) if ALIGNED else data + want
    for step in range(steps):
        if WAIT:
            seen = tl.atomic_add(word + step, 0, sem="acquire", scope="sys")
            while seen < want:
                seen = tl.atomic_add(word + step, 0, sem="acquire", scope="sys")
            tl.debug_barrier()
        tile = first + step * 4096 + rows[:, None] * 64 + inner[None, :]
        a, b = tl.load(tile), tl.load(tile + 4096 * steps)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(out + rows[:, None] * 64 + inner[None, :], acc)


@triton.jit
def good_multiply(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _multiply(data, word, want, out, BLOCK, False, True)


@triton.jit
def multiply_unaligned(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _multiply(data, word, want, out, BLOCK, False, False)


@triton.jit
def wait_in_k_loop(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _multiply(data, word, want, out, BLOCK, True, True)


@triton.jit
def acquire_in_k_loop(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    rows, inner = tl.arange(0, 64), tl.arange(0, 64)
    acc = tl.zeros((64, 64), tl.float32)
    for step in range(BLOCK):
        seen = tl.atomic_add(word + step, 0, sem="acquire", scope="sys")
        tile = data + step * 4096 + rows[:, None] * 64 + inner[None, :]
        acc = tl.dot(tl.load(tile), tl.load(tile + 4096 * BLOCK), acc)
        acc = tl.where(seen >= want, acc, float("nan"))
    tl.store(out + rows[:, None] * 64 + inner[None, :], acc)


@triton.jit
def multiply_by_adds(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    _multiply(out, word, want, out, BLOCK, False, True)


@triton.jit
def spill(data, word, want, out, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    rows, inner = tl.arange(0, 256), tl.arange(0, 64)
    acc = tl.zeros((256, 256), tl.float32)
    for step in range(BLOCK):
        tile = data + step * 4096 + rows[:, None] * 64 + inner[None, :]
        acc = tl.dot(tl.load(tile), tl.trans(tl.load(tile + 4096 * BLOCK)), acc)
    at = rows[:, None] * 256 + rows[None, :]
    tl.store(out + at, acc)


def _compile(name: str, device: str) -> dict[str, Any]:
    from taxfree_check.cross_compile.compile import compile_launch, matrix_remarks
    from taxfree_check.cross_compile.record import Launch
    from taxfree_kernels.hardware import KNOWN
    from taxfree_kernels.launch import Kernel

    hardware, meta = KNOWN[device], torch.device("meta")
    args = (
        torch.empty(1 << 20, dtype=torch.float16, device=meta),
        torch.empty(64, dtype=torch.int64, device=meta),
        (1 << 40) + 3,  # an int64 that is nothing special
        torch.empty(1 << 20, dtype=torch.float32, device=meta),
    )
    if name == "bulk_store_then_signal":
        args = (*args[:3], args[0])
    constants = {"BLOCK": 256, "GROUP": Group(1, hardware.backend)}
    num_warps = 1 if name.endswith("one_warp") else 4
    options = {"num_warps": num_warps, "num_stages": 3}
    if "early" in name:
        options["launch_pdl"] = True
    kernel = Kernel(globals()[name], 1, constants, options)
    compiled = compile_launch(Launch(kernel, args), hardware)
    return asdict(compiled) | {
        "matrix_remarks": matrix_remarks(compiled.text),
        "begins_call": "behind" not in name,
    }


def main() -> None:
    print(json.dumps({device: _compile_all(device) for device in sys.argv[1:]}))


def _compile_all(device: str) -> dict[str, dict[str, Any]]:
    names = [name for name, value in globals().items() if _is_kernel(name, value)]
    elsewhere = CDNA if device == "h200" else HOPPER
    names = [name for name in names if name not in elsewhere]
    if device == "mi350x":  # stands beside mi300x, where the wrong ones are tried
        names = [name for name in names if name.startswith("good_")]
    return {name: _compile(name, device) for name in names}


def _is_kernel(name: str, value: Any) -> bool:
    return isinstance(value, triton.JITFunction) and not name.startswith("_")


if __name__ == "__main__":
    main()
