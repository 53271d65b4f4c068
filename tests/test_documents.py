"""The documents: short where they are for users, with links that lead somewhere, and current."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.scripts.api import PATH, document
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants
from tests.ranks import PYTHON, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OPERATIONS = ROOT / "docs" / "ops"
MOST_LINES = (
    {ROOT / "README.md": 150}
    | dict.fromkeys(OPERATIONS.glob("*.md"), 120)
    | dict.fromkeys(ROOT.glob("docs/lab/*.md"), 100)
)
SIZES = {
    "all_gather_matmul": {"m": 1024, "n": 3584, "k": 8192, "gather_dim": 0},
    "matmul_all_reduce": {"m": 64, "n": 8192, "k": 3584},
    "matmul_reduce_scatter": {"m": 64, "n": 8192, "k": 3584},
    "attention": {
        "batch": 1, "length": 8192, "q_heads": 64, "kv_heads": 8, "head_dim": 128,
    },
    "embedding_all_to_all": {"batch": 160, "bag": 20, "tables": 26, "rows": 1 << 20, "dim": 128},
    "stencil": {"rows": 1024, "columns": 1024, "dtype": "float32"},
    "flash_decode": {
        "batch": 1, "q_heads": 96, "kv_heads": 12, "head_dim": 128, "kv_len_per_rank": 8192,
    },
}  # fmt: skip

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(\s*([^)\s]+)[^)]*\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def links(path: Path) -> Iterator[str]:
    """Where a page's links lead, but for those to other hosts."""
    text = _CODE.sub("`", _FENCE.sub("", path.read_text(encoding="utf-8")))
    return (each for each in _LINK.findall(text) if not re.match(r"[a-z]+:", each))


def anchors(path: Path) -> set[str]:
    """What links to places of a page may name."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in _HEADING.findall(text))
    return {title.replace(" ", "-") for title in plain}


def dead_links(path: Path) -> Iterator[str]:
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def python_blocks(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", MOST_LINES, ids=named)
def test_pages_are_short(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES[path]


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_somewhere(path):
    assert list(dead_links(path)) == []


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, `x`\n[](page.md#a-title-x) [](#b) [](no.md) [](https://a.b) `[](c)`"
    )
    assert list(dead_links(page)) == ["#b", "no.md"]


def test_the_api_page_is_what_is_written_today():
    assert PATH.read_text(encoding="utf-8") == document(), "run `python -m docs.scripts.api`"


@pytest.mark.parametrize("op", SIZES)
def test_an_operation_page_names_all_variants_and_meta_parameters(op):
    text = (OPERATIONS / f"{op}.md").read_text(encoding="utf-8")
    problem = problem_class(op)(**{"world_size": 8, "dtype": "bfloat16"} | SIZES[op])
    names = {
        name
        for variant in variants(op).values()
        for hardware in (KNOWN["h200"], KNOWN["mi300x"])
        for name in (variant.name, *variant.space(problem, hardware))
    }
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_python_blocks_are_python(path):
    for block in python_blocks(path):
        compile(block, named(path), "exec")


def test_the_site_has_no_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
