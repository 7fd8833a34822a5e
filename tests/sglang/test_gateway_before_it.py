"""`agentrl gateway` before a real SGLang's chat endpoint: what it asks for is what the server does."""

from __future__ import annotations

import json

import pytest
from jsonschema import validate

from tests.engine.fleets import sglang_fleet
from tests.envs.gateway.test_command import entries_of, save_speaker, serving
from tests.envs.gateway.test_forms import FORMS, SCHEMA, asking
from tests.envs.gateway.worlds import post

pytestmark = pytest.mark.full

SHORT = {"properties": {"sum": {"enum": [7, 8]}}, "additionalProperties": False}
"""An untrained model goes on with numbers and more properties for as long as it may."""


async def test_a_server_holds_the_schema_of_a_reply_in_every_protocol(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    # Masks are compiled at the first token, which takes longer than a server may be silent.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for name, value in SHORT.items():
        monkeypatch.setitem(SCHEMA, name, value)
    model = save_speaker(tmp_path / "speaker")
    holding = {"grammar_backend": "llguidance", "constrained_json_disable_any_whitespace": True}
    async with sglang_fleet(tmp_path, 1, context_len=512, model=model, **holding) as fleet:
        address = f"http://127.0.0.1:{fleet.processes[0].port}/v1"
        where = {"openai_url": address, "openai_model": "m", "openai_body": {"max_tokens": 200}}
        async with serving(None, tmp_path / "run", **where) as url:
            for number, (path, form, _) in enumerate(FORMS):
                reply = await post(f"{url}/e{number}/v1", path, "k", asking(path, form))
                assert reply.status_code == 200, reply.text
            free = await post(f"{url}/free/v1", "/chat/completions", "k", asking("/chat/completions", {}))
    texts = {id: entry.episode.turns[0].action.text for id, entry in entries_of(tmp_path / "run").items()}
    for number, (_, _, as_chat) in enumerate(FORMS):
        if as_chat["type"] == "json_schema":
            validate(json.loads(texts[f"e{number}"]), SCHEMA)
        else:
            assert texts[f"e{number}"].lstrip().startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(texts["free"])
    assert free.status_code == 200
