"""The binary of a kernel holds what its text says, which is what the executor reads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle, islice

import pytest
from tinygrad.renderer.amd import decode_inst
from tinygrad.runtime.support.elf import elf_loader

from taxfree_check.cross_compile.coverage import Case
from taxfree_check.cross_compile.report import check
from taxfree_check.executed.decode import Instruction, decode
from taxfree_check.executed.run import DEVICES
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_shapes, variants
from tests.check.executed.test_executed import VARIANTS
from tests.tritons import FOLDERS, TRITONS

#: LLVM's names of what the ISA documents call otherwise
LLVM_NAMES = {
    **{f"v_mad_{mixed}": f"v_fma_{mixed}" for mixed in ("mix_f32", "mixlo_f16", "mixhi_f16")},
    **{f"v_accvgpr_{way}": f"v_accvgpr_{way}_b32" for way in ("read", "write", "mov")},
}
_REGISTER = re.compile(r"[-|a-z(]*[sv](?:(\d+)|\[(\d+)(?::\d+)?\])[|)]*")


def decoded(binary: bytes):
    """The instructions of a code object: name, and the numbers of registers and constants."""
    _, sections, _ = elf_loader(binary)[:3]
    code = next(section.content for section in sections if section.name == ".text")
    at = 0
    while at < len(code):
        found = decode_inst(bytes(code[at : at + 16]) + bytes(16), "cdna")
        name = re.sub("_(e32|e64|dpp16|sdwa)$", "", found.op_name.lower())
        yield LLVM_NAMES.get(name, name), set(map(int, re.findall(r"\d+", repr(found))))
        at += found.size()


def registers(given: Instruction) -> set[int]:
    """The numbers of the registers that an instruction names; the decoder omits 0."""
    found = [_REGISTER.fullmatch(text) for text in given.operands]
    return {int(each[1] or each[2]) for each in found if each} - {0}


def compiled(op: str, name: str, device: str) -> Iterator[Case]:
    """The default config on the first tiny problem; none where the variant does not serve it."""
    problem, hardware = operation_shapes(op).tiny(2)[0], KNOWN[device]
    if variants(op)[name].unsupported_reason(problem, hardware) is None:
        config = variants(op)[name].seed_configs(problem, hardware)[0]
        yield Case(op, problem, name, config, device, aligned=False, is_default=True)


def cases():
    """Of four Tritons two have every second variant, each for the other architecture."""
    every = [each for each in VARIANTS if list(compiled(*each, "mi300x"))]
    for at, triton in enumerate(TRITONS):
        half, first = divmod(at, 2)
        turns = islice(cycle(DEVICES.values()), first, None)
        for variant, device in zip(every[half::2], turns, strict=False):
            for case in compiled(*variant, device):
                yield triton, case


@pytest.mark.timeout(1800)
def test_the_text_is_what_the_binary_holds(sample, tmp_path, monkeypatch):
    compilers = defaultdict(list)
    for triton, case in sample.of(list(cases()), fortnights=2):
        compilers[triton].append(case)
    assert compilers
    for triton, given in compilers.items():
        cache = tmp_path / triton
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        assert not [report.error for report in check(given, FOLDERS[triton], 1) if report.error]
        require_same(list(cache.glob("*/*.hsaco")))


def require_same(files):
    assert files
    for file in files:
        binary = decoded(file.read_bytes())
        for instruction in decode(file.with_suffix(".amdgcn").read_text()).instructions:
            # the assembler aligns code by instructions without effect
            name, numbers = next(
                each for each in binary if each[0] == instruction.opcode or each[0] != "s_nop"
            )
            assert name == instruction.opcode, instruction.text
            assert registers(instruction) <= numbers, instruction.text
