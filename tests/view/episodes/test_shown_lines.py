"""The line of an entry as a page shows it: the journal's own, with logprobs of four decimals."""

from __future__ import annotations

import json
import math
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import members
from agentrl.view.episodes.line import _rounded
from tests.view.episodes.journals import (
    entry,
    payloads,
    searched,
    write,
)
from tests.view.episodes.test_site import LINE, site_of


def with_argument(value):
    line = deepcopy(LINE)
    line["episode"]["trajectories"][0]["turns"][0]["action"]["tool_calls"][0]["arguments"] = value
    return line


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    "line",
    [
        compact(with_argument({"logprobs": [0.123456]})),
        compact(with_argument({'"logprobs': [0.123456]})),
        compact(with_argument({"query": '"logprobs":[0.123456]'})),
        compact(with_argument({"query": "logprobs"})),
        compact(with_argument({"query": math.nan})),
        compact(with_argument({"query": math.inf})),
        compact(with_argument({"logprobs": [0.123456]})).replace('"logprobs":[-', '"logprobs": [-'),
        compact(LINE).replace("[-0.0,-0.5]", "[-0.00005,-12.345678]"),
        compact(LINE).replace("[-0.0,-0.5]", "[-0,-1e-7]"),
        compact(LINE).replace('"logprobs":[', '"log\\u0070robs":['),
        compact(LINE).replace("[-0.0,-0.5]", '[{"$float":"nan"},{"$float":"-inf"}]'),
        json.dumps(LINE),
        json.dumps(LINE, indent=1).replace("\n", " "),
    ],
)
def test_a_line_in_any_form_is_shown_as_it_is_with_four_decimals(tmp_path, line):
    run = write(tmp_path, {1: [entry(searched())]})
    members.append(run / "trajectories" / "step_000001.jsonl.gz", [f"{line}\n".encode()], at=0)
    recorded = json.loads(line)
    for turn in recorded["episode"]["trajectories"][0]["turns"]:
        completion = turn["tokens"]["completion"]
        completion["logprobs"] = [v if isinstance(v, dict) else round(v, 4) for v in completion["logprobs"]]
    # Python's JSON has constants that a browser's does not have.
    names = {"NaN": "nan", "Infinity": "inf"}
    expected = json.loads(json.dumps(recorded), parse_constant=lambda name: {"$float": names[name]})
    (text,) = [value for name, value in payloads(site_of(run)).items() if name.startswith("episodes-")]
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) == expected


@given(
    st.lists(
        st.floats(width=32) | st.floats() | st.integers(-(10**7), 10**7).map(lambda n: n / 10**5), max_size=9
    )
)
def test_numbers_are_rounded_as_python_rounds_them(values):
    assert list(map(repr, _rounded(values))) == [repr(round(value, 4)) for value in values]
