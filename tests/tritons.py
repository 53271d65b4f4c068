"""The Tritons that kernels are compiled with: the installed one, and those laid aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from taxfree_check.cross_compile.report import triton_version
from tests.rooms import ROOT


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


#: version -> its folder; None for the installed one
FOLDERS: dict[str, Path | None] = {
    folder.name: folder for folder in ROOT.glob(".tritons/*") if (folder / "triton").is_dir()
} | {triton_version(None): None}
TRITONS = tuple(sorted(FOLDERS, key=_number))
OLDEST, NEWEST = TRITONS[0], TRITONS[-1]


def before(minor: int) -> tuple[str, ...]:
    """Those before Triton 3.`minor`."""
    return tuple(each for each in TRITONS if _number(each) < [3, minor])


#: AMD's fabric refuses these, because they compile signals wrongly
BEFORE_3_8 = before(8)
SINCE_3_8 = TRITONS[len(BEFORE_3_8) :]
needs_before_3_8 = pytest.mark.skipif(
    not BEFORE_3_8, reason="no Triton before 3.8 lies aside: make test brings it"
)
needs_3_8 = pytest.mark.skipif(
    not SINCE_3_8, reason="Triton is older than 3.8, and no other lies aside: make test brings it"
)
