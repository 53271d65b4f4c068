"""A kernel author adds a file, or an operation's folder, and edits nothing else.

Both are the examples of docs/write-a-variant.md.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from tests.ranks import OP, PYTHON, ROOT, copy_of_kernels, environment
from tests.tritons import FOLDERS, NEWEST

PAGE = (ROOT / "docs" / "write-a-variant.md").read_text(encoding="utf-8")
VARIANT = f"{OP}/two_steps.py"
FILES = dict(
    re.findall(
        r"`(?:kernels/taxfree_kernels/)?(\w+/\w+\.py)`[^\n]*:\n\n```python\n(.*?)^```$",
        PAGE,
        re.S | re.M,
    )
)
OPERATION = [name for name in FILES if "all_reduce" in name]
CALLS = """
import torch
import torch.distributed as dist
import taxfree

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rt = taxfree.init()
x = torch.randn(3, 20).half()
assert torch.equal(torch.ops.taxfree.all_reduce(x, rt.group_name), x)
try:
    torch.ops.taxfree.all_reduce(x[0], rt.group_name)
except taxfree.UsageError as error:
    assert "x must be a matrix" in str(error)
else:
    raise AssertionError("a vector was taken")
"""
TARGETS = {"sm_90", "gfx942", "gfx950"}


class Author:
    """The command line as it runs on a tree with more files."""

    def __init__(self, folder, *added):
        kernels = copy_of_kernels(folder)
        shutil.copytree(ROOT / "tune/taxfree_tune", kernels / "taxfree_tune")
        for name in added:
            package = "taxfree_tune" if name.startswith("cost/") else "taxfree_kernels"
            path = kernels / package / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(FILES[name])
        database = str(folder / "tuning.sqlite")
        self.variables = environment(kernels, TAXFREE_DB=database, NO_COLOR="1")

    def run(self, *arguments):
        return self.python("-m", "taxfree_cli.app", *arguments)

    def python(self, *arguments, **variables):
        return subprocess.run(
            [PYTHON, *arguments], env=self.variables | variables, capture_output=True, text=True
        )

    def __call__(self, *arguments):
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def tune_bench_explain_and_call(author, op, name, shape):
    ranks = ["--op", op, "--shapes", shape, "--fabric", "host", "--gpus", "2"]
    ranks += ["--variant", name]
    (tuned,) = json.loads(author("tune", *ranks, "--trials", "2", "--json"))["rows"]
    assert tuned["measured"] == 2
    assert tuned["winner"] in (name, "baseline")
    (record,) = json.loads(author("db", "show", "--op", op, "--gpu", "cpu", "--json"))["records"]
    measured = [record["winner"], *record["runners_up"]]
    assert [each["variant"] for each in measured].count(name) == 2
    rows = json.loads(author("bench", *ranks, "--json"))["rows"]
    for each in (name, "dispatch"):  # a runtime calls what dispatch picks
        medians = [row["median_us"] for row in rows if row["variant"] == each]
        assert medians
        assert min(medians) > 0
    assert name in author("explain", *ranks)


def run_the_checker(author, op, name, _):
    options = ["--op", op, "--variant", name, "--seeds", "16", "--json"]
    (checked,) = json.loads(author("check", *options))["checks"]
    assert checked["name"] == f"{op} {name}"
    assert checked["violation"] is None


def compile_for_all_targets(author, op, name, _):
    options = ["--compiled", "--op", op, "--variant", name, "--json"]
    options += ["--triton", str(FOLDERS[NEWEST])] if FOLDERS[NEWEST] else []
    reports = json.loads(author("check", *options))["reports"]
    assert {report["architecture"] for report in reports} == TARGETS


@pytest.mark.dealt("what", "commands")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["variant", "operation"])
@pytest.mark.parametrize(
    "commands", [tune_bench_explain_and_call, run_the_checker, compile_for_all_targets]
)
def test_one_more_is_served_by_all_commands(tmp_path, what, commands):
    if what == "variant":
        shape = "m=7 n=40 k=24 gather_dim=1"
        commands(Author(tmp_path, VARIANT), OP, "two_steps", shape)
    else:
        commands(Author(tmp_path, *OPERATION), "all_reduce", "push", "m=7 n=40")


class TestOneMoreOperation:
    @pytest.fixture
    def author(self, tmp_path):
        return Author(tmp_path, *OPERATION)

    def test_is_modelled_where_it_has_formulas(self, author):
        ranks = ["--op", "all_reduce", "--shapes", "64x8192", "--gpus", "8", "--hardware", "h200"]
        assert "modelled" in author("explain", *ranks)
        refused = author.run("explain", *ranks, "--variant", "push")
        assert "no cost model of push of all_reduce" in refused.stderr

    def test_has_the_named_shapes_of_its_folder(self, author):
        assert "m=1,64 n=8192" in author("shapes", "--op", "all_reduce")

    def test_has_the_torch_ops_of_its_folder(self, author):
        done = author.python("-c", CALLS, TRITON_INTERPRET="1")
        assert done.returncode == 0, done.stderr
