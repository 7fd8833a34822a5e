"""The table of the guide "Environments that ship" is that of the registry."""

from __future__ import annotations

import re

from agentrl import env_ids, make
from agentrl.envs.catalog import by_family, catalog, markdown
from tests.docs.blocks import ROOT

GUIDE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
TABLE = re.search(r"<!-- agentrl envs table -->\n(.*)<!-- end -->", GUIDE, re.DOTALL)[1]


def test_the_table_is_what_the_command_prints_of_the_environments_that_ship():
    ours = [id for id in env_ids() if type(make(id)).__module__.startswith(("agentrl.", "envs_contrib."))]
    expected = "\n".join(markdown(by_family(catalog(ours))))
    assert TABLE.strip() == expected.strip(), (
        "put the output of `agentrl envs table` into docs/environments.md"
    )
