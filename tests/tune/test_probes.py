"""The measuring kernels, interpreted in one process; and compiled for GPUs that are not here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from taxfree_kernels.device import peers
from taxfree_kernels.device.peers import Group
from taxfree_tune.measuring import probes
from taxfree_tune.profiling import step_clock
from tests.check.cross_compile.conftest import run_python

WORLD = 2
COMPILE = """
import json, sys
import torch
from taxfree_check.cross_compile.asm_checks import violations
from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import Launch
from taxfree_tune.measuring import probes
from taxfree_tune.profiling import step_clock
from taxfree_kernels.device.peers import Group
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import Kernel

def tensor(dtype):
    return torch.empty(1 << 20, dtype=dtype, device="meta")

f32, i32, i64 = map(tensor, (torch.float32, torch.int32, torch.int64))
found = {}
for name in ("h100", "mi300x"):
    gpu = KNOWN[name]
    play = {"GROUP": Group(8, gpu.backend)}
    warps = {"num_warps": 1024 // gpu.warp_size}
    copy = (f32, f32, 4096, i64, 1, 2)
    launches = {
        "push": (probes.transfer, {"PULL": False, "BLOCK": 4096}, {"num_warps": 8}, copy),
        "pull": (probes.transfer, {"PULL": True, "BLOCK": 4096}, {"num_warps": 8}, copy),
        "spread": (
            probes.spread, {"WORLD": 8, "BLOCK": 4096}, {"num_warps": 8}, (f32, f32, 4096, i64, 1)
        ),
        "read": (probes.read, {"BLOCK": 8192}, {"num_warps": 8}, (i32, i32)),
        "play": (
            step_clock.exchange_clocks, play, {"num_warps": 1}, (i64, i64, i64, 0, 1, 1, 50)
        ),
        "hand over": (
            probes.hand_over, play | {"BLOCK": 1024}, {"num_warps": 1},
            (i64, i64, i64, i64, 0, 1, 1, 50),
        ),
        "order": (
            probes.start_order, {"XCDS": gpu.num_xcds, "BACKEND": gpu.backend, "BUSY": 20}, warps,
            (i32, i32, i32),
        ),
    }
    for what, (function, constants, options, args) in launches.items():
        made = compile_launch(Launch(Kernel(function, 8, constants, options), args), gpu)
        broken = [str(violation) for violation in violations(made)]
        found.setdefault(name, {})[what] = {"text": made.text, "broken": broken}
json.dump(found, sys.stdout)
"""


@pytest.fixture
def heaps() -> tuple[list[torch.Tensor], torch.Tensor]:
    """The heaps of two ranks that are both here, and where they are."""
    arenas = [torch.zeros(4096, dtype=torch.float32) for _ in range(WORLD)]
    return arenas, torch.tensor([arena.data_ptr() for arena in arenas])


class TestTransfer:
    @pytest.mark.parametrize("rank", range(WORLD))
    @pytest.mark.parametrize("pull", [False, True])
    def test_copies_between_the_own_memory_and_the_peers(self, heaps, rank, pull):
        arenas, bases = heaps
        peer = 1 - rank
        source_rank, target_rank = (peer, rank) if pull else (rank, peer)
        arenas[source_rank][:192] = torch.arange(192.0)
        own = arenas[rank]
        probes.transfer[(3,)](own[1024:], own, 64, bases, rank, peer, PULL=pull, BLOCK=32)
        assert torch.equal(arenas[target_rank][1024:1216], torch.arange(192.0))
        assert not arenas[target_rank][1216:].any()
        assert not arenas[source_rank][1024:].any()

    def test_within_a_rank_takes_any_tensors(self, heaps):
        _, bases = heaps
        source, target = torch.arange(256.0), torch.zeros(256)
        probes.transfer[(4,)](target, source, 64, bases, 1, 1, PULL=False, BLOCK=64)
        assert torch.equal(target, source)


class TestSpread:
    def test_each_program_sends_its_chunk_to_the_next_peer(self):
        world, rank, chunk = 4, 2, 32
        arenas = [torch.zeros(4096, dtype=torch.float32) for _ in range(world)]
        bases = torch.tensor([arena.data_ptr() for arena in arenas])
        source = torch.arange(1.0, 4 * chunk + 1)
        probes.spread[(4,)](arenas[rank], source, chunk, bases, rank, WORLD=world, BLOCK=16)
        to = [3, 0, 1, 3]  # the rank after this one, and so on, and again
        for peer, arena in enumerate(arenas):
            sent = [peer == wanted for wanted in to for _ in range(chunk)]
            assert torch.equal(arena[: 4 * chunk], torch.where(torch.tensor(sent), source, 0.0))
            assert not arena[4 * chunk :].any()


def test_reading_finds_the_maximum_of_each_block():
    source = torch.arange(64, dtype=torch.int32)
    maxima = torch.full((5,), -1, dtype=torch.int32)
    probes.read[(4,)](maxima, source, BLOCK=16)
    assert maxima.tolist() == [15, 31, 47, 63, -1]


def control_blocks(signalled: int, more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Control blocks of two ranks, `more` words behind each, and the report of rank 0.

    To rank 0, rank 1 has signalled the round `signalled`.
    """
    report = torch.zeros(peers.REPORT_WORDS, dtype=torch.int64)
    words = torch.zeros(2, peers.SIGNALS.value + WORLD + more, dtype=torch.int64)
    words[:, peers.LIMIT.value] = 20_000  # microseconds
    words[:, peers.STATUS.value] = report.data_ptr()
    words[0, peers.SIGNALS.value + 1] = signalled
    return words, report


class TestPingPong:
    def play(self, words: torch.Tensor, first_round: int, rounds: int) -> None:
        bases = torch.tensor([words[0].data_ptr(), words[1].data_ptr()])
        log = torch.zeros(rounds, 2, dtype=torch.int64)
        group = Group(WORLD, "interpreter")
        step_clock.exchange_clocks[(1,)](
            log, words[0], bases, 0, 1, first_round, rounds, GROUP=group
        )

    def test_signals_each_round_to_the_peer(self):
        words, report = control_blocks(signalled=7)
        self.play(words, first_round=5, rounds=3)
        assert words[1, peers.SIGNALS.value] == 7
        assert not report.any()

    def test_ends_at_the_first_answer_that_does_not_come(self):
        words, report = control_blocks(signalled=2)
        self.play(words, first_round=1, rounds=1000)
        assert words[1, peers.SIGNALS.value] == 3
        code, rank, _, _, source, wanted, seen, _ = report.tolist()
        assert (code, rank, source, wanted, seen) == (peers.TIMED_OUT.value, 0, 1, 3, 2)


class TestHandOver:
    @pytest.mark.parametrize("stale_words", [0, 1, 16])
    def test_words_of_an_earlier_round_are_counted(self, stale_words):
        words, report = control_blocks(signalled=7, more=16)
        inboxes = words[:, peers.SIGNALS.value + WORLD :]
        inboxes[0] = 7
        inboxes[0, :stale_words] = 6
        found = torch.full((16,), -1)
        bases = torch.tensor([words[0].data_ptr(), words[1].data_ptr()])
        probes.hand_over[(1,)](
            inboxes[0], found, words[0], bases, 0, 1, 7, 1,
            GROUP=Group(WORLD, "interpreter"), BLOCK=16,
        )  # fmt: skip
        assert found.tolist() == [1] * stale_words + [0] * (16 - stale_words)
        assert inboxes[1].tolist() == [7] * 16
        assert not report.any()


def test_tickets_are_given_in_the_order_of_starts():
    counter = torch.zeros(2, dtype=torch.int32)
    tickets, chiplets = torch.full((2, 16), -1, dtype=torch.int32)
    probes.start_order[(16,)](counter, tickets, chiplets, XCDS=3, BACKEND="interpreter", BUSY=3)
    assert tickets.tolist() == list(range(16))
    assert chiplets.tolist() == [program % 3 for program in range(16)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, dict[str, Any]]]:
    """GPU and kernel -> assembly and broken rules, from a process that does not interpret."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return json.loads(run_python("-c", COMPILE, TRITON_CACHE_DIR=cache))


class TestCompiled:
    @pytest.mark.parametrize("kernel", ["push", "pull", "spread"])
    def test_copies_move_16_bytes_at_once(self, compiled, kernel):
        for gpu, accesses in (
            ("h100", ("ld.global.v4.b32", "st.global.v4.b32")),
            ("mi300x", ("load_dwordx4", "store_dwordx4")),
        ):
            text = compiled[gpu][kernel]["text"]
            assert all(access in text for access in accesses)

    @pytest.mark.parametrize(
        ("gpu", "load"), [("h100", "ld.global.v4.b32"), ("mi300x", "load_dwordx4")]
    )
    def test_a_thread_that_reads_has_many_loads_under_way(self, compiled, gpu, load):
        assert compiled[gpu]["read"]["text"].count(load) >= 4

    def test_programs_of_the_order_probe_stay_busy(self, compiled):
        assert compiled["h100"]["order"]["text"].count("ld.volatile.global") == 20
        assert compiled["mi300x"]["order"]["text"].count("load_dword ") == 20

    def test_amd_tells_the_chiplet(self, compiled):
        assert "hwreg(HW_REG_XCC_ID)" in compiled["mi300x"]["order"]["text"]

    def test_synchronisation_keeps_the_rules_of_all_kernels(self, compiled):
        assert compiled["h100"]["play"]["broken"] == []
        broken = compiled["mi300x"]["play"]["broken"]
        # one wave needs no barriers, and AMD's compiler leaves them out
        assert [rule for rule in broken if not rule.startswith("barrier_")] == []
