"""The environment: a search tool, Search-R1's prompt and tags, exact match over accepted answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from agentrl import Limits, Message, Reward, Script, Step, Tags, Task, ToolEnv, UserError
from agentrl.tools import JSON, SearchTool, ToolFunction, Toolkit, inline, make_tool
from envs_contrib.search_r1.protocol import (
    PROMPT,
    QUESTION,
    em,
    f1,
    golden_answers,
    is_valid,
    prompted,
    text_of,
)
from envs_contrib.search_r1.qa_em import Scoring
from envs_contrib.search_r1.world import built_in_index, questions, thinking, vocabulary


class SearchR1(ToolEnv):
    """Questions that are answered with a search engine, in Search-R1's protocol (arXiv:2503.09516).

    Questions come from `prompt_data`, with the accepted answers in `label_key`: a string, a list, or
    Search-R1's own `reward_model.ground_truth`. Without it there are synthetic ones, of HopSearch's world.

    retriever: the address of a `/retrieve` server; the folder of a saved index, or a JSONL corpus; left out,
        BM25 over the built-in corpus. In Python also a Toolkit with a tool `search`.
    topk: passages for a query, at most.
    retriever_kwargs: further arguments of the tool `search-http` or `search`, such as timeout_s or encoder.
    scoring: settings of `Scoring`, by name: metric (em, f1 or qa_em) and the weights of the format.
    prompt: text around the question, which takes the place of `{question}`. A prompt of the data that shows
        `</answer>` is left as it is.
    seed: of the built-in corpus and questions.

    Every episode is measured by em, f1 and format (1 = a valid sequence of tags), whatever its reward is.
    """

    group = "search"
    breakdown = "hops"
    splits = ("demo", "train", "validation", "test")
    limits = Limits(max_turns=5, max_tokens=4096, max_tool_chars=4000)
    dialect = Tags.search_r1()
    rewards = (Reward(em, 0.0), Reward(f1, 0.0), Reward(is_valid, 0.0, "format"))

    def __init__(
        self,
        retriever: str | Toolkit | None = None,
        *,
        topk: int = 3,
        retriever_kwargs: Mapping[str, JSON] | None = None,
        scoring: Mapping[str, JSON] | None = None,
        prompt: str = PROMPT,
        seed: int = 0,
    ) -> None:
        self._scoring = Scoring.of(scoring or {})
        if QUESTION not in prompt:
            raise UserError(f"prompt is {prompt[:60]!r}; write {QUESTION} where the question belongs.")
        self._prompt, self._seed = prompt, seed
        self._response: list[str] = []
        self._information: list[str] = []
        super().__init__()
        self.offer(_search_tool(retriever, topk, retriever_kwargs or {}, seed))

    def tasks(self, split: str) -> Sequence[Task]:
        """The built-in questions of a split: demo, train, validation or test.

        Raises:
            UserError: no such split.
        """
        return questions(self._seed).tasks(split)

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Open the retriever, and return the prompt with the question.

        Raises:
            UserError: the task has no accepted answer.
            ToolError: the retriever cannot be opened.
        """
        golden_answers(task)
        self._response, self._information = [], []
        observation, info = await super().reset(task, seed=seed)
        return prompted(observation, self._prompt), info

    async def step(self, action: Message) -> Step:
        """Search, or score the answer.

        Raises:
            StageError: the search failed, which counts as a failure of the world.
        """
        self._response.append(text_of(action))
        step = await super().step(action)
        stripped = tuple(replace(message, content=message.text.strip()) for message in step.observation)
        self._response += map(text_of, stripped)
        self._information += [message.text for message in stripped]
        return step._replace(observation=stripped)

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """The score of the response up to now; outside of an episode, of the answer."""
        response = "".join(self._response) or text_of(Message("assistant", answer))
        return self._scoring.score(response, self._information, golden_answers(task))

    def expert(self, task: Task) -> Script:
        """HopSearch's expert, with a thought before each action.

        Raises:
            UserError: the task is not one of the built-in questions.
        """
        _check_is_built_in(task)
        return thinking(questions(self._seed).expert(task))

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The expert with HopSearch's errors: most questions of two hops are answered with the city.

        Raises:
            UserError: the task is not one of the built-in questions.
        """
        _check_is_built_in(task)
        return thinking(questions(self._seed).demonstrator(task, rng))

    def corpus(self) -> Iterable[str]:
        """The text of the built-in world and the prompt; every name is two tokens, as in HopSearch."""
        return vocabulary(self._seed, self._prompt)


def _search_tool(
    retriever: str | Toolkit | None, topk: int, arguments: Mapping[str, JSON], seed: int
) -> Toolkit | ToolFunction:
    if isinstance(retriever, Toolkit):
        return retriever
    if not isinstance(topk, int) or topk < 1:
        raise UserError(f"topk is {topk!r}; give the number of passages, at least 1.")
    if retriever is None and arguments:
        raise UserError(f"retriever_kwargs = {dict(arguments)} needs a retriever; name one, or leave it out.")
    if not isinstance(retriever, str | None):
        raise UserError(f"retriever is {retriever!r}; give an address, a folder or a file of passages.")
    # One for all episodes with these arguments: they share its index, or its connections.
    return _shared_search(retriever, topk, json.dumps(dict(arguments), sort_keys=True), seed)


@lru_cache(maxsize=16)
def _shared_search(retriever: str | None, topk: int, arguments: str, seed: int) -> Toolkit | ToolFunction:
    further = json.loads(arguments)
    if retriever is None:
        return SearchTool(partial(built_in_index, seed), k=topk)
    if retriever.startswith(("http://", "https://")):
        return make_tool("search-http", url=retriever, k=topk, **further)
    return make_tool("search", index=retriever, k=topk, **further)


def _check_is_built_in(task: Task) -> None:
    if "hops" not in task.metadata:
        raise UserError(f"{task.id} is a question of a file, which no script solves; leave the expert out.")
