"""docs/cli.md says what the code and the table say."""

from __future__ import annotations

from tests.bad_input.document import PATH, document


def test_the_page_is_what_is_written_today() -> None:
    assert PATH.read_text(encoding="utf-8") == document(), "run `make docs`"
