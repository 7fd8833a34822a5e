"""Episodes as ATIF-v1.8, the Agent Trajectory Interchange Format (Harbor, RFC 0001), without a loss.

One document an episode. Its steps are those of the episode's first `Trajectory`; every other one, of another
agent or after a restart, is a document in `subagent_trajectories`, and a system step at the end refers to it:

    observation (system, user) -> a step each
    action                     -> an agent step: message, reasoning_content, tool_calls, metrics
    results of its calls       -> the observation of that agent step
    prompt and sampled tokens  -> metrics.prompt_token_ids (the whole prompt), completion_token_ids, logprobs
    what ATIF has no field for -> extra["agentrl"]: versions, finish, verdicts, seed, limits, ...

A token of `prompt_token_ids` that no step before has is the world's, so `reading.from_atif` restores authors
and turns. Messages of the assistant that the prompt repeats are agent steps with `is_copied_context`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from pydantic import TypeAdapter

from agentrl.records import Entry
from agentrl.types import AGENT, JSON, Episode, FloatArray, Message, Trajectory, Turn, TurnTokens
from agentrl.view.formats.atif_messages import OWN, action_of, content_of, result_of
from agentrl.view.formats.provenance import Provenance, message_json, producer, totals

SCHEMA: Final = "ATIF-v1.8"
_ENTRY, _TRAJECTORY, _TURN = TypeAdapter(Entry), TypeAdapter(Trajectory), TypeAdapter(Turn)
_LOGPROBS = TypeAdapter(FloatArray)
_IDS: Final = {"token_ids", "logprobs", "cached_tokens"}


def document_of(entry: Entry, place: Provenance) -> dict[str, JSON]:
    """The document of an episode. Without trajectories, its steps are the prompt of its task."""
    episode = entry.episode
    rest: dict[str, JSON] = _ENTRY.dump_python(
        entry, exclude={"episode": {"trajectories"}}, exclude_defaults=True, warnings="none"
    )
    own: dict[str, JSON] = {"file": place.key, "entry": rest}
    first, *others = episode.trajectories or [None]
    if first is None:
        steps = list[dict[str, JSON]]()
        _observe(steps, episode.task.prompt)
    else:
        steps = _steps(first)
        own["trajectory"] = _rest_of(first)
    agent = AGENT if first is None else first.agent
    root = _document(entry, place, agent, [*steps, *_notes(episode)])
    root |= {"trajectory_id": episode.id, "extra": {OWN: own}}
    embedded: list[JSON] = [
        {
            **_document(entry, place, other.agent, _steps(other)),
            "trajectory_id": name_of(episode, number),
            "extra": {OWN: {"trajectory": _rest_of(other)}},
        }
        for number, other in enumerate(others, start=1)
        if other is not None
    ]
    return {**root, "subagent_trajectories": embedded} if embedded else root


def name_of(episode: Episode, number: int) -> str:
    """The `trajectory_id` of the trajectory with this number."""
    return f"{episode.id}#{number}" if number else episode.id


def _document(entry: Entry, place: Provenance, agent: str, steps: list[dict[str, JSON]]) -> dict[str, JSON]:
    """A document without its id, and without what ATIF has no field for."""
    numbered: list[JSON] = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    facts = producer() | {"model_name": place.model}
    if agent != AGENT:
        facts["name"] = f"agentrl/{agent}"
    metrics, usage = _sums(steps), entry.episode.usage
    if usage is not None and not metrics:
        metrics = {
            "total_prompt_tokens": usage.prompt_tokens,
            "total_completion_tokens": usage.completion_tokens,
            "total_cached_tokens": usage.cached_tokens,
            **({} if usage.cost is None else {"total_cost_usd": usage.cost}),
        }
    reward = totals(entry.verdicts).get(agent)
    extra: dict[str, JSON] = {} if reward is None else {"extra": {"reward": reward}}
    return {
        "schema_version": SCHEMA,
        "session_id": place.run,
        "agent": facts,
        "steps": numbered,
        "final_metrics": {**metrics, "total_steps": len(numbered), **extra},
    }


def _sums(steps: Sequence[dict[str, JSON]]) -> dict[str, JSON]:
    """The tokens of all requests together: a prompt counts again with each of them."""
    found = [metrics for step in steps if isinstance(metrics := step.get("metrics"), dict)]
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return {
        f"total_{name}": sum(n for metrics in found if isinstance(n := metrics[name], int))
        for name in names
        if found
    }


def _rest_of(trajectory: Trajectory) -> dict[str, JSON]:
    rest: dict[str, JSON] = _TRAJECTORY.dump_python(trajectory, exclude={"turns"}, exclude_defaults=True)
    return rest


def _steps(trajectory: Trajectory) -> list[dict[str, JSON]]:
    steps: list[dict[str, JSON]] = []
    prompt: list[int] = []
    for turn in trajectory.turns:
        _observe(steps, turn.observation)
        step = action_of(turn.action)
        rest: dict[str, JSON] = _TURN.dump_python(turn, exclude=_held(turn), exclude_defaults=True)
        if turn.tokens is not None:
            prompt += turn.tokens.world_ids.tolist()
            step |= {"llm_call_count": 1, "metrics": _metrics(turn.tokens, prompt)}
            prompt += turn.tokens.completion.token_ids.tolist()
        steps.append(_with(step, {**_own_of(step), **rest}))
    return steps


def _held(turn: Turn) -> dict[str, bool | dict[str, bool | set[str]]]:
    """What a step's own fields hold of a turn."""
    fields: dict[str, bool | dict[str, bool | set[str]]] = {"observation": True, "action": True}
    if turn.tokens is not None:
        held = _IDS if _are_json(turn.tokens) else _IDS - {"logprobs"}
        fields["tokens"] = {"world_ids": True, "completion": held}
    return fields


