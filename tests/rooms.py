"""Where the sources are: the roots that pytest imports from, for processes of their own."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = [ROOT / each for each in PYPROJECT["tool"]["pytest"]["ini_options"]["pythonpath"]]
PYTHONPATH = os.pathsep.join(map(str, SOURCES))
