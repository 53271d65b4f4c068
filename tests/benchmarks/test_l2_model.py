"""The comparison with published rates: its rows, its result file, and the page that shows them."""

from __future__ import annotations

import json

import pytest

from benchmarks import l2_model
from benchmarks.documents import with_block
from taxfree_kernels.cost.l2 import MI300X


@pytest.fixture
def result():
    return json.loads(l2_model.RESULT.read_text(encoding="utf-8"))


def test_the_result_file_is_of_todays_parameters(result):
    assert result["kind"] == "modelled"
    assert result["fitted"] == {"jitter": MI300X.jitter}
    assert result["parameters"] == l2_model.parameters()


def test_the_page_shows_the_result_file(result):
    shown = l2_model.DOCUMENT.read_text(encoding="utf-8")
    for name, content in l2_model.BLOCKS.items():
        assert with_block(l2_model.DOCUMENT, name, content(result)) == shown


def test_rows_as_json(result, monkeypatch, capsys):
    monkeypatch.setattr(l2_model, "computed", lambda: result)
    monkeypatch.setattr("sys.argv", ["l2_model", "--json"])
    assert l2_model.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == result["rows"]
    assert {"case", "published_low", "published_high", "ours"} <= rows[0].keys()


def test_near_the_published_range_is_reproduced():
    assert [
        l2_model.row("a case", 40, 60, ours, 5)["within"] for ours in (34.9, 35, 50, 65, 65.1)
    ] == [False, True, True, True, False]


def test_the_picture_is_drawn(result, tmp_path):
    l2_model.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
