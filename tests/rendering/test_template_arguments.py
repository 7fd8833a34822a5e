"""Arguments of a chat template act as transformers passes them, in every form of the dialects."""

from __future__ import annotations

import pytest

from agentrl.envs import Tags
from agentrl.errors import ConfigError
from agentrl.rendering.choice import chat_renderer
from agentrl.rendering.inline import InlineRenderer
from agentrl.rendering.template import TemplateRenderer
from agentrl.rendering.template_facts import with_arguments
from agentrl.types import Message
from tests.rendering.real_templates import NAMES, real_tokenizer
from tests.rendering.subjects import tokenizer
from tests.rendering.test_real_templates import EMPTY_THOUGHT

CHAT = (Message("user", "Where?"), Message("assistant", "Tirak."), Message("user", "Why?"))
READERS = sorted({*NAMES} & {"qwen3", "qwen3_5_think", "qwen3_8", "gptoss", "smollm3"})
"""Templates that take some of these."""
ARGUMENTS = {"enable_thinking": False, "reasoning_effort": "low", "date_string": "26 Jul 2024"}


def expected(name, messages, arguments):
    """By transformers' own way to pass them."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    return real_tokenizer(name).apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False, **arguments
    )


@pytest.mark.parametrize("arguments", [ARGUMENTS, {**ARGUMENTS, "enable_thinking": True}], ids=["off", "on"])
@pytest.mark.parametrize(
    "name", sorted({*NAMES} & {"qwen3", "qwen3_5_think", "qwen3_8", "gptoss", "smollm3"})
)
def test_prompts_are_what_transformers_writes_with_them(name, arguments):
    changed = with_arguments(real_tokenizer(name), arguments)
    for messages in (CHAT[:1], CHAT):
        text = expected(name, messages, arguments)
        for renderer in (chat_renderer(changed), TemplateRenderer(changed)):
            rendered = renderer.decode(renderer.render(messages, ()))
            # Formats whose prompt is an empty thought keep it in earlier turns.
            same = rendered if len(messages) == 1 else EMPTY_THOUGHT.sub("", rendered)
            assert same == (text if len(messages) == 1 else EMPTY_THOUGHT.sub("", text))
    inline = InlineRenderer(changed, Tags())
    assert inline.decode(inline.render(CHAT[:1], ())) == expected(name, CHAT[:1], arguments)


def test_thinking_is_switched_off_and_on():
    texts = []
    for enabled in (True, False):
        renderer = chat_renderer(with_arguments(real_tokenizer("qwen3"), {"enable_thinking": enabled}))
        texts.append(renderer.decode(renderer.render(CHAT[:1], ())))
    assert texts[0] + "<think>\n\n</think>\n\n" == texts[1]


ECHO = "{{ given | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    "value", [None, True, 1.5, "a'b\"c\\n{% raw %}", ["x", {"y": None}], {"z": [1, False]}]
)
def test_a_value_of_any_kind_arrives_as_it_is(value):
    subject = tokenizer("byte-level", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", ECHO)
    chat = [{"role": "user", "content": "?"}]
    text = with_arguments(subject, {"given": value}).apply_chat_template(chat, tokenize=False)
    assert text == subject.apply_chat_template(chat, tokenize=False, given=value)
    assert subject.chat_template == ECHO


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "a b", "x = 1 %}{% set y"])
def test_what_is_no_argument_of_a_template_is_refused(name):
    with pytest.raises(ConfigError, match="which no chat template takes from its caller"):
        with_arguments(real_tokenizer("qwen3"), {name: 1})


def test_a_tokenizer_without_a_template_takes_none():
    with pytest.raises(ConfigError, match="the tokenizer has no chat template; drop it"):
        with_arguments(tokenizer("byte-level", (), "t"), {"enable_thinking": False})
