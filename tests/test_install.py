"""The environment of `make env` resolves from a public index alone, for each Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
PYTHONS = [each.split()[-1] for each in PROJECT["classifiers"] if ":: Python :: 3." in each]
CONSTRAINTS = ROOT / "constraints-cpu.txt"
#: what a machine's own settings of pip would add to the index
_OWN = ("PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")


def resolve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Let pip resolve requirements by the index alone; it reads of wheels what they require."""
    environment = {name: value for name, value in os.environ.items() if name not in _OWN}
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
         "--use-feature", "fast-deps", "--report", "-", *arguments],
        env=environment | {"PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True,
    )  # fmt: skip


def named() -> list[str]:
    """The requirements of `make env`, but for the one without a wheel, which requires nothing.

    For another Python pip resolves from wheels alone.
    """
    extras = re.findall(r"-e '\.\[(.*)\]'", MAKEFILE)[0].split(",")
    of_extras = [each for extra in extras for each in PROJECT["optional-dependencies"][extra]]
    every = [*PROJECT["dependencies"], *of_extras]
    return [each for each in every if not each.startswith("sqlitedict")]


@pytest.mark.dealt("python")
@pytest.mark.parametrize("python", PYTHONS)
def test_the_constraints_resolve_without_local_wheels(python: str, tmp_path: Path) -> None:
    if not any(int(each.version.split(".")[0]) >= 25 for each in distributions(name="pip")):
        pytest.skip("NOT TESTED: pip before 25 downloads gigabytes; make env brings a newer one")
    if resolve("--no-deps", "packaging").returncode:
        pytest.skip("NOT TESTED: no index answers")
    done = resolve(
        "--python-version", f"{python}.0", "--only-binary", ":all:", "--target", str(tmp_path),
        "--constraint", str(CONSTRAINTS), *named(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    every: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    versions = {each["metadata"]["name"]: each["metadata"]["version"] for each in every}
    assert f"torch=={versions['torch']}" in CONSTRAINTS.read_text()
    (compilers,) = re.findall(r"^TRITONS := (.*)", MAKEFILE, re.MULTILINE)
    assert versions["triton"] in compilers.split()
