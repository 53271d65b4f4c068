"""Where the scripts' records go, and what is written with them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import measure, soak
from benchmarks.commands import keep
from taxfree_kernels.hardware import KNOWN

GROUP = SimpleNamespace(hardware=KNOWN["h200"], world_size=8)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr("taxfree_tune.measuring.environment.record", lambda *_: {"python": "3.12"})


@pytest.mark.parametrize(
    ("shared_gpus", "name"), [(None, "nvidia-h200-x8.json"), (1, "nvidia-h200-x8-on-1.json")]
)
def test_a_record_of_gpus_is_named_by_them(tmp_path, capsys, shared_gpus, name):
    keep({"rows": [1]}, GROUP, "cuda", tmp_path, None, shared_gpus)
    (path,) = tmp_path.iterdir()
    assert path.name == name
    assert capsys.readouterr().out == f"wrote {path}\n"
    record = {"schema": 1, "environment": {"python": "3.12"}, "ranks": 8, "rows": [1]}
    shared = {} if shared_gpus is None else {"shared_gpus": shared_gpus}
    assert json.loads(path.read_text()) == record | shared


def test_a_record_of_the_host_is_kept_where_the_user_wants_it_alone(tmp_path, capsys):
    keep({"rows": []}, GROUP, "host", tmp_path, None)
    assert list(tmp_path.iterdir()) == []
    assert "--out FILE keeps them" in capsys.readouterr().out
    keep({"rows": []}, GROUP, "host", tmp_path / "nowhere", tmp_path / "mine.json")
    assert json.loads((tmp_path / "mine.json").read_text())["ranks"] == 8


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (soak, ["--calls", "0"]),
        (soak, ["--gpus", "-1"]),
        (soak, ["--calls", "many"]),
        (measure, ["--gpus", "0", "--dry-run"]),
        (measure, ["--gpus", "2", "--trials", "0", "--dry-run"]),
    ],
)
def test_numbers_that_make_no_sense_are_refused(monkeypatch, capsys, script, options):
    monkeypatch.setattr("sys.argv", ["script", *options])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    assert f"argument {options[-2 if options[-1] != '--dry-run' else -3]}: invalid" in (
        capsys.readouterr().err
    )
