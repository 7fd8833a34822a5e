"""Limits of a run file take the place of the environment's own, and are recorded in every episode."""

from __future__ import annotations

import pytest

from agentrl import ScriptedAgent, Task, call, play, say
from agentrl.assembly.config import RunConfig
from agentrl.assembly.env import env_factory
from agentrl.config import parse
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from agentrl.types import Limits
from tests.worlds import Parrot

NAMES = (
    *("reset_timeout_s", "tool_timeout_s", "step_timeout_s", "reward_timeout_s", "episode_timeout_s"),
    *("max_tool_chars", "max_calls_per_turn"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("config", "section"), [(RunConfig, "env"), (EvalConfig, "eval")])
async def test_each_limit_can_be_set_or_lifted(name, config, section):
    for value, limit in ((7, 7), (0, None)):
        chosen = getattr(parse(config, {section: {name: value}}, source="a test"), section)
        make = env_factory("tests.worlds:Parrot", {}, limits=chosen.chosen(max_turns=5, max_tokens=None))
        env = make()
        assert getattr(env.limits, name) == limit
        assert env.limits.max_turns == 5
        unchanged = {field: getattr(env.limits, field) for field in (*NAMES, "max_tokens") if field != name}
        assert unchanged == {field: getattr(Parrot.limits, field) for field in unchanged}


async def test_a_limit_of_the_run_acts_and_is_recorded():
    chosen = parse(RunConfig, {"env": {"max_tool_chars": 3}}, source="a test").env
    env = env_factory("tests.worlds:Parrot", {}, limits=chosen.chosen(max_turns=None, max_tokens=None))()

    def script():
        result = yield call("echo", text="0123456789")
        assert result.startswith("012\n... truncated")
        yield say("3")

    episode = await play(env, ScriptedAgent(script()), Task.ask("t", "?"))
    assert episode.failure is None
    assert isinstance(episode.limits, Limits)
    assert episode.limits.max_tool_chars == 3


@pytest.mark.parametrize("value", [-1, "soon"])
def test_what_is_no_limit_is_one_sentence(value):
    with pytest.raises(ConfigError, match="tool_timeout_s"):
        parse(RunConfig, {"env": {"tool_timeout_s": value}}, source="a test")
