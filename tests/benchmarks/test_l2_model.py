"""The comparison with published rates: its rows, its result file, and the page that shows them."""

from __future__ import annotations

import json

import pytest

from benchmarks import l2_model
from benchmarks.l2 import MI300X


@pytest.fixture
def result():
    return json.loads(l2_model.RESULT.read_text(encoding="utf-8"))


@pytest.fixture
def measured():
    return json.loads(l2_model.MEASURED.read_text(encoding="utf-8"))


def test_the_result_file_is_of_todays_parameters(result):
    assert result["kind"] == "modelled"
    assert result["fitted"] == {"jitter": MI300X.jitter}
    assert result["parameters"] == l2_model.parameters()


def test_the_page_shows_the_result_files(result, measured):
    assert l2_model.document(result, measured) == l2_model.DOCUMENT.read_text(encoding="utf-8")


def printed(monkeypatch, capsys, has_numba):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: has_numba or None)
    monkeypatch.setattr("sys.argv", ["l2_model", "--json"])
    assert l2_model.main() == 0
    return json.loads(capsys.readouterr().out)


def test_without_numba_the_rows_are_those_of_the_result_file(result, measured, monkeypatch, capsys):
    rows = printed(monkeypatch, capsys, has_numba=False)
    assert rows == [*result["rows"], *l2_model.h200_rows(measured["cases"])]
    monkeypatch.setattr("sys.argv", ["l2_model", "--write"])
    with pytest.raises(SystemExit):
        l2_model.main()


def test_with_numba_the_model_runs(result, monkeypatch, capsys):
    """On one short length instead of all."""
    monkeypatch.setattr(l2_model, "LENGTHS", (512,))
    monkeypatch.setattr(l2_model, "UNFITTED", {})
    monkeypatch.setattr(l2_model, "GEMMS", ((512, 256),))
    run = l2_model.l2.attention
    monkeypatch.setattr(
        l2_model.l2, "attention", lambda *of, **sizes: run(*of, **sizes | {"length": 512})
    )
    monkeypatch.setattr(l2_model, "h200_rows", lambda cases: [])
    rows = printed(monkeypatch, capsys, has_numba=True)
    assert {"case", "published_low", "published_high", "ours"} <= rows[0].keys()
    shown = [each["case"] for each in result["rows"] if "MI355X" not in each["case"]]
    assert [each["case"] for each in rows] == shown


def test_what_ncu_counted_stands_beside_what_the_model_says(measured):
    smallest = measured["cases"][1]
    assert l2_model.with_model(smallest, measured["tile"]) == smallest
    assert smallest["modelled"]["difference"] == pytest.approx(96.12 - 96.90)


def test_near_the_published_range_is_reproduced():
    assert [
        l2_model.row("a case", 40, 60, ours, 5)["within"] for ours in (34.9, 35, 50, 65, 65.1)
    ] == [False, True, True, True, False]
