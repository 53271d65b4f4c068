"""Each assembly check finds the kernels that break its rule, as real compilers compile them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from taxfree_check.cross_compile.asm_checks import CHECKS, SPEED_CHECKS, violations
from taxfree_check.cross_compile.assembly import Role
from taxfree_check.cross_compile.compile import matrix_remarks
from taxfree_check.cross_compile.compiled_kernel import CompiledKernel
from taxfree_check.cross_compile.resources import Resources
from tests.tritons import BEFORE_3_8, NEWEST, TRITONS, before

from .conftest import Snippets

#: kernel, device, compilers, checks that must find it.
WRONG = [
    ("signal_without_barrier", "h200", BEFORE_3_8, {"barrier_before_release"}),
    ("signal_without_barrier", "mi300x", before(9), {"barrier_before_release"}),
    ("signal_without_barrier", "mi300x", TRITONS[len(before(9)) :], {"stores_drained"}),
    ("signal_without_drain", "mi300x", TRITONS, {"stores_drained"}),
    ("signal_to_the_device", "h200", TRITONS, {"system_scope"}),
    ("signal_to_the_device", "mi300x", TRITONS, {"system_scope"}),
    ("arrival_without_drain", "mi300x", TRITONS, {"stores_drained"}),
    ("arrival_then_signal_to_the_device", "h200", TRITONS, {"system_scope"}),
    ("arrival_then_signal_to_the_device", "mi300x", TRITONS, {"system_scope"}),
    ("bulk_store_then_signal", "h200", BEFORE_3_8, {"bulk_stores_done"}),
    ("bulk_copy_after_wait", "h200", TRITONS, {"proxy_fence_before_bulk_copies"}),
    ("load_before_early_wait", "h200", TRITONS, {"nothing_before_early_wait"}),
    ("generation_before_early_wait", "h200", TRITONS, {"nothing_before_early_wait"}),
    ("ticket_before_early_wait", "h200", TRITONS, {"nothing_before_early_wait"}),
    ("early_wait_on_one_path", "h200", TRITONS, {"nothing_before_early_wait"}),
    ("early_without_a_wait", "h200", TRITONS, {"nothing_before_early_wait"}),
    ("early_wait_after_next_launch", "h200", TRITONS, {"next_launch_after_early_wait"}),
    ("acquire_unused", "h200", BEFORE_3_8, {"system_scope", "acquire_after_poll"}),
    ("poll_by_plain_load", "h200", TRITONS, {"poll_in_loop"}),
    ("poll_by_plain_load", "mi300x", TRITONS, {"poll_in_loop"}),
    ("poll_by_volatile_load", "h200", TRITONS, {"no_weak_poll"}),
    ("poll_by_volatile_load", "mi300x", BEFORE_3_8, {"poll_in_loop"}),
    ("poll_by_swap", "h200", TRITONS, {"no_weak_poll"}),
    ("poll_by_swap", "mi300x", before(7), {"no_weak_poll", "system_scope"}),
    ("poll_by_swap", "mi300x", TRITONS, {"no_weak_poll"}),
    ("words_polled_in_a_cache", "mi300x", TRITONS, {"whole_words"}),
    ("words_polled_once_by_one_warp", "mi300x", TRITONS, {"whole_words"}),
    ("words_polled_by_several_threads", "h200", TRITONS, {"own_words"}),
    ("words_polled_by_several_threads", "mi300x", TRITONS, {"own_words"}),
    ("unbounded_wait", "mi300x", BEFORE_3_8, {"poll_in_loop", "no_blind_spin"}),
    ("wait_in_k_loop", "h200", TRITONS, {"no_wait_in_k_loop", "pipelined"}),
    ("wait_in_k_loop", "mi300x", TRITONS, {"no_wait_in_k_loop", "pipelined"}),
    ("acquire_in_k_loop", "h200", TRITONS, {"no_wait_in_k_loop"}),
    ("acquire_in_k_loop", "mi300x", TRITONS, {"no_wait_in_k_loop"}),
    ("multiply_unaligned", "h200", TRITONS, {"pipelined", "wide_accesses"}),
    ("multiply_unaligned", "mi300x", TRITONS, {"pipelined", "wide_accesses"}),
    ("multiply_by_adds", "h200", TRITONS, {"matrix_cores"}),
    ("spill", "h200", TRITONS, {"no_spills", "overlapping_matrices"}),
]
RIGHT = (
    "good_signal", "good_signal_of_a_chiplet", "good_wait", "good_relay", "good_words",
    "good_lamport_words",
    "good_rows_of_words", "good_words_in_padded_rows", "good_words_of_one_warp", "good_multiply",
)  # fmt: skip


def broken_rules(kernel: CompiledKernel) -> set[str]:
    return {violation.check for violation in violations(kernel)}


@pytest.mark.parametrize(
    ("kernel", "device", "triton", "checks"),
    [(name, device, triton, checks) for name, device, some, checks in WRONG for triton in some],
)
def test_a_wrong_kernel_is_found(
    kernel: str, device: str, triton: str, checks: set[str], snippets: Snippets
) -> None:
    assert checks <= broken_rules(snippets.compiled(kernel, device, triton))


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize(
    ("kernel", "device"),
    [
        *product(RIGHT, ("h200", "mi300x", "mi350x")),
        ("good_bulk_copy", "h200"),
        ("good_early_wait", "h200"),
        ("good_early_wait_behind", "h200"),
        ("good_early_wait_in_a_chain", "h200"),
    ],
)
def test_a_right_kernel_passes(kernel: str, device: str, triton: str, snippets: Snippets) -> None:
    compiled = snippets.compiled(kernel, device, triton)
    assert violations(compiled) == []
    assert compiled.code.blocks


#: kernel, device, what is replaced in its assembly, by what, the check that must find it.
EDITS = [
    ("good_signal", "h200", "bar.sync", "// bar.sync", "barrier_before_release"),
    ("good_signal", "h200", ".sys.", ".gpu.", "system_scope"),
    ("good_signal", "mi300x", "s_barrier", "s_nop 0", "barrier_before_release"),
    ("good_signal", "mi300x", "s_waitcnt vmcnt(0)", "s_nop 0", "stores_drained"),
    ("good_signal", "mi300x", "buffer_wbl2 sc0 sc1", "buffer_wbl2 sc1", "system_scope"),
    ("good_signal", "mi300x", " sc1", "", "system_scope"),
    (
        "good_signal",
        "mi300x",
        "buffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0)",
        "buffer_wbl2 sc0 sc1",
        "written_back",
    ),
    ("good_wait", "h200", "bar.sync", "// bar.sync", "barrier_after_acquire"),
    ("good_wait", "h200", ".sys.acquire", ".gpu.acquire", "acquire_after_poll"),
    ("good_wait", "h200", ".sys.relaxed", ".weak", "poll_in_loop"),
    ("good_wait", "mi300x", "s_barrier", "s_nop 0", "barrier_after_acquire"),
    ("good_wait", "mi300x", "buffer_inv sc0 sc1", "buffer_inv sc1", "acquire_after_poll"),
    ("good_words", "h200", "ld.volatile.global.v2.b64", "ld.global.v2.b64", "whole_words"),
    ("good_words", "h200", "volatile.global.v2.b64", "volatile.global.v4.b32", "whole_words"),
    ("good_words", "h200", "st.global.wt.v2.b64", "st.global.v2.b64", "whole_words"),
    ("good_words", "h200", "st.global.wt.v2.b64", "st.global.wt.b64", "wide_words"),
    ("good_words", "mi300x", "dwordx2 v", "dword v", "whole_words"),
    ("good_words", "mi300x", " sc0 sc1", "", "whole_words"),
    ("good_lamport_words", "h200", "ld.volatile.global.v2.b32", "ld.global.v2.b32", "whole_words"),
    (
        "good_lamport_words",
        "h200",
        "volatile.global.v2.b32",
        "volatile.global.v4.b16",
        "whole_words",
    ),
    ("good_lamport_words", "h200", "st.global.wt.v2.b32", "st.global.v2.b32", "whole_words"),
    ("good_lamport_words", "mi300x", " sc0 sc1", "", "whole_words"),
    ("good_multiply", "h200", "wgmma.mma_async", "fma", "matrix_cores"),
    ("good_multiply", "h200", ", 0x10", ", 0x8", "wide_accesses"),
    ("good_multiply", "mi300x", "v_mfma", "v_fma", "matrix_cores"),
    ("good_multiply", "mi300x", "load_dwordx4", "load_dword", "wide_accesses"),
]


@pytest.mark.parametrize(("kernel", "device", "old", "new", "check"), EDITS)
def test_an_edit_of_right_assembly_is_found(
    kernel: str, device: str, old: str, new: str, check: str, snippets: Snippets
) -> None:
    compiled = snippets.compiled(kernel, device, NEWEST)
    assert old in compiled.text
    assert check in broken_rules(replace(compiled, text=compiled.text.replace(old, new)))


#: device, replaced in one of two rounds that are alike, by what, the check that must find it.
IN_ONE_ROUND = [
    ("h200", "sys.release.exch", "sys.relaxed.exch", "system_scope"),
    ("mi300x", "buffer_wbl2 sc0 sc1", "s_nop 0", "system_scope"),
    ("mi300x", "buffer_inv sc0 sc1", "s_nop 0", "system_scope"),
    ("h200", "ld.global.sys.relaxed", "ld.weak.global", "poll_in_loop"),
]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("device", "old", "new", "check"), IN_ONE_ROUND)
def test_a_right_round_does_not_hide_a_wrong_one(
    device: str, old: str, new: str, check: str, is_first: bool, snippets: Snippets
) -> None:
    compiled = snippets.compiled("good_relay", device, NEWEST)
    begin, *parts = compiled.text.split(old)
    half = len(parts) // 2
    assert half > 0
    words = [new if is_first else old] * half + [old if is_first else new] * half
    text = begin + "".join(map("".join, zip(words, parts, strict=True)))
    assert check in broken_rules(replace(compiled, text=text))


WORDS = ("good_words", "good_lamport_words", "good_words_in_padded_rows")
POLL = {"h200": r"ld\.volatile", "mi300x": "_load_.* sc0 sc1", "mi350x": "_load_.* sc0 sc1"}


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("kernel", WORDS)
@pytest.mark.parametrize("device", POLL)
def test_each_poll_of_words_bypasses_the_caches(
    kernel: str, device: str, triton: str, snippets: Snippets
) -> None:
    """Other polls do not make up for the first, which stands before the loop."""
    compiled = snippets.compiled(kernel, device, triton)
    lines = compiled.text.splitlines()
    polls = [at for at, line in enumerate(lines) if re.search(POLL[device], line)]
    assert len(polls) >= 2
    for poll in (polls[0], polls[-1]):
        edited = lines.copy()
        edited[poll] = lines[poll].replace(" sc0 sc1", "").replace("ld.volatile", "ld")
        found = broken_rules(replace(compiled, text="\n".join(edited)))
        assert "whole_words" in found, lines[poll]


def test_checks_of_speed_can_be_left_out() -> None:
    assert {
        "matrix_cores", "overlapping_matrices", "pipelined", "wide_accesses", "wide_words",
        "no_spills", "no_waterfall",
    } == SPEED_CHECKS  # fmt: skip
    spilling = CompiledKernel("ret;", resources=Resources(0, 8, 0, 0))
    assert broken_rules(spilling) == {"no_spills"}
    assert violations(spilling, speed=False) == []


WATERFALL = """
	.amdhsa
