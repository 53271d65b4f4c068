"""Each refused call of the table, on two ranks of the host fabric."""

from __future__ import annotations

from pathlib import Path

import pytest

from taxfree_cli.exits import ExitCode, failure
from tests.bad_input.table import TENSORS, Call
from tests.ranks import Ranks


@pytest.mark.parametrize("row", TENSORS, ids=lambda row: row.did)
def test_is_refused_with_a_hint(row: Call, ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, "tests.bad_input.calls:refused", call=row.task, folder=tmp_path)
    for rank in row.ranks:
        assert told[rank] is not None, f"nothing is refused on rank {rank}"
        assert row.error in told[rank]["message"]
        assert row.hint in told[rank]["hint"]
        assert told[rank]["exit_code"] == row.code


def test_no_process_group() -> None:
    import taxfree

    with pytest.raises(taxfree.UsageError) as caught:
        taxfree.init()
    told = failure(caught.value)
    assert (told.message, told.exit_code) == ("no process group", ExitCode.USAGE)
    assert "init_process_group" in told.hint


def test_each_row_has_a_name_of_its_own() -> None:
    assert len({row.did for row in TENSORS}) == len(TENSORS)
