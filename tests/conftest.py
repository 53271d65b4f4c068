"""What tests of more than one room share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Worker groups, one per world size, for all tests of the session."""
    from tests.ranks import Ranks

    found = Ranks()
    yield found
    found.close()
