"""Keys of Triton's cache: the same in every process."""

from __future__ import annotations

import pytest

from tests.check.cross_compile.conftest import run_python
from tests.tritons import OLDEST, TRITONS

SCRIPT = """
import sys
from taxfree_kernels.fabric import base
from taxfree_kernels.device import sync
from taxfree_kernels.fabric import heap
functions = {"wait": sync.wait, "generation": sync.running_generation, "barrier": heap._barrier}
print({name: functions[name].cache_key for name in sys.argv[1].split(",")}["generation"])
"""
AS_TRITON = (
    "from triton.runtime.jit import DependenciesFinder as D\nD._update_hash.__wrapped__ = 0\n"
)


def keys(triton: str, script: str) -> set[str]:
    orders = ("generation,wait,barrier", "wait,generation,barrier", "barrier,wait,generation")
    return {run_python("-c", script, order, triton=triton) for order in orders}


@pytest.mark.dealt("triton")
@pytest.mark.parametrize("triton", TRITONS)
def test_the_key_of_a_kernel_does_not_depend_on_what_was_compiled_before(triton):
    assert len(keys(triton, SCRIPT)) == 1


@pytest.mark.skipif(len(TRITONS) == 1, reason="no other Triton lies aside: make test brings some")
def test_it_would_with_the_oldest_triton_by_itself():
    assert len(keys(OLDEST, AS_TRITON + SCRIPT)) > 1
