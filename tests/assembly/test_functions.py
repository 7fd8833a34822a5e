"""Functions by path are imported once and tried out before a run: what cannot work is one sentence."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from agentrl import GroupReward, Task, make
from agentrl.assembly.load import load_config
from agentrl.assembly.rewards import build_scorer
from agentrl.assembly.rollout import Filters, build_filters, build_play, build_producer
from agentrl.envs import Scorer, play
from agentrl.envs.agents import ScriptedAgent
from agentrl.envs.config import GenerateChoice
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.config import EvalConfig
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.over_sampling import OverSamplingProducer
from agentrl.rollout.producer import Producer
from tests.worlds import Parrot

MINE = """
from agentrl import GroupReward, Message

calls = []

def keep(group):
    calls.append(group.id)

def broken(*anything):
    raise KeyError("x")

def no_parameters():
    pass

def first(groups, number):
    return groups[:number]

def all_of(groups, number=0):
    return groups

def none(groups):
    return {}

async def turn_by_turn(episode):
    await episode.reset()
    while not episode.is_over:
        await episode.step(await episode.act())

async def twice(episode):
    await episode.reset()
    await episode.act()
    await episode.step(await episode.act(Message("user", "Again.")))

async def same_twice(episode):
    await twice(episode)

async def idle(episode):
    pass

def same(siblings):
    return [0.5] * len(siblings)

weighted = GroupReward(same, weight=0.25, name="even")

def right(task, answer):
    return float(answer == task.answer)

class Thing:
    pass