.LBB0_1:
	v_readfirstlane_b32 s4, v0
	v_cmp_eq_u64_e32 vcc, s[4:5], v[0:1]
	s_and_saveexec_b64 vcc, vcc
	buffer_load_dwordx4 v[4:7], v2, s[4:7], 0 offen
	s_xor_b64 exec, exec, vcc
	s_cbranch_execnz .LBB0_1
	s_endpgm
"""


#: lanes whose counter has come leave the loop; when none is left, all signal
LEFT_PAST_ACQUIRE = """
	.amdhsa
	s_branch .LBB0_2
.LBB0_1:
	s_andn2_b64 exec, exec, s[0:1]
	s_cbranch_execz .LBB0_3
.LBB0_2:
	global_atomic_add v3, v[0:1], v2, off sc0
	s_waitcnt vmcnt(0)
	buffer_inv sc1
	v_cmp_ge_i32_e32 vcc, v3, v4
	s_branch .LBB0_1
.LBB0_3:
	buffer_wbl2 sc0 sc1
	s_waitcnt vmcnt(0)
	global_atomic_swap v[0:1], v2, off sc1
	s_endpgm
"""


REDUCTION = """
#linear = #ttg.linear<{register = [[0, 256]], lane = [[0, 1]], warp = [[0, 512], [1, 0], [0, 16]], block = []}>
    %39 = "tt.reduce"(%38) <{axis = 0 : i32}> ({
    ^bb0(%arg19: i32, %arg20: i32):
      %93 = arith.addi %arg19, %arg20 : i32
      tt.reduce.return %93 : i32
    }) : (tensor<2x1024xi32, #linear>) -> tensor<1024xi32, #ttg.slice<{dim = 0, parent = #linear}>>
"""  # noqa: E501


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", True),
        ("axis = 0", "axis = 1", True),
        ("[0, 512], [1, 0], [0, 16]", "[0, 512], [0, 16], [1, 0]", False),
        ("[0, 512], [1, 0], [0, 16]", "[0, 512], [0, 0], [0, 16]", False),
    ],
)
def test_a_reduction_across_warps_in_turns_is_found(old: str, new: str, found: bool) -> None:
    compiled = CompiledKernel("", ttgir=REDUCTION.replace(old, new))
    assert ("warps_of_reductions" in broken_rules(compiled)) == found


def test_an_access_per_lane_is_found() -> None:
    assert "no_waterfall" in broken_rules(CompiledKernel(WATERFALL))


def test_what_comes_after_a_loop_that_acquires_is_reached() -> None:
    assert len(CompiledKernel(LEFT_PAST_ACQUIRE).code.places(Role.RELEASE)) == 1


def test_a_part_of_a_store_of_words_in_a_cache_is_found(snippets: Snippets) -> None:
    """AMD's compiler leaves out the rows that it knows to be masked."""
    compiled = snippets.compiled("good_rows_of_words", "mi300x", NEWEST)
    assert compiled.text.count(" sc0 sc1") == 2  # of four that each thread has
    edited = compiled.text.replace(" sc0 sc1", "", 1)
    assert "whole_words" in broken_rules(replace(compiled, text=edited))


#: two matrix instructions into the same accumulators, and what is between them.
TWO_PRODUCTS = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry multiply(.param .u64 tile, .param .u64 out)
{
    .reg .f32 %%f<4>;
    .reg .b64 %%rd<2>;
    ld.param.u64 %%rd0, [tile];
    ld.param.u64 %%rd1, [out];
    mov.f32 %%f0, 0f00000000;
    mov.f32 %%f1, 0f00000000;
    mov.f32 %%f2, 0f00000000;
    mov.f32 %%f3, 0f00000000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
        {%%f0, %%f1, %%f2, %%f3}, %%rd0, %%rd0, 1, 1, 1, 0, 0;
    %s
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
        {%%f0, %%f1, %%f2, %%f3}, %%rd0, %%rd0, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    st.global.v4.f32 [%%rd1], {%%f0, %%f1, %%f2, %%f3};
    ret;
}
"""


def test_ptxas_tells_of_serialised_matrix_instructions() -> None:
    assert matrix_remarks(TWO_PRODUCTS % "") == []
    assert matrix_remarks(TWO_PRODUCTS % "add.f32 %f1, %f1, %f1;")


def test_every_check_has_a_kernel_that_breaks_it() -> None:
    broken = set().union(*(checks for _, _, _, checks in WRONG), {edit[4] for edit in EDITS})
    by_text = {"no_waterfall", "warps_of_reductions"}  # the two tests above
    of_step = {"all_resident", "handed_on_after_wait", "stages_fenced"}  # test_decode_step
    assert set(CHECKS) == broken | by_text | of_step
