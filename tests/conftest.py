"""What tests of more than one room share.

Kernels are interpreted in these tests; what compiles them does so in processes of its own. That is
set here because Triton decides it when a kernel is defined, and any test may be the first to
import one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ranks import Ranks

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Worker groups, one per world size, for all tests of the session."""
    from tests.ranks import Ranks

    found = Ranks()
    yield found
    found.close()
