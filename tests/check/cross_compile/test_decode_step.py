"""The persistent kernel of decode_step, as real compilers compile it for an H100."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import takewhile

import pytest

from taxfree_check.cross_compile.asm_checks import violations
from taxfree_check.cross_compile.compiled_kernel import CompiledKernel
from taxfree_check.cross_compile.resources import Resources
from tests.tritons import NEWEST, OLDEST

from .conftest import HERE, run_python

#: rules that do not know its own polls in PTX, see ``decode_step.sums``, nor counts of one GPU
FOREIGN = {"whole_words", "own_words", "no_weak_poll", "system_scope", "no_spills"}
FENCE = "fence.proxy.async.shared::cta"


@cache
def compiled(triton: str) -> dict[str, CompiledKernel]:
    found = json.loads(run_python(str(HERE / "decode.py"), triton=triton))
    return {
        kind: CompiledKernel(**fields | {"resources": Resources(**fields["resources"])})
        for kind, fields in found.items()
    }


def hand_backs(ttgir: str) -> list[bool]:
    """For each load from a chunk: whether a fence stands between it and the next arrival."""
    boxes = "|".join(re.findall(r"^(#\w+) = #ttg\.nvmma_shared", ttgir, re.MULTILINE))
    load = re.compile(rf"ttg\.local_load .*memdesc<[\dx]+bf16, (?:{boxes}),")
    lines = ttgir.splitlines()
    return [
        any(FENCE in each for each in takewhile(lambda at: "arrive_barrier" not in at, lines[n:]))
        for n, line in enumerate(lines)
        if load.search(line)
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("triton", sorted({OLDEST, NEWEST}))
class TestDecodeStep:
    def test_rules_are_kept_and_registers_suffice(self, triton: str) -> None:
        for kernel in compiled(triton).values():
            assert {each.check for each in violations(kernel)} <= FOREIGN
            assert kernel.resources.spill_bytes <= 128
            assert kernel.resources.programs_per_unit == 1

    def test_each_stage_is_fenced_before_tma_may_write_it_again(self, triton: str) -> None:
        """A register load that is under way otherwise gets the next chunk."""
        for kernel in compiled(triton).values():
            fenced = hand_backs(kernel.ttgir)
            assert fenced
            assert all(fenced)
            assert kernel.text.count(FENCE) >= len(fenced)
            lines = kernel.ttgir.splitlines()
            place = next(n for n, line in enumerate(lines) if FENCE in line)
            assert not all(hand_backs("\n".join(lines[:place] + lines[place + 1 :])))

    def test_descriptors_have_spans_where_addresses_need_them(self, triton: str) -> None:
        for kind, kernel in compiled(triton).items():
            ranks = set(re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", kernel.text))
            inputs = {"3"} if "sequences" in kind else set()
            assert ranks == {"5" if "apart" in kind else "4"} | inputs
