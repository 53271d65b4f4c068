"""Digests of instructions: what an author is told, and what does not count."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import instructions
from benchmarks.instructions import FILE, CompiledCase, Digests, compiled, silent_changes, today
from taxfree_check.cross_compile.instructions import plain_assembly, plain_ttir
from taxfree_check.cross_compile.pool import CompilePool
from taxfree_check.cross_compile.report import triton_version
from taxfree_tuning_db.renamed import RENAMED, Renamed
from tests.ranks import ROOT, copy_of_kernels, replace_in
from tests.sample import Sample

OP = "all_gather_matmul"
TRITON = triton_version(None)
CASE = CompiledCase.of(OP, "push", "h200", {"m": 16}, {"BLOCK_M": 16})
OLD = {"ttir": "t", "assembly": "a"}


@pytest.fixture(scope="module")
def recorded() -> Digests:
    return Digests.load((ROOT / FILE).read_text())


@pytest.fixture
def pools() -> Iterator[dict[str, CompilePool]]:
    with CompilePool(1, 600.0) as pool:
        yield {TRITON: pool}


class TestCommittedFile:
    def test_is_as_it_would_be_written(self, recorded: Digests) -> None:
        assert recorded.text() == (ROOT / FILE).read_text()

    def test_is_of_todays_versions(self, recorded: Digests) -> None:
        assert today(recorded, {}).statements == recorded.statements, (
            "run `python -m benchmarks.instructions --write`"
        )

    def test_kernels_of_both_vendors_are_in_it(self, recorded: Digests) -> None:
        assert {case.target for case in recorded.cases} == {"h200", "mi300x"}
        kernels = {(case.op, case.variant) for case in recorded.cases}
        assert len(kernels) >= 25  # the other variants call libraries alone

    @pytest.mark.timeout(900)
    def test_a_sample_compiles_to_its_digests(
        self, recorded: Digests, sample: Sample, pools: dict[str, CompilePool]
    ) -> None:
        if not sample.is_part:
            pytest.skip("`make instructions` compiles the whole list, under two Tritons")
        taken = {case: recorded.cases[case] for case in sample.of(sorted(recorded.cases))}
        if not any(TRITON in digests for digests in recorded.cases.values()):
            pytest.skip(f"there are no digests of Triton {TRITON}: run --write")
        now = Digests(recorded.statements, compiled(taken, pools))
        assert silent_changes(recorded, now) == []


class TestTrees:
    """The current sources against edited ones, which only the compiling process sees."""

    @pytest.fixture
    def case(self, recorded: Digests) -> CompiledCase:
        return min(
            each for each in recorded.cases
            if (each.op, each.variant, each.target) == (OP, "push", "h200")
        )  # fmt: skip

    def told(
        self,
        tree: Path,
        case: CompiledCase,
        recorded: Digests,
        pools: Any,
        patch: pytest.MonkeyPatch,
    ) -> list[str]:
        if TRITON not in recorded.cases[case]:
            pytest.skip(f"there are no digests of Triton {TRITON}")
        patch.syspath_prepend(tree)
        now = Digests(recorded.statements, compiled({case: recorded.cases[case]}, pools))
        return silent_changes(recorded, now)

    @pytest.mark.timeout(900)
    def test_renamed_functions_are_the_same(
        self, tmp_path: Path, case: CompiledCase, recorded: Digests, pools: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        tree = copy_of_kernels(tmp_path)
        for file in (tree / "taxfree_kernels").rglob("*.py"):
            text = file.read_text()
            file.write_text(re.sub(r"\b(signal|program)\b", r"renamed_\1", text))
        assert self.told(tree, case, recorded, pools, monkeypatch) == []

    @pytest.mark.timeout(900)
    def test_another_instruction_is_told(
        self, tmp_path: Path, case: CompiledCase, recorded: Digests, pools: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        tree = copy_of_kernels(tmp_path)
        signal, scope = r'(atomic_xchg\(word, .*scope=)"sys"', r'\1"gpu"'
        replace_in(tree / "taxfree_kernels" / "device" / "sync.py", signal, scope)
        told, command = self.told(tree, case, recorded, pools, monkeypatch)
        assert told.startswith(f"instructions of {OP} push changed for these recorded problems")
        assert f"{case}, Triton {TRITON}" in told
        assert f"--write --because '{OP} push' 'REASON'" in command


class TestSilentChanges:
    @pytest.mark.parametrize(
        ("now", "is_told"),
        [
            (OLD, False),
            ({"ttir": "x", "assembly": "a"}, False),
            ({"ttir": "x", "assembly": "x"}, True),
            ({"error": "does not compile"}, True),
            ({}, True),  # launches no kernel of ours any more
        ],
    )
    def test_are_changed_digests(self, now: dict[str, str], is_told: bool) -> None:
        before, after = (
            Digests({f"{OP} push": (1, "")}, {CASE: {"3.9.0": each}}) for each in (OLD, now)
        )
        assert bool(silent_changes(before, after)) == is_told

    @pytest.mark.parametrize(
        ("was", "now", "is_told"),
        [
            ((1, ""), (1, ""), True),
            ((1, ""), (2, ""), False),
            ((2, ""), (1, ""), True),
            ((1, ""), (1, "an address less"), False),
            ((1, "an address less"), (1, "an address less"), True),
            ((1, "an address less"), (1, "two addresses less"), False),
        ],
    )
    def test_a_version_or_a_new_reason_explains_them(
        self, was: tuple[int, str], now: tuple[int, str], is_told: bool
    ) -> None:
        before = Digests({f"{OP} push": was}, {CASE: {"3.9.0": OLD}})
        after = Digests({f"{OP} push": now}, {CASE: {"3.9.0": {"ttir": "x", "assembly": "x"}}})
        assert bool(silent_changes(before, after)) == is_told

    def test_another_triton_and_another_variant_are_none(self) -> None:
        before = Digests({}, {CASE: {"3.9.0": OLD}})
        other = {"ttir": "x", "assembly": "x"}
        assert silent_changes(before, Digests({f"{OP} push": (1, "")}, {CASE: {"4": other}})) == []
        new = CompiledCase.of(OP, "pull", "h200", {"m": 16}, {})
        assert silent_changes(before, Digests({f"{OP} pull": (1, "")}, {new: {"3": other}})) == []


def test_what_did_not_compile_in_time_is_not_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {"error": "compiling took longer than 600 s"}
    monkeypatch.setattr("sys.argv", ["instructions", "--write"])
    monkeypatch.setattr(instructions, "compiled", lambda *_: {CASE: {TRITON: late}})
    monkeypatch.setattr(instructions.files, "write", lambda *_: pytest.fail("written"))
    assert instructions.main() == 1
    assert (
        f"{CASE} does not compile under Triton {TRITON}: {late['error']}" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--write", "--because", f"{OP} pusj", "a reason"], f"{OP} pusj"),
        (["--base", "nowhere"], "no such commit"),
    ],
)
def test_what_is_misspelt_is_refused_before_anything_is_compiled(
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["instructions", *options])
    monkeypatch.setattr(instructions, "compiled", lambda *_: pytest.fail("compiled"))
    with pytest.raises(SystemExit):
        instructions.main()
    assert said in capsys.readouterr().err


def test_a_new_variant_and_a_raised_version_are_told_by_name() -> None:
    before = Digests({f"{OP} push": (1, ""), f"{OP} pull": (1, "")})
    now = Digests({f"{OP} push": (2, ""), f"{OP} pull": (1, ""), f"{OP} new": (1, "")})
    (told,) = instructions.other_variants(before, now)
    assert f"{OP} new, {OP} push: run " in told
    assert instructions.other_variants(now, now) == []


def test_digests_are_found_under_new_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RENAMED, OP)
    text = Digests({f"{OP} push": (1, "")}, {CASE: {"3.9.0": OLD}}).text()
    assert Digests.load(text) == Digests({f"{OP} push": (1, "")}, {CASE: {"3.9.0": OLD}})
    monkeypatch.setitem(RENAMED, OP, Renamed({"push": "send"}, {"BLOCK_M": "TILE_M"}))
    renamed = CompiledCase.of(OP, "send", "h200", {"m": 16}, {"TILE_M": 16})
    assert Digests.load(text) == Digests({f"{OP} send": (1, "")}, {renamed: {"3.9.0": OLD}})


class TestPlainText:
    def test_functions_of_ttir_have_no_names(self) -> None:
        ttir = 'tt.func @_a(%a) {{ tt.call @"{0}.f"() asm "@$1 st" }} tt.func private @"{0}.f"()'
        assert plain_ttir(ttir.format("old")) == plain_ttir(ttir.format("new"))
        assert plain_ttir(ttir.format("old")) != plain_ttir(ttir.format("old").replace("$1", "$2"))

    def test_values_have_no_names_and_constants_no_order(self) -> None:
        one, two = "%c1 = arith.constant 1 : i32", "%c2 = arith.constant 2 : i32"
        kernel = "tt.func @_a(%x: i32)\n  {}\n  {}\n  %s = arith.addi %x, %c1 : i32\n  use %s, %c2"
        as_written = plain_ttir(kernel.format(one, two))
        assert as_written == plain_ttir(kernel.format(two, one))
        assert as_written == plain_ttir(kernel.format(one, two).replace("%x", "%arg0"))
        assert as_written != plain_ttir(kernel.format(one, two.replace("2 :", "3 :")))
        assert as_written != plain_ttir(kernel.format(one, two).replace("%s, %c2", "%x, %c2"))

    def test_assembly_has_no_names_and_comments(self) -> None:
        ptx = "// {0}\n.visible .entry {0}(.param .u64 {0}_param_0) // {0}\n st.b32 [%r1], %r{1};\n"
        assert plain_assembly(ptx.format("_push", 2)) == plain_assembly(ptx.format("_send", 2))
        assert plain_assembly(ptx.format("_push", 2)) != plain_assembly(ptx.format("_push", 3))
