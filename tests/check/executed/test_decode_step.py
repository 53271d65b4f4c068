"""A decode step with chiplets: AMD's machine code of the twin, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.check.cross_compile.conftest import run_python
from tests.tritons import needs_3_8

SCRIPT = str(Path(__file__).with_name("decode_step.py"))


@needs_3_8
@pytest.mark.timeout(600)
@pytest.mark.dealt("case")
@pytest.mark.parametrize("case", [("gfx942", 2, 1), ("gfx950", 2, 2)], ids=str)
def test_tokens_and_logits_are_those_of_float64(case: tuple[str, int, int]) -> None:
    runs = json.loads(run_python(SCRIPT, *map(str, case), "0", "1"))
    assert [each["verdict"] for each in runs] == ["right"] * 2, runs
    assert all(each["instructions"] > 0 for each in runs)
