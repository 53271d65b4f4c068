"""The hash of a variant's sources: what makes measurements stale, and what does not."""

from __future__ import annotations

import ast
import subprocess

import pytest

from tests.ranks import KERNELS, OP, PYTHON, copy_of_kernels, environment, replace_in, variant_names


def hashes(root, **variables):
    source = (
        "import sys\n"
        "from taxfree_kernels.source_hash import kernel_hash\n"
        f"for name in sys.argv[1:]: print(name, kernel_hash({OP!r}, name))"
    )
    names = [path.stem for path in (root / "taxfree_kernels" / OP).glob("*.py")
             if "\nVARIANT = " in path.read_text()]  # fmt: skip
    done = subprocess.run(
        [PYTHON, "-c", source, *names],
        env=environment(root, **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.fixture
def tree(tmp_path):
    return copy_of_kernels(tmp_path)


@pytest.fixture(scope="module")
def unchanged():
    return hashes(KERNELS)


def edit(tree, file, pattern, replacement):
    replace_in(tree / "taxfree_kernels" / file, pattern, replacement)


def stale(tree, before):
    """Variants whose hash is another than before."""
    after = hashes(tree)
    return {name for name in before if before[name] != after[name]}


class TestKernelHash:
    def test_every_variant_has_its_own(self, unchanged):
        assert sorted(unchanged) == variant_names()
        assert len(set(unchanged.values())) == len(unchanged)
        assert all(len(value) == 16 for value in unchanged.values())

    def test_is_the_same_interpreted_and_with_other_comments_and_docstrings(self, tree, unchanged):
        edit(tree, f"{OP}/push.py", r'^"""One fused', '# note\n"""A fused')
        assert hashes(tree, TRITON_INTERPRET="1") == unchanged

    def test_an_edit_of_a_variant_concerns_it_and_those_built_on_it(self, tree, unchanged):
        edit(tree, f"{OP}/push.py", r"(sync\.leave\(memory\.control_ptr)\)", r"\1 + 0)")
        assert stale(tree, unchanged) == {"push", "push_two_kernel"}

    def test_an_edit_of_a_helper_concerns_all_that_call_it(self, tree, unchanged):
        edit(tree, "device/sync.py", r"time\.sleep\((.*)\)", r"time.sleep(1 * \1)")
        assert {"push", "pull", "push_two_kernel", "one_shot"} <= stale(tree, unchanged)

    def test_an_edit_of_the_fused_plan_concerns_the_fused(self, tree, unchanged):
        edit(tree, f"{OP}/fused.py", r"split_k > 1 else 1", "split_k > 1 else 2")
        tma = {"push_tma", "push_specialized"}
        assert stale(tree, unchanged) == {"push", "pull", "push_two_kernel"} | tma

    def test_an_edit_of_side_streams_concerns_what_copies_on_them(self, tree, unchanged):
        edit(tree, "fabric/side_stream.py", "priority=-1", "priority=0")
        assert stale(tree, unchanged) == {"overlap"}

    def test_a_wider_space_makes_nothing_stale(self, tree, unchanged):
        edit(tree, "spaces.py", r"N\": \(32, 64, 128,", 'N": (32, 64, 96, 128,')
        assert stale(tree, unchanged) == set()

    @pytest.mark.parametrize("method", ["space", "seed_configs", "unsupported_reason"])
    def test_what_a_variant_searches_makes_nothing_stale(self, tree, unchanged, method):
        edit(tree, f"{OP}/push_tma.py", rf"(def {method}\(.*:)\n", r"\1\n        print()\n")
        assert stale(tree, unchanged) == set()

    def test_a_helper_counts_however_it_is_imported(self, tree):
        """A new variant is written by somebody with habits of their own."""
        imports = {
            "absolute_module": "from taxfree_kernels.device import extra",
            "absolute_name": "from taxfree_kernels.device.extra import VALUE",
            "relative_module": "from ..device import extra",
            "relative_name": "from ..device.extra import VALUE",
            "plain": "import taxfree_kernels.device.extra",
            "renamed": "import taxfree_kernels.device.extra as extra",
        }
        package = tree / "taxfree_kernels"
        (package / "device" / "extra.py").write_text("VALUE = 1\n")
        text = (package / OP / "baseline.py").read_text()
        marker = "from __future__ import annotations\n"
        for name, line in imports.items():
            (package / OP / f"{name}.py").write_text(text.replace(marker, f"{marker}\n{line}\n"))
        before = hashes(tree)
        edit(tree, "device/extra.py", "VALUE = 1", "VALUE = 2")
        assert stale(tree, before) == set(imports)


def test_plans_ask_no_search_space():
    """What is left out of the hash does not decide what a config launches."""
    asking = set()
    for path in (KERNELS / "taxfree_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "plan"):
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                if "spaces" in names:
                    asking.add(f"{path.parent.name}/{path.stem}")
    assert asking == {"flash_decode/baseline"}  # which takes what would be tried first
