"""Assembly checks see what each role of a kernel does, though its warps jump there by a table."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from taxfree_check.cross_compile.asm_checks import violations
from taxfree_check.cross_compile.compiled_kernel import CompiledKernel
from taxfree_check.cross_compile.resources import Resources
from tests.tritons import TRITONS

from .conftest import HERE, run_python

#: see roles.py
GATHERS = tuple(f"{kind}{told}" for kind in ("1", "1 folded", "2") for told in ("", " early"))
WAIT = "griddepcontrol.wait"
#: of sums by Lamport words, with rows, and how many loops poll words
WORDS = {"words of sum 64": 2, "words of sum 256": 2, "words of scatter 64": 1,
         "words of scatter 256": 1}  # fmt: skip


@cache
def compiled(triton: str) -> dict[str, CompiledKernel]:
    found = json.loads(run_python(str(HERE / "roles.py"), triton=triton))
    return {
        kind: CompiledKernel(**fields | {"resources": Resources(**fields["resources"])})
        for kind, fields in found.items()
    }


def without(kernel: CompiledKernel, text: str, which: int | None = None) -> set[str]:
    """Rules that a kernel breaks without one or all of the lines that contain `text`."""
    lines = kernel.text.splitlines()
    places = [place for place, line in enumerate(lines) if text in line]
    assert places
    removed = places if which is None else [places[which]]
    kept = "\n".join(line for place, line in enumerate(lines) if place not in removed)
    return {each.check for each in violations(replace(kernel, text=kept))}


@pytest.mark.dealt("triton")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("triton", TRITONS)
class TestKernelsWithRoles:
    def test_pass_and_their_waits_are_seen(self, triton: str) -> None:
        assert compiled(triton).keys() == {*GATHERS, *WORDS}
        for kind, kernel in compiled(triton).items():
            assert violations(kernel) == []
            assert kernel.has_roles
            assert bool(kernel.code.system_acquires()) == (kind not in WORDS)
            assert kernel.word_loops == WORDS.get(kind, 0)
            assert kernel.poll_loops or kind in WORDS

    def test_a_missing_fence_wait_or_barrier_is_found(self, triton: str) -> None:
        for kind in GATHERS:
            kernel = compiled(triton)[kind]
            assert "proxy_fence_before_bulk_copies" in without(kernel, "fence.proxy.async")
            assert "nothing_before_early_wait" in without(kernel, WAIT)
            assert "barrier_after_acquire" in without(kernel, "bar.warp.sync")

    def test_each_role_that_waits_for_the_preceding_kernel_has_to(self, triton: str) -> None:
        for kind in GATHERS:
            kernel = compiled(triton)[kind]
            warpgroups, early = int(kind[0]), "early" in kind
            waits = kernel.text.count(WAIT)
            assert waits == warpgroups + 3 - early  # those that send, load A, and load the weight
            for which in range(waits):
                assert "nothing_before_early_wait" in without(kernel, WAIT, which)

    def test_only_static_weights_are_loaded_early(self, triton: str) -> None:
        for kind in GATHERS:
            kernel = compiled(triton)[kind]
            for static in ((), ("a_desc",), ("inbox_desc",)):
                broken = violations(replace(kernel, static=static))
                early = {"nothing_before_early_wait"} if "early" in kind else set()
                assert {each.check for each in broken} == early

    def test_words_are_whole_and_the_weight_alone_is_loaded_early(self, triton: str) -> None:
        for kind in WORDS:
            kernel = compiled(triton)[kind]
            assert "whole_words" in without(kernel, "ld.volatile.global")
            assert "whole_words" in without(kernel, "st.global.wt")
            assert "nothing_before_early_wait" in without(kernel, "griddepcontrol.wait")
            found = {each.check for each in violations(replace(kernel, static=()))}
            assert found == {"nothing_before_early_wait"}
            assert kernel.resources.spill_bytes == 0

    def test_launch_the_next_kernel(self, triton: str) -> None:
        for kernel in compiled(triton).values():
            assert "griddepcontrol.launch_dependents" in kernel.text
