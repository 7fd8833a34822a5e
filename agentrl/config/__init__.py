"""The mechanism of configuration: frozen pydantic sections, TOML in and out, one error sentence.

A run's configuration is a tree of one level: sections, each a `Section` in the package that it configures.
Leaf names are unique over the tree, so the same word is a TOML key (`[rollout] num_rollout = 40`) and a flag
(`--num-rollout 40`).
"""

from agentrl.config.section import (
    Changes,
    Count,
    ImportPath,
    Needs,
    NotNegative,
    Positive,
    Section,
    Share,
    ShareAboveZero,
    Spelling,
    Variant,
    chosen,
    renamed,
)
from agentrl.config.tree import (
    Values,
    by_section,
    changes_of,
    defaults,
    effective_values,
    leaves,
    merge,
    parse,
    parse_toml,
    read_toml,
    read_written,
    refuse_inactive,
    sections_of,
    spellings,
    write_toml,
)

__all__ = [
    "Changes",
    "Count",
    "ImportPath",
    "Needs",
    "NotNegative",
    "Positive",
    "Section",
    "Share",
    "ShareAboveZero",
    "Spelling",
    "Values",
    "Variant",
    "by_section",
    "changes_of",
    "chosen",
    "defaults",
    "effective_values",
    "leaves",
    "merge",
    "parse",
    "parse_toml",
    "read_toml",
    "read_written",
    "refuse_inactive",
    "renamed",
    "sections_of",
    "spellings",
    "write_toml",
]
