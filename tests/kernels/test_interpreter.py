"""bf16 and fp8 in Triton's interpreter, with the corrections that the host fabric installs."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.ranks import KERNELS, PYTHON, environment
from tests.tritons import FOLDERS, TRITONS


def probe(*folders, source="from tests.kernels.interpreter_probe import main; main()"):
    variables = environment(TRITON_INTERPRET="1")
    path = os.pathsep.join([*map(str, folders), variables["PYTHONPATH"]])
    done = subprocess.run(
        [PYTHON, "-c", source],
        env={**variables, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestNarrowTypes:
    @pytest.mark.dealt("triton")
    @pytest.mark.parametrize("triton", TRITONS)
    def test_is_that_of_torch_bit_for_bit(self, triton):
        found = probe(*filter(None, [FOLDERS[triton]]))
        assert found["triton"] == triton
        assert wrong(found) == {}

    def test_is_wrong_without_the_corrections(self):
        """Else they could go, and the tests above would show nothing."""
        source = (
            "import taxfree_kernels.interpreter as corrections\n"
            "corrections.correct_types = lambda: None\n"
            "from tests.kernels.interpreter_probe import main; main()"
        )
        found = wrong(probe(source=source))
        assert "torch.bfloat16 dot of integers" in found
        assert "down, ties and their neighbours" in found
        assert "torch.float8_e4m3fn down" in found


class TestInterpreting:
    @pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False)])
    def test_is_decided_by_the_environment(self, value, expected):
        source = "from taxfree_kernels.interpreter import is_interpreting; print(is_interpreting())"
        done = subprocess.run(
            [PYTHON, "-c", source],
            env=environment(KERNELS, TRITON_INTERPRET=value),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(expected)


def wrong(found):
    assert len(found["checks"]) > 10
    return {name: count for name, count in found["checks"].items() if count}
