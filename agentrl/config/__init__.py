"""The mechanism of configuration: frozen pydantic sections, TOML in and out, one error sentence.

A run's configuration is a tree of one level: sections, each a `Section` in the package that it configures.
Leaf names are unique over the tree, so the same word is a TOML key (`[rollout] num_rollout = 40`) and a flag
(`--num-rollout 40`).
"""

from agentrl.config.section import Count, ImportPath, Section, Spelling, chosen, renamed
from agentrl.config.tree import (
    Values,
    by_section,
    effective_values,
    leaves,
    merge,
    parse,
    parse_toml,
    read_toml,
    read_written,
    refuse_inactive,
    spellings,
    write_toml,
)

__all__ = [
    "Count",
    "ImportPath",
    "Section",
    "Spelling",
    "Values",
    "by_section",
    "chosen",
    "effective_values",
    "leaves",
    "merge",
    "parse",
    "parse_toml",
    "read_toml",
    "read_written",
    "refuse_inactive",
    "renamed",
    "spellings",
    "write_toml",
]