def _are_json(tokens: TurnTokens) -> bool:
    """JSON has no NaN and no infinity."""
    return bool(np.isfinite(tokens.completion.logprobs).all())


def _metrics(tokens: TurnTokens, prompt: list[int]) -> dict[str, JSON]:
    completion = tokens.completion
    metrics: dict[str, JSON] = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(completion.token_ids),
        "cached_tokens": completion.cached_tokens,
        "prompt_token_ids": [*prompt],
        "completion_token_ids": completion.token_ids.tolist(),
    }
    if _are_json(tokens):
        metrics["logprobs"] = _LOGPROBS.dump_python(completion.logprobs)
    return metrics


def _observe(steps: list[dict[str, JSON]], observation: Sequence[Message]) -> None:
    """Add the messages: results that follow their agent step to its observation, others as steps."""
    for message in observation:
        if message.role == "tool" and steps and steps[-1]["source"] == "agent":
            observed = steps[-1].setdefault("observation", {"results": []})
            assert isinstance(observed, dict), "an observation is an object"
            results = observed["results"]
            assert isinstance(results, list), "of a list of results"
            results.append(result_of(message, steps[-1], len(results)))
        elif message.role == "tool":
            step: dict[str, JSON] = {"source": "system", "message": ""}
            step["observation"] = {"results": [{"content": content_of(message)}]}
            steps.append(_with(step, {"message": message_json(message)}))
        elif message.role == "assistant":
            steps.append({**action_of(message), "is_copied_context": True})
        else:
            steps.append(_spoken(message))


def _spoken(message: Message) -> dict[str, JSON]:
    step: dict[str, JSON] = {"source": message.role, "message": content_of(message)}
    is_whole = message == Message(message.role, message.content)
    return step if is_whole else _with(step, {"message": message_json(message)})


def _with(step: dict[str, JSON], own: dict[str, JSON]) -> dict[str, JSON]:
    return {**step, "extra": {OWN: own}}


def _own_of(step: dict[str, JSON]) -> dict[str, JSON]:
    extra = step.get("extra")
    own = extra.get(OWN) if isinstance(extra, dict) else None
    return own if isinstance(own, dict) else {}


def _notes(episode: Episode) -> Iterator[dict[str, JSON]]:
    """What a reader of the steps has to know: why the episode failed, and where the rest of it is."""
    note: dict[str, JSON] = {OWN: {"is_note": True}}
    if (failure := episode.failure) is not None:
        text = f"The episode failed ({failure.name}): {failure.detail}"
        yield {"source": "system", "message": text, "extra": note}
    if len(episode.trajectories) > 1:
        results: list[JSON] = [
            {
                "content": _relation(episode, trajectory),
                "subagent_trajectory_ref": [{"trajectory_id": name_of(episode, number)}],
            }
            for number, trajectory in enumerate(episode.trajectories)
            if number
        ]
        text = "The other trajectories of this episode:"
        yield {
            "source": "system",
            "message": text,
            "observation": {"results": results},
            "extra": note,
        }


def _relation(episode: Episode, trajectory: Trajectory) -> str:
    agent = "" if len(episode.agents) == 1 else f"{trajectory.agent}: "
    if trajectory.parent is None:
        return f"{agent}from the beginning"
    return f"{agent}goes on from {name_of(episode, trajectory.parent)} ({trajectory.reason})"
