"""Turns shapes, as users write them, into problems.

A shape is a list of words: at most one bare word, which is a named set or the operation's
shorthand, then `field=value` words. Values separated by commas are combined with each other::

    m=1,16,64 n=3584 k=8192        1,16,64x3584x8192 gather_dim=0        paper dtype=bf16

A YAML file lists such texts, or mappings of the fields. A mapping may also have ``op``, the
operation that it is of, and ``calls``, how often a run called it, which only its writer reads.

The fields are those of the operation's problem, and its folder names the shorthand and the sets: a
new operation works without changes here.
"""

from taxfree_tune.shapes.models import known_models
from taxfree_tune.shapes.request import (
    DEFAULT_SET,
    INTERPRETED_SET,
    ChosenProblems,
    ShapeRequest,
    choose,
    expand,
    is_wanted,
    is_without_dtype,
    left_out,
    named_sets,
    operations,
    parse_counts,
    parse_paths,
)

__all__ = [
    "DEFAULT_SET",
    "INTERPRETED_SET",
    "ChosenProblems",
    "ShapeRequest",
    "choose",
    "expand",
    "is_wanted",
    "is_without_dtype",
    "known_models",
    "left_out",
    "named_sets",
    "operations",
    "parse_counts",
    "parse_paths",
]
