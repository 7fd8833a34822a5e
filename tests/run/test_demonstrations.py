from __future__ import annotations

import asyncio
import random

import pytest

from agentrl import JointStep, Message, MultiAgentEnv, Script, Step, Task, ToolEnv, call, say
from agentrl.errors import WorldBrokenError
from agentrl.rendering.fresh_tokenizer import CALL_MARKERS, train_tokenizer
from agentrl.rendering.inline import InlineRenderer
from agentrl.rendering.template import TemplateRenderer
from agentrl.run.demonstrations import demonstrate
from agentrl.types import Author
from agentrl.types.seams import ToolSchema

TAGS = [f"<{slash}{name}>" for name in ("echo", "result", "answer") for slash in ("", "/")]


def echo(text: str) -> str:
    """Say it again."""
    return text


class Echo(ToolEnv):
    tools = (echo,)

    def tasks(self, split: str) -> list[Task]:
        return [Task.ask(word, f"Say {word}", word) for word in ("one", "two", "six")]

    def reward(self, task: Task, answer: str) -> float:
        return float(answer == task.answer)

    def expert(self, task: Task) -> Script:
        result = yield call("echo", text=task.id)
        yield say(result)


class Endless(Echo):
    def expert(self, task: Task) -> Script:
        while True:
            yield call("echo", text=task.id)


class Broken(Echo):
    def reward(self, task: Task, answer: str) -> float:
        raise OSError("the disk is gone")


def renderer() -> InlineRenderer:
    tokenizer = train_tokenizer(["Say one two six"], special_tokens=TAGS, vocab_size=400)
    return InlineRenderer(tokenizer, Echo().dialect)


async def test_a_demonstration_is_what_the_script_did_and_only_its_actions_are_learned() -> None:
    words = renderer()
    samples = await demonstrate(Echo, words, Echo().tasks("train"), 7, seed=3, progress=lambda _: None)
    assert len(samples) == 7
    for sample in samples:
        learned = words.decode(sample.token_ids[sample.loss_mask].tolist())
        text = words.decode(sample.token_ids.tolist())
        word = text.removeprefix("<|user|> Say ").split("<")[0]
        assert learned == f"<echo> {word}</echo><answer> {word}</answer>"
        assert text.endswith(f"<echo> {word}</echo><result> {word}</result><answer> {word}</answer>")
        assert set(sample.author[sample.loss_mask].tolist()) == {int(Author.DEMO)}


async def test_every_task_is_demonstrated_before_one_is_repeated() -> None:
    words = renderer()
    samples = await demonstrate(Echo, words, Echo().tasks("train"), 6, seed=0, progress=lambda _: None)
    texts = [words.decode(sample.token_ids.tolist()) for sample in samples]
    assert len(set(texts[:3])) == len(set(texts[3:])) == 3


async def test_a_demonstrator_that_never_ends_is_told_of() -> None:
    with pytest.raises(WorldBrokenError, match="none of 4 demonstrations"):
        await demonstrate(Endless, renderer(), Echo().tasks("train"), 4, seed=0, progress=lambda _: None)


async def test_a_world_that_breaks_under_its_own_expert_is_told_of() -> None:
    with pytest.raises(WorldBrokenError, match="reward: OSError: the disk is gone"):
        await demonstrate(Broken, renderer(), Echo().tasks("train"), 4, seed=0, progress=lambda _: None)


def test_the_demonstrators_noise_comes_from_the_generator_it_is_given() -> None:
    env = Echo()
    script = env.demonstrator(env.tasks("train")[0], random.Random(0))
    assert next(script).tool_calls[0].arguments == {"text": "one"}


class Narrowing(Echo):
    """Takes its tool away once it was used."""

    used = False

    @property
    def tool_schemas(self) -> tuple[ToolSchema, ...]:
        return () if self.used else tuple(super().tool_schemas)

    async def step(self, action: Message) -> Step:
        self.used = True
        return await super().step(action)


async def test_every_turn_is_written_with_the_tools_that_were_on_offer_then() -> None:
    tokenizer = train_tokenizer(["Say one two six"], special_tokens=CALL_MARKERS, vocab_size=400)
    words = TemplateRenderer(tokenizer)
    first, second = await demonstrate(
        Narrowing, words, Narrowing().tasks("train")[:1], 1, seed=0, progress=lambda _: None
    )
    assert '"echo"' in words.decode(first.token_ids.tolist()).split("<|end|>")[0]
    assert words.decode(second.token_ids.tolist()).startswith("<|user|> Say one<|end|>")
    assert words.decode(second.token_ids[second.loss_mask].tolist()) == " one<|end|>"


async def test_demonstrations_wait_for_their_tools_together() -> None:
    both = asyncio.Barrier(2)

    class Waiting(Echo):
        async def step(self, action: Message) -> Step:
            async with asyncio.timeout(20):
                await both.wait()
            return await super().step(action)

    samples = await demonstrate(
        Waiting, renderer(), Echo().tasks("train"), 2, seed=0, progress=lambda _: None
    )
    assert len(samples) == 2


class Served(MultiAgentEnv):
    """A user asks for a word, and the assistant says it."""

    possible_agents = ("assistant", "user")
    scripted_agents = ("user",)

    def tasks(self, split: str) -> list[Task]:
        return Echo().tasks(split)

    async def reset(self, task: Task, *, seed: int) -> tuple[dict[str, tuple[Message, ...]], dict[str, str]]:
        self.acting = ("user",)
        return {"user": task.prompt}, {}

    async def step(self, actions: dict[str, Message]) -> JointStep:
        if "assistant" in actions:
            return JointStep.finished({"assistant": 1.0})
        self.acting = ("assistant",)
        return JointStep.going({"assistant": (Message("user", actions["user"].text),)})

    def expert(self, task: Task, agent: str, prompt: str) -> Script:
        yield say(task.id if agent == "assistant" else f"Say {task.id}")


async def test_a_warm_start_imitates_no_agent_that_is_a_part_of_the_world() -> None:
    samples = await demonstrate(
        Served, renderer(), Served().tasks("train"), 3, seed=0, progress=lambda _: None
    )
    assert [sample.rollout_id.agent for sample in samples] == ["assistant"] * 3
