"""Random spoiling of what users and other programs hand to taxfree; a seed always gives the same.

Documents are spoiled as structures, so that most of them still parse and the damage gets deep into
the program; some are spoiled as text as well.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

SHAPES = (
    "m=1,16,64 n=3584 k=8192",
    "1,16x3584x8192 gather_dim=0",
    "paper dtype=bf16",
    "model m=1,16 weight_layout=kn",
    "m=16 n=64 k=64 world_size=2 bias=yes dtype=float16",
    "demo",
)
_CHARACTERS = "=,x0123456789 -+._mnk\t\n'\"[]{}:&*!%#@|>\\/~\x00\x1b\x7f\x85\u202e\ufeff\ud800é٣😀"
_NUMBERS = ("0", "-1", "1e3", "1_0", "0x10", "007", "2147483648", "9" * 30, "9" * 5000, "", "nan")
_VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2, 7, 0.5, -0.0, 1e308, 10**18, 10**400, float("nan"),
    float("inf"), "", "x", "push", "baseline", "16", "float16", "graph", "2026-01-01",
    "9999-12-31T23:59:59+14:00", "\ud800", "\x1b[31m\x00", "a b\nc", "[bold]", "é" * 300,
    [], [[]], {}, {"": ""}, {"x": {"y": 1}}, ["a", 1, None],
)  # fmt: skip


def spoiled_text(random: Random, text: str) -> str:
    """A text with a few changes to its characters or numbers."""
    for _ in range(random.randint(1, 3)):
        text = random.choice(_TEXT_CHANGES)(random, text)
    return text


def spoiled_document(random: Random, document: Any) -> Any:
    """A JSON document with a few values replaced, removed, added or moved."""
    document = copy.deepcopy(document)
    for _ in range(random.randint(1, 2)):
        _spoil(random, document)
    return document


def spoiled_json(random: Random, document: Any) -> str:
    """The text of a spoiled document, which may be spoiled itself."""
    text = json.dumps(spoiled_document(random, document))
    return spoiled_text(random, text) if random.random() < 0.2 else text


def spoiled_bytes(random: Random, content: bytes) -> bytes:
    """A file with some bytes changed, cut off or repeated."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 20)):
        changed[random.randrange(len(changed))] = random.randrange(256)
    if random.random() < 0.2:
        del changed[random.randrange(len(changed)) :]
    if random.random() < 0.1:
        changed += changed[: random.randrange(len(changed) + 1)]
    return bytes(changed)


# -- text --


def _put(random: Random, text: str) -> str:
    at = random.randint(0, len(text))
    return text[:at] + random.choice(_CHARACTERS) * random.choice((1, 1, 1, 2, 300)) + text[at:]


def _cut(random: Random, text: str) -> str:
    begin = random.randint(0, len(text))
    return text[:begin] + text[begin + random.choice((1, 1, 5, len(text))) :]


def _repeat(random: Random, text: str) -> str:
    begin = random.randint(0, len(text))
    piece = text[begin : begin + random.randint(1, 20)]
    return text[:begin] + piece * random.choice((2, 2, 50)) + text[begin:]


def _renumber(random: Random, text: str) -> str:
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        return text
    found = random.choice(numbers)
    return text[: found.start()] + random.choice(_NUMBERS) + text[found.end() :]


def _mix(random: Random, text: str) -> str:
    other = random.choice(SHAPES)
    return text[: random.randint(0, len(text))] + other[random.randint(0, len(other)) :]


_TEXT_CHANGES = (_put, _cut, _repeat, _renumber, _mix)


# -- documents --


def _spoil(random: Random, document: Any) -> None:
    places = list(_places(document))
    if not places:
        return
    holder, name = random.choice(places)
    change = random.randrange(6)
    if change == 0:
        del holder[name]
    elif change == 1 and isinstance(holder, dict):
        holder[random.choice(("", "m", "extra", "schema", "\ud800", name))] = holder[name]
    elif change == 2:
        other, key = random.choice(places)
        holder[name] = copy.deepcopy(other[key])
    elif change == 3 and isinstance(holder[name], list):
        holder[name] = holder[name] * random.choice((0, 2, 50))
    elif change == 4 and isinstance(holder[name], int | float):
        holder[name] = holder[name] * random.choice((-1, 0, 0.5, 10**9))
    else:
        holder[name] = _value(random)


def _value(random: Random) -> Any:
    value = copy.deepcopy(random.choice(_VALUES))
    for _ in range(random.choice((0, 0, 0, 1, 3, 40))):
        value = [value] if random.random() < 0.5 else {"x": value}
    return value


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below a document."""
    if isinstance(document, dict):
        entries = list(document.items())
    elif isinstance(document, list):
        entries = list(enumerate(document))
    else:
        return
    for name, value in entries:
        yield document, name
        yield from _places(value)
