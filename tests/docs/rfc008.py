"""The table in docs/rfc-008.md: `make reference` writes it of the rows of `agentrl.envs.check.rfc008`."""

from __future__ import annotations

import re

from agentrl.envs.check.rfc008 import table
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "rfc-008.md"
_TABLE = re.compile(r"(?<=<!-- CHECKS -->\n).*(?=<!-- end -->)", re.DOTALL)


def page() -> str:
    """The page with the table as it should be."""
    lines = "\n".join(table())
    return _TABLE.sub(lambda _: f"{lines}\n", PAGE.read_text(encoding="utf-8"))


def write() -> None:
    """Write the table into the page."""
    PAGE.write_text(page(), encoding="utf-8")
