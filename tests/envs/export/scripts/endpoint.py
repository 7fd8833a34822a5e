"""An endpoint of OpenAI's protocol, whose replies are the actions of scripts."""

import json
from dataclasses import replace

import httpx
from openai import AsyncOpenAI

from agentrl.engine.chat.wire import assistant_body


class Scripted:
    """Answers a conversation by the script of its prompt. of: from the messages of the prompt to a script."""

    def __init__(self, of):
        self._of, self._running = of, {}
        self.finish = None

    def __call__(self, request):
        messages = json.loads(request.content)["messages"]
        number = next((k for k, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
        prompt = json.dumps(messages[:number])
        last = max((k for k, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
        text = "\n".join(each["content"] for each in messages[last + 1 :])
        if last < 0:
            self._running[prompt] = iter(self._of(messages[:number]))
        script = self._running[prompt]
        try:
            is_new = last < 0 or not hasattr(script, "send")
            action = next(script) if is_new else script.send(text)
            calls = [replace(each, id=each.id or f"c{k}") for k, each in enumerate(action.tool_calls)]
            body = assistant_body(action.text, tuple(calls))
        except StopIteration:
            body = {"role": "assistant", "content": ""}
        reason = self.finish or ("tool_calls" if body.get("tool_calls") else "stop")
        return httpx.Response(200, json=reply_of(body, reason))


def reply_of(message, reason):
    """The body of a reply."""
    choice = {"index": 0, "finish_reason": reason, "message": message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    reply = {"id": "r", "object": "chat.completion", "created": 0, "model": "m", "usage": usage}
    return {**reply, "choices": [choice]}


def endpoint(of, finish=None):
    """A client of it."""
    scripted = Scripted(of)
    scripted.finish = finish
    transport = httpx.AsyncClient(transport=httpx.MockTransport(scripted))
    return AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", http_client=transport)