number = 3
"""
TASK = Task.ask("t", "?", "yes")


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_functions.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_functions", None)


def filters_of(**settings):
    return build_filters(RolloutConfig(**{name: f"my_functions:{path}" for name, path in settings.items()}))


def chosen_by(path):
    rollout = RolloutConfig(over_sampling_batch_size=64, buffer_filter_path=f"my_functions:{path}")
    return build_filters(rollout)


def reused_by(path):
    buffer = {
        "data_buffer_groups": 2,
        "data_buffer_size": 2,
        "data_buffer_filter_path": f"my_functions:{path}",
    }
    return build_filters(RolloutConfig(**buffer))


FILTERS = {
    "dynamic_sampling_filter_path": lambda path: filters_of(dynamic_sampling_filter_path=path),
    "buffer_filter_path": chosen_by,
    "data_buffer_filter_path": reused_by,
    "rollout_sample_filter_path": lambda path: filters_of(rollout_sample_filter_path=path),
    "custom_reward_post_process_path": lambda path: filters_of(custom_reward_post_process_path=path),
    "custom_convert_samples_to_train_data_path": lambda path: filters_of(
        custom_convert_samples_to_train_data_path=path
    ),
    "custom_rollout_log_function_path": lambda path: filters_of(custom_rollout_log_function_path=path),
}


def test_every_filter_is_imported_once_and_tried_out():
    import my_functions

    filters = filters_of(dynamic_sampling_filter_path="keep", rollout_sample_filter_path="none")
    assert filters.drops is my_functions.keep
    assert filters.batch.removed is my_functions.none
    assert filters.choose is None
    assert my_functions.calls
    assert chosen_by("first").choose is my_functions.first
    assert reused_by("first").reused is my_functions.first
    assert set(filters_of()) == {None}


@pytest.mark.parametrize("setting", FILTERS)
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere", "no .* `my_functions:nowhere`: .*name it `package.module:name`."),
        ("Thing", "my_functions:Thing is a type; name a function, or an object that is one."),
        ("number", "my_functions:number is a int; name a function"),
        ("broken", r"my_functions:broken fails when it is tried out \(KeyError: 'x'\); mend it."),
        ("no_parameters", r"no_parameters fails when it is tried out \(TypeError: .*\); mend it."),
        ("all_of", "my_functions:all_of: .* not "),
    ],
)
def test_a_filter_that_cannot_work_is_one_sentence(setting, path, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        FILTERS[setting](path)
    assert "\n" not in str(caught.value)


def generating_by(path):
    return GenerateChoice(custom_generate_function_path=f"my_functions:{path}")


async def test_episodes_are_played_by_the_function_of_the_path():
    assert await build_play(GenerateChoice(), Parrot, TASK) is play
    play_episode = await build_play(generating_by("turn_by_turn"), Parrot, TASK)
    assert play_episode is not play
    assert await build_play(generating_by("idle"), Parrot, None) is not play
    for path, sentence in {
        "idle": "my_functions:idle: it failed on the task `t` .it returned without a turn",
        "same": "my_functions:same: it failed on the task `t`",
        "nowhere": "no generate function `my_functions:nowhere`",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            await build_play(generating_by(path), Parrot, TASK)


async def test_a_prompt_may_ask_for_one_of_the_functions_that_are_named_and_for_no_other():
    paths = ("my_functions:turn_by_turn", "my_functions:twice")
    play_episode = await build_play(GenerateChoice(generate_function_paths=paths), Parrot, TASK)

    async def num_turns(**metadata):
        task = replace(TASK, metadata=metadata)
        return len((await play_episode(Parrot(), ScriptedAgent(["yes", "no"]), task)).turns)

    assert await num_turns() == await num_turns(generate_function_path=paths[0]) == 1
    assert await num_turns(generate_function_path=paths[1]) == 2
    # It can be imported, and the run did not name it.
    for other in ("my_functions:same_twice", 3, ["my_functions:twice"], ""):
        with pytest.raises(UserError, match="name it in generate_function_paths, or leave it out"):
            await num_turns(generate_function_path=other)


async def test_a_generate_function_for_several_agents_is_refused_before_the_run():
    def several():
        return make("RockPaperScissors-v0")

    with pytest.raises(UserError, match="has several agents"):
        await build_play(generating_by("turn_by_turn"), several, several().tasks("train")[0])


def choice(**settings):
    return load_config(None, settings).env


async def test_a_group_reward_is_added_to_those_of_the_environment():
    scorer = await build_scorer(choice(group_reward="my_functions:same"), Parrot, TASK)
    assert [(reward.name, reward.weight) for reward in scorer.rewards] == [("same", 1.0)]
    scorer = await build_scorer(choice(group_reward="my_functions:weighted"), Parrot, TASK)
    assert [(reward.name, reward.weight) for reward in scorer.rewards] == [("even", 0.25)]

    class Ranked(Parrot):
        rewards = (GroupReward(lambda siblings: [0.0] * len(siblings), name="rank"),)

    scorer = await build_scorer(choice(group_reward="my_functions:same"), Ranked, TASK)
    assert [reward.name for reward in scorer.rewards] == ["rank", "same"]
    assert await build_scorer(choice(), Ranked, TASK) == Scorer(Ranked.rewards)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"group_reward": "broken"}, r"my_functions:broken: `broken` failed: KeyError: 'x'"),
        ({"group_reward": "no_parameters"}, "my_functions:no_parameters: .*positional argument"),
        ({"group_reward": "nowhere"}, "no reward `my_functions:nowhere`"),
        ({"group_reward": "Thing"}, "my_functions:Thing is a type; name a function"),
        ({"reward": "broken"}, "my_functions:broken: the reward of the answer 'yes' failed .KeyError"),
        ({"reward": "no_parameters"}, "a reward is called with a task and an answer"),
    ],
)
async def test_a_reward_that_cannot_work_is_one_sentence(settings, sentence):
    named = {name: f"my_functions:{path}" for name, path in settings.items()}
    with pytest.raises(ConfigError, match=sentence) as caught:
        await build_scorer(choice(**named), Parrot, TASK)
    assert "\n" not in str(caught.value)


def test_other_tools_spellings_name_the_reward():
    for spelling in ("custom_rm_path", "reward_fn_path"):
        assert choice(**{spelling: "my_functions:right"}) == choice(reward="my_functions:right")
    assert EvalConfig.model_validate({"eval": {"custom_rm_path": "a:b"}}).eval.reward == "a:b"


def test_the_producer_over_samples_where_that_is_set():
    player = GroupPlayer(Parrot, lambda: None, Scorer(), 2, 0, 0)

    def built(**settings):
        return build_producer(RolloutConfig(**settings), lambda: None, player, Filters(), num_batches=1)

    assert type(built()) is Producer
    assert type(built(over_sampling_batch_size=40)) is OverSamplingProducer
