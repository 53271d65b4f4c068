"""Committed measurements of kernels: the shipped tables and the result files, with their hashes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taxfree import fingerprints
from taxfree.measuring.results import DISPATCH
from taxfree_kernels.variant import operation_names
from taxfree_tuning_db.records import canonical_json
from taxfree_tuning_db.renamed import with_new_names

MEASURED = ("tuning_db/taxfree_tuning_db/tables/*.json", "benchmarks/results/**/*.json")
_FORMS: tuple[dict[str, Any], ...] = (
    {"indent": 1, "sort_keys": True}, {"indent": 1}, {}, {"separators": (",", ":")},
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Subject:
    """The key of a measurement; problem and config are canonical JSON with current names."""

    gpu: str
    op: str
    problem: str
    variant: str
    config: str

    def __str__(self) -> str:
        return f"{self.op} {self.problem} {self.variant} {self.config} on {self.gpu}"


@dataclass(frozen=True)
class Site:
    """A measurement in a file; `entry` is the JSON object with the hash, changed in place."""

    subject: Subject
    entry: dict[str, Any]

    @property
    def kernel_hash(self) -> str:
        return str(self.entry["kernel_hash"])


@dataclass
class Document:
    """A committed file of measurements."""

    path: Path
    text: str
    content: Any
    sites: list[Site]

    @classmethod
    def load(cls, path: Path) -> Document:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        sites: list[Site] = []  # none in a file that measures no variant
        for name, sites_of in (("records", _sites_of_records), ("rows", _sites_of_rows)):
            if name in content:
                content[name] = [with_new_names(each.get("op"), each) for each in content[name]]
                sites += sites_of(content)
        return cls(path, text, content, sites)

    def new_text(self) -> str:
        """The changed file, formatted as it is.

        Raises:
            SystemExit: the file has an unknown format.
        """
        was = json.loads(self.text)
        for form in _FORMS:
            for end in ("\n", ""):
                if json.dumps(was, **form) + end == self.text:
                    return json.dumps(self.content, **form) + end
        raise SystemExit(f"error: {self.path}: unknown format; write it with json.dumps")


def _sites_of_records(content: dict[str, Any]) -> Iterator[Site]:
    for each in content["records"]:
        gpu, op, problem = each["hardware"]["gpu"], each["op"], canonical_json(each["problem"])
        for entry in (each["winner"], each["baseline"], *each["runners_up"]):
            config = canonical_json(entry["config"])
            yield Site(Subject(gpu, op, problem, entry["variant"], config), entry)


def _sites_of_rows(content: dict[str, Any]) -> Iterator[Site]:
    gpu = content.get("environment", {}).get("hardware", {}).get("gpu", "")
    for row in content["rows"]:
        if not row.get("kernel_hash"):  # no kernel of ours, or a file without hashes
            continue
        variant, config = row["variant"], dict(row["config"])
        if variant == DISPATCH:
            variant = config.pop("variant")
        problem = canonical_json(row["problem"])
        yield Site(Subject(gpu, row["op"], problem, variant, canonical_json(config)), row)


def load_documents(root: Path) -> list[Document]:
    """Read all committed files of measurements."""
    paths = sorted(path for pattern in MEASURED for path in root.glob(pattern))
    return [Document.load(path) for path in paths]


def current_hash(subject: Subject) -> str | None:
    """The hash of the variant's sources; None if the variant was removed."""
    if subject.op not in operation_names():
        return None
    return fingerprints.kernel_hashes(subject.op).get(subject.variant)
