"""ATIF-v1.8 by the words of its RFC (harbor-framework/harbor, rfcs/0001-trajectory-format.md), as a check.

Written from the tables of fields and the rules of the RFC; it shares nothing with the writer. Unknown fields
are errors, since `extra` is the place for them.
"""

from __future__ import annotations

import re
from datetime import datetime

OPTIONAL, REQUIRED = False, True
FIELDS = {
    "root": {
        "schema_version": REQUIRED, "session_id": OPTIONAL, "trajectory_id": OPTIONAL, "agent": REQUIRED,
        "steps": REQUIRED, "notes": OPTIONAL, "final_metrics": OPTIONAL, "continued_trajectory_ref": OPTIONAL,
        "extra": OPTIONAL, "subagent_trajectories": OPTIONAL,
    },
    "agent": {
        "name": REQUIRED, "version": REQUIRED, "model_name": OPTIONAL, "tool_definitions": OPTIONAL,
        "extra": OPTIONAL,
    },
    "step": {
        "step_id": REQUIRED, "timestamp": OPTIONAL, "source": REQUIRED, "model_name": OPTIONAL,
        "reasoning_effort": OPTIONAL, "message": REQUIRED, "reasoning_content": OPTIONAL,
        "tool_calls": OPTIONAL, "observation": OPTIONAL, "metrics": OPTIONAL, "llm_call_count": OPTIONAL,
        "is_copied_context": OPTIONAL, "extra": OPTIONAL,
    },
    "call": {"tool_call_id": REQUIRED, "function_name": REQUIRED, "arguments": REQUIRED, "extra": OPTIONAL},
    "observation": {"results": REQUIRED},
    "result": {
        "source_call_id": OPTIONAL, "content": OPTIONAL, "subagent_trajectory_ref": OPTIONAL,
        "extra": OPTIONAL,
    },
    "ref": {
        "trajectory_id": OPTIONAL, "trajectory_path": OPTIONAL, "session_id": OPTIONAL, "extra": OPTIONAL,
    },
    "metrics": {
        "prompt_tokens": OPTIONAL, "completion_tokens": OPTIONAL, "cached_tokens": OPTIONAL,
        "cost_usd": OPTIONAL, "prompt_token_ids": OPTIONAL, "completion_token_ids": OPTIONAL,
        "logprobs": OPTIONAL, "extra": OPTIONAL,
    },
    "final": {
        "total_prompt_tokens": OPTIONAL, "total_completion_tokens": OPTIONAL, "total_cached_tokens": OPTIONAL,
        "total_cost_usd": OPTIONAL, "total_steps": OPTIONAL, "extra": OPTIONAL,
    },
    "part": {"type": REQUIRED, "text": OPTIONAL, "source": OPTIONAL},
}  # fmt: skip
AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
IMAGES = {"image/jpeg", "image/png", "image/gif", "image/webp"}


def check(document, *, embedded=False):
    """Every rule of the RFC that a document can break by itself."""
    fields(document, "root")
    assert re.fullmatch(r"ATIF-v1\.[0-8]", document["schema_version"])
    assert all(isinstance(document.get(name, ""), str) for name in ("session_id", "trajectory_id", "notes"))
    fields(document["agent"], "agent")
    assert all(isinstance(document["agent"][name], str) for name in document["agent"])
    steps, metrics = document["steps"], document.get("final_metrics", {})
    assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
    fields(metrics, "final")
    assert metrics.get("total_steps", len(steps)) == len(steps), "another number needs notes"
    within = document.get("subagent_trajectories", [])
    ids = [inner["trajectory_id"] for inner in within]
    assert len({*ids}) == len(ids), "embedded documents have ids of their own"
    refs = [ref for step in steps for ref in check_step(step)]
    assert {ref["trajectory_id"] for ref in refs} <= {*ids}, "a reference leads to an embedded document"
    for inner in within:
        check(inner, embedded=True)
    assert not embedded or isinstance(document["trajectory_id"], str)


def check_step(step):
    """A step; the references that it holds."""
    fields(step, "step")
    assert step["source"] in {"system", "user", "agent"}
    check_content(step["message"])
    assert isinstance(step.get("reasoning_content", ""), str)
    if "timestamp" in step:
        datetime.fromisoformat(step["timestamp"])
    if step["source"] != "agent":
        assert not [name for name in AGENT_ONLY if name in step]
    if step.get("llm_call_count") == 0:
        assert "metrics" not in step
        assert "reasoning_content" not in step
    calls = step.get("tool_calls", [])
    for call in calls:
        fields(call, "call")
        assert isinstance(call["tool_call_id"], str)
        assert isinstance(call["function_name"], str)
        assert isinstance(call["arguments"], dict)
    check_metrics(step.get("metrics", {}))
    observation = step.get("observation", {"results": []})
    fields(observation, "observation")
    for result in observation["results"]:
        fields(result, "result")
        check_content(result.get("content", ""))
        if result.get("source_call_id") is not None:
            assert result["source_call_id"] in {call["tool_call_id"] for call in calls}
    return [
        ref
        for result in observation["results"]
        for ref in result.get("subagent_trajectory_ref", ())
        if is_ref(ref)
    ]


def is_ref(ref):
    fields(ref, "ref")
    assert ref.get("trajectory_id") is not None or ref.get("trajectory_path") is not None
    return "trajectory_id" in ref


def check_metrics(metrics):
    fields(metrics, "metrics")
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens")
    assert all(type(metrics[name]) is int for name in counts if name in metrics)
    for name, count in (("prompt_token_ids", "prompt_tokens"), ("completion_token_ids", "completion_tokens")):
        ids = metrics.get(name)
        assert ids is None or all(type(id) is int for id in ids)
        assert ids is None or len(ids) == metrics[count], "all tokens of the request, cached ones, too"
    logprobs = metrics.get("logprobs")
    assert logprobs is None or all(type(value) is float for value in logprobs)
    assert logprobs is None or len(logprobs) == len(metrics["completion_token_ids"])


def check_content(content):
    if isinstance(content, str):
        return
    for part in content:
        fields(part, "part")
        if part["type"] == "text":
            assert isinstance(part["text"], str)
            assert "source" not in part
        else:
            assert part["type"] == "image"
            assert "text" not in part
            assert part["source"]["media_type"] in IMAGES
            assert part["source"].keys() == {"media_type", "path"}


def fields(value, kind):
    """The fields that the table of a kind allows, and all that it requires; none is null."""
    assert isinstance(value, dict), kind
    assert value.keys() <= FIELDS[kind].keys(), (kind, value.keys() - FIELDS[kind].keys())
    assert not [name for name, needed in FIELDS[kind].items() if needed and name not in value], kind
    assert None not in value.values(), (kind, value)
    assert isinstance(value.get("extra", {}), dict)
