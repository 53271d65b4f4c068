"""What the splits in Gluon compile to, and what they load early if the cache is promised."""

from __future__ import annotations

import json
from functools import cache

import pytest

from taxfree_check.cross_compile.asm_checks import violations
from taxfree_check.cross_compile.assembly import Role
from taxfree_check.cross_compile.compiled_kernel import CompiledKernel
from taxfree_check.cross_compile.resources import Resources
from tests.tritons import TRITONS

from .conftest import HERE, run_python

KINDS = ("dense", "paged", "batch")


@cache
def compiled(triton: str) -> dict[str, list[CompiledKernel]]:
    found = json.loads(run_python(str(HERE / "by_warp.py"), triton=triton))
    return {
        kind: [
            CompiledKernel(**fields | {"resources": Resources(**fields["resources"])})
            for fields in kernels
        ]
        for kind, kernels in found.items()
    }


@pytest.mark.dealt("triton")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("kind", KINDS)
class TestSplitsByWarp:
    def test_pass_and_have_few_barriers(self, kind: str, triton: str) -> None:
        splits, merge = compiled(triton)[kind]
        assert {each.check for each in violations(splits)} <= {"no_spills"}
        # Triton 3.8 allocates worse than those before and after it
        assert splits.resources.spill_bytes <= (80 if triton.startswith("3.8") else 16)
        assert violations(merge) == []
        (loop,) = splits.k_loops
        inside = splits.code.inside(loop)
        assert sum(each.has(Role.BARRIER) for each in inside) <= 3
        assert not any(each.has(Role.SHARED_STORE) for each in inside)
        assert any(each.has(Role.COPY) for each in inside)
        assert any(each.has(Role.LOAD) for each in inside) == (kind == "paged")

    def test_two_programs_and_a_merge_are_resident(self, kind: str, triton: str) -> None:
        for call in (kind, f"{kind} promised"):
            splits, merge = (each.resources for each in compiled(triton)[call])
            assert splits.programs_per_unit == 2
            assert 2 * 128 * splits.registers + 64 * merge.registers <= 65536

    def test_with_the_promise_keys_are_loaded_before_the_wait_and_nothing_is_stored(
        self, kind: str, triton: str
    ) -> None:
        splits, merge = compiled(triton)[f"{kind} promised"]
        early = {violation.check for violation in violations(splits)}
        assert early - {"no_spills"} == {"nothing_before_early_wait"}
        assert {each.check for each in violations(merge)} == {"next_launch_after_early_wait"}
        before = [
            each
            for each in splits.code.walk((0, -1), lambda one: one.has(Role.EARLY_WAIT))
            if each.has(Role.LOAD, Role.COPY, Role.STORE, Role.ATOMIC)
        ]
        assert not any(each.has(Role.STORE, Role.ATOMIC) for each in before)
        assert any(each.has(Role.COPY) for each in before)
        # Of queries 16 bytes are loaded at a time, of lengths and page numbers 4.
        assert all(each.width <= 4 for each in before if each.has(Role.LOAD))
