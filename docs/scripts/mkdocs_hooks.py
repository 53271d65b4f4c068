"""Hooks of MkDocs: pages of the repository's root, and links to files that are no pages."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
#: file -> page
_PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)]*)?\)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for source, page in _PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to pages; of links to other files of the repository leave the text."""
    uri = page.file.src_uri
    source = {target: name for name, target in _PAGES.items()}.get(uri, f"docs/{uri}")
    folder = Path(source).parent

    def target(path: str) -> str | None:
        """The page or picture that a link of the repository means, seen from this page."""
        linked = os.path.normpath(folder / path)
        if linked not in _PAGES and not linked.startswith("docs/"):
            return None
        shown = _PAGES.get(linked, linked.removeprefix("docs/"))
        return os.path.relpath(shown, Path(uri).parent)

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        shown = target(path)
        if shown is not None:
            return f"[{text}]({shown}{anchor})"
        if not (ROOT / folder / path).exists():
            return match[0]  # for the strict build to report
        return text

    def picture(match: re.Match[str]) -> str:
        return f"![{match[1]}]({target(match[2]) or match[2]})"

    return _PICTURE.sub(picture, _LINK.sub(link, markdown))
