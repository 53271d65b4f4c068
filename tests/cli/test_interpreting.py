"""What is said before kernels are interpreted."""

from __future__ import annotations

import pytest

from taxfree_cli.asked import announce
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul


@pytest.mark.parametrize(
    ("m", "said"), [(16, None), (128, "takes about 19 s"), (1024, "takes about 3 minutes")]
)
def test_problems_that_take_long_are_named(capsys, m, said):
    announce([AllGatherMatmul(1, 64, 64), AllGatherMatmul(m, 3584, 8192)])
    told = capsys.readouterr().err
    assert "host fabric: times are of interpreted kernels" in told
    if said is None:
        assert "warning" not in told
    else:
        assert f"m={m} n=3584 k=8192" in told
        assert said in told
        assert told.endswith(", a candidate several calls; --shapes demo is small\n")
