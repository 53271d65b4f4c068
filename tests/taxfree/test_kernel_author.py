"""A kernel author adds one file: it is tuned, benched, explained and checked with no other edit."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.ranks import OP, PYTHON, copy_of_kernels, environment
from tests.taxfree.candidates import GOOD

NAME = "two_steps"
SHAPE = ["--shapes", "m=7 n=40 k=24 gather_dim=1"]


class Author:
    """The command line as it runs on a tree with one more file."""

    def __init__(self, folder):
        self.variables = environment(
            copy_of_kernels(folder, **GOOD), TAXFREE_DB=str(folder / "tuning.sqlite"), NO_COLOR="1"
        )

    def __call__(self, *arguments):
        done = subprocess.run(
            [PYTHON, "-m", "taxfree_cli.app", *arguments],
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def author(tmp_path):
    return Author(tmp_path)


class TestOneMoreVariant:
    def test_is_tuned_and_benched_and_explained(self, author):
        ranks = ["--op", OP, *SHAPE, "--fabric", "host", "--gpus", "2", "--variant", NAME]
        (tuned,) = json.loads(author("tune", *ranks, "--trials", "2", "--json"))["rows"]
        assert tuned["measured"] == 2
        assert tuned["winner"] in (NAME, "baseline")
        (record,) = json.loads(author("db", "show", "--gpu", "cpu", "--json"))["records"]
        measured = [record["winner"], *record["runners_up"]]
        assert [each["variant"] for each in measured].count(NAME) == 2
        rows = json.loads(author("bench", *ranks, "--json"))["rows"]
        medians = [row["median_us"] for row in rows if row["variant"] == NAME]
        assert medians
        assert min(medians) > 0
        assert NAME in author("explain", *ranks)

    def test_is_accepted_by_the_checker(self, author):
        options = ["--op", OP, "--variant", NAME, "--seeds", "16", "--json"]
        (checked,) = json.loads(author("check", *options))["checks"]
        assert checked["variant"] == NAME
        assert checked["violation"] is None
