"""The form of a reply, such as a JSON schema, in each protocol; a policy with tokens is not held to it."""

from __future__ import annotations

import pytest

from tests.envs.gateway.test_wire import ASKED, replies_to
from tests.envs.gateway.worlds import says

SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
NAMED = {"name": "output", "schema": SCHEMA}
AS_CHAT = {"type": "json_schema", "json_schema": NAMED}
FORMS = [
    ("/chat/completions", {"response_format": {"type": "json_object"}}, {"type": "json_object"}),
    ("/chat/completions", {"response_format": AS_CHAT}, AS_CHAT),
    ("/responses", {"text": {"format": {"type": "json_schema", **NAMED}}}, AS_CHAT),
    ("/responses", {"text": {"format": {"type": "json_object"}}}, {"type": "json_object"}),
    ("/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, AS_CHAT),
]
"""Path, the form of a reply as its protocol writes it, and as a chat request does."""


def asking(path, more):
    """A request, with more fields."""
    if path == "/responses":
        return {"model": "m", "input": "How many?", **more}
    return {"model": "m", "max_tokens": 99, "messages": ASKED, **more}


@pytest.mark.parametrize(("path", "form", "as_chat"), FORMS)
async def test_a_policy_with_tokens_is_not_held_to_a_form_which_is_counted(path, form, as_chat):
    del as_chat
    (reply,), policy, episode = await replies_to([(path, asking(path, form))], says("five"))
    assert reply.status_code == 200, reply.text
    assert "five" in reply.text
    assert episode.counts == {"requests": 1, "overruled_response_format": 1}
    assert len(policy.asked) == 1


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/chat/completions", {"response_format": {"type": "regex"}}),
        ("/chat/completions", {"response_format": "json"}),
        ("/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
        ("/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
        ("/responses", {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/messages", {"output_config": {"format": {"type": "json_schema"}}}),
    ],
)
async def test_a_form_that_is_none_is_refused_with_those_that_are(path, form):
    asked = [(path, asking(path, form)), (path, asking(path, {}))]
    (reply, _), policy, episode = await replies_to(asked, says("5"))
    assert reply.status_code == 400
    assert "`response_format` is" in reply.json()["error"]["message"]
    assert (len(policy.asked), episode.counts["requests"]) == (1, 1)
