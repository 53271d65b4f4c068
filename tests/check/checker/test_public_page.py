"""The page of public kernels shows the committed results, of enough kernels."""

from __future__ import annotations

import json

from tests.check.checker import public_kernels

ROWS = json.loads(public_kernels.RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_written_from_the_results():
    assert public_kernels.PAGE.read_text(encoding="utf-8") == public_kernels.page(ROWS)


def test_there_are_enough_kernels_and_each_report_was_read():
    assert len(ROWS) >= 15
    assert len({row["project"] for row in ROWS}) >= 3
    assert all(row["reading"] for row in ROWS if row["verdict"] != "pass")
