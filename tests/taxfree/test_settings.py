"""Environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from taxfree.errors import UsageError
from taxfree.settings import VARIABLES, Settings


def test_an_empty_environment_has_defaults():
    assert Settings.from_environment({}) == Settings(False, False, 30.0, None, None, False)


def test_empty_variables_are_as_good_as_none():
    assert Settings.from_environment(dict.fromkeys(VARIABLES, "")) == Settings()


def test_all_are_read():
    environment = {
        "TAXFREE_DB": "/some/where.sqlite",
        "TAXFREE_DISABLE": "1",
        "TAXFREE_STRICT": "yes",
        "TAXFREE_TIMEOUT": "2.5",
        "TAXFREE_LOG": "/some/problems.yaml",
        "TAXFREE_AUTOTUNE": "1.5m",
        "TAXFREE_DEBUG": "ON",
        "TAXFREE_VERIFY": "0",
        "TAXFREE_NODE": "a",
    }
    assert environment.keys() == VARIABLES.keys()
    expected = Settings(True, True, 2.5, Path("/some/problems.yaml"), 90.0, True, False)
    assert Settings.from_environment(environment) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TAXFREE_DISABLE", "maybe"),
        ("TAXFREE_STRICT", "2"),
        ("TAXFREE_TIMEOUT", "soon"),
        ("TAXFREE_TIMEOUT", "0"),
        ("TAXFREE_TIMEOUT", "-1"),
        ("TAXFREE_TIMEOUT", "inf"),
        ("TAXFREE_TIMEOUT", "nan"),
        ("TAXFREE_LOG", "problems.json"),
    ],
)
def test_nonsense_is_named(name, text):
    with pytest.raises(UsageError, match=f"{name}={text}"):
        Settings.from_environment({name: text})


@pytest.mark.parametrize("text", ["soon", "60", "0s", "-1m", "1 h"])
def test_what_is_no_time_to_tune_is_named(text):
    with pytest.raises(UsageError, match=f"invalid TAXFREE_AUTOTUNE '{text}'"):
        Settings.from_environment({"TAXFREE_AUTOTUNE": text})


def test_ranks_must_agree_on_what_steers_dispatch_and_on_nothing_else():
    one = Settings.from_environment({"TAXFREE_DB": "/a", "TAXFREE_TIMEOUT": "5"})
    assert one.steering() == Settings().steering()
    for name in ("TAXFREE_DISABLE", "TAXFREE_STRICT"):
        assert Settings.from_environment({name: "1"}).steering() != Settings().steering()
    assert Settings.from_environment({"TAXFREE_VERIFY": "0"}).steering() != Settings().steering()
    assert Settings.from_environment({"TAXFREE_AUTOTUNE": "1s"}).steering() != Settings().steering()
