"""The persistent kernel of decode_step, as real compilers compile it for an H100."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from taxfree_check.cross_compile.asm_checks import violations
from taxfree_check.cross_compile.compiled_kernel import CompiledKernel
from taxfree_check.cross_compile.resources import Resources
from taxfree_kernels.hardware import KNOWN
from tests.ranks import copy_of_kernels, replace_in
from tests.rooms import SOURCES
from tests.tritons import FOLDERS, NEWEST, OLDEST, needs_3_8

from .conftest import HERE, run_python

#: rules that do not know its own polls in PTX, see ``decode_step.sums``, nor counts of one GPU, nor
#: that a unit in fp8 loads few scales and stores few values
FOREIGN = {
    "wide_accesses", "whole_words", "own_words", "no_weak_poll", "system_scope", "no_spills",
    "acquire_after_poll",
}  # fmt: skip
FENCE = "fence.proxy.async.shared::cta"


@cache
def compiled(triton: str, *kind: str) -> dict[str, CompiledKernel]:
    found = json.loads(run_python(str(HERE / "decode.py"), *kind, triton=triton))
    return {
        kind: CompiledKernel(**fields | {"resources": Resources(**fields["resources"])})
        for kind, fields in found.items()
    }


def broken(kernel: CompiledKernel, **changed: Any) -> set[str]:
    return {each.check for each in violations(replace(kernel, **changed))} - FOREIGN


@pytest.mark.dealt("triton")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("triton", sorted({OLDEST, NEWEST}))
class TestDecodeStep:
    def test_rules_are_kept_and_registers_suffice(self, triton: str) -> None:
        for kernel in compiled(triton).values():
            assert broken(kernel) == set()
            assert kernel.resources.spill_bytes <= 128
            assert kernel.resources.programs_per_unit == 1

    def test_all_programs_are_there_at_once(self, triton: str) -> None:
        for kernel in compiled(triton).values():
            assert kernel.is_cooperative
            assert kernel.programs == kernel.resident_programs == KNOWN["h100"].compute_units
            assert broken(kernel, is_cooperative=False) == {"all_resident"}
            assert broken(kernel, programs=kernel.programs + 1) == {"all_resident"}

    def test_a_load_above_its_wait_is_found(self, triton: str) -> None:
        for kernel in compiled(triton).values():
            lines = kernel.text.splitlines()
            waits = [at for at, line in enumerate(lines) if "ld.acquire.gpu" in line]
            assert waits
            for at in waits:
                text = "\n".join(lines[:at] + lines[at + 1 :])
                assert broken(kernel, text=text) == {"handed_on_after_wait"}

    def test_a_copy_of_inputs_without_a_proxy_fence_is_found(self, triton: str) -> None:
        for kind, kernel in compiled(triton).items():
            assert ("fence.proxy.async.global" in kernel.text) == ("sequences" in kind)
            text = kernel.text.replace("fence.proxy.async.global", "// no fence")
            expected = {"handed_on_after_wait"} if "sequences" in kind else set()
            assert broken(kernel, text=text) == expected

    def test_a_load_below_the_fence_of_its_stage_is_found(self, triton: str) -> None:
        for kernel in compiled(triton).values():
            assert kernel.text.count(FENCE) > 2
            late = f"{FENCE};\n\tld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r5];"
            assert broken(kernel, text=kernel.text.replace(f"{FENCE};", late)) == {"stages_fenced"}

    def test_a_stage_that_goes_back_without_a_fence_is_found(
        self, triton: str, tmp_path: Path
    ) -> None:
        """The race of a register load that is under way, and gets the next chunk."""
        root = copy_of_kernels(tmp_path)
        replace_in(root / "taxfree_kernels/decode_step/chunks.py", rf"{FENCE};\\n\\t", "")
        path = os.pathsep.join(map(str, (FOLDERS[triton] or root, root, *SOURCES, HERE)))
        printed = run_python(
            str(HERE / "decode.py"), "llama-3.1-8b 2 apart", triton=triton, PYTHONPATH=path
        )
        for fields in json.loads(printed).values():
            kernel = CompiledKernel(**fields | {"resources": Resources(**fields["resources"])})
            assert broken(kernel) == {"stages_fenced"}

    def test_descriptors_have_spans_where_addresses_need_them(self, triton: str) -> None:
        for kind, kernel in compiled(triton).items():
            ranks = set(re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", kernel.text))
            inputs = {"3"} if "sequences" in kind else set()
            of_groups = {"4"} if inputs and kind.endswith(("channel", "block")) else set()
            assert ranks == {"5" if "apart" in kind else "4"} | inputs | of_groups


@needs_3_8
@pytest.mark.dealt("architecture")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "gfx942 channel", "gfx950 block"])
def test_the_kernel_for_chiplets_keeps_the_rules(architecture: str) -> None:
    (kernel,) = compiled(NEWEST, architecture).values()
    assert kernel.is_cooperative
    assert broken(kernel) == set()
    assert broken(kernel, programs=kernel.resident_programs + 1) == {"all_resident"}
    assert kernel.resources.spill_bytes == 0
