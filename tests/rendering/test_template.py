"""What only the tokenizer's own template can do to a conversation."""

from __future__ import annotations

import pytest

from agentrl import Message, UserError, call, say
from agentrl.errors import RenderingError
from agentrl.rendering.choice import chat_renderer
from agentrl.rendering.template import TemplateRenderer
from tests.rendering.subjects import BARE_CALLS, CHATML, LLAMA, TAGGED_CALLS, tokenizer
from tests.rendering.test_chat import ANSWER, ASK, TOOLS, seen

TAGGED_ONE_CALL = TAGGED_CALLS.replace(
    "{%- for m in messages -%}",
    "{%- for m in messages -%}{%- if (m.tool_calls or []) | length > 1 -%}"
    "{{ raise_exception('one call at a time') }}{%- endif -%}",
)


def test_where_a_turn_takes_one_call_another_is_refused_and_nothing_breaks():
    subject = TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", TAGGED_ONE_CALL))
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = subject._tokenizer.encode(text * 2 + "<|im_end|>")
    said = subject.parse(ids, TOOLS)
    assert [one.arguments for one in said.tool_calls] == [{"a": 1}, None]
    assert "one call a turn" in said.tool_calls[1].error
    answers = (*ANSWER, Message("tool", "no", tool_call_id="call_1"))
    added = subject.extend(seen(subject, (said,), ids), answers, TOOLS)
    assert "42" in subject.decode(added)
    assert "no" in subject.decode(added)
    assert isinstance(subject.render((*ASK, said, *answers), TOOLS), list)


def test_a_turn_with_a_call_may_end_otherwise_than_an_answer():
    template = BARE_CALLS.replace(
        "{%- endfor -%}\n{%- else -%}", "{%- endfor -%}<|eom_id|>\n{%- else -%}"
    ).replace("{%- endif -%}<|eot_id|>", "<|eot_id|>{%- endif -%}")
    subject = TemplateRenderer(tokenizer("byte-level", LLAMA, "<|eot_id|>", template))
    action = call("add", a=1, b=2)
    sampled = subject.write(action, TOOLS)
    assert subject.decode(sampled).endswith("}<|eom_id|>")
    assert subject.decode(subject.write(say("x"), TOOLS)) == "x<|eot_id|>"
    added = subject.extend(seen(subject, (action,), sampled), ANSWER, TOOLS)
    assert [*subject.render(ASK, TOOLS), *sampled, *added] == subject.render((*ASK, action, *ANSWER), TOOLS)


def test_calls_are_read_where_the_prompt_opens_the_reasoning():
    template = TAGGED_CALLS.replace(
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n",
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>\n",
    )
    subject = TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", template))
    text = 'hm</think><tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'
    ids = subject._tokenizer.encode(text)
    said = subject.parse(ids, TOOLS, prompt_ids=subject.render(ASK, TOOLS))
    assert (said.reasoning, said.content) == ("hm", "")
    assert [one.name for one in said.tool_calls] == ["add"]
    with pytest.raises(UserError, match="no demonstration"):
        subject.write(say("x"), TOOLS)


def test_calls_in_a_list_are_a_form_of_their_own():
    template = TAGGED_CALLS.replace("<tool_call>\n", "<tool_call>[").replace(
        "}\n</tool_call>", "}]</tool_call>"
    )
    subject = TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", template))
    with pytest.raises(UserError, match="in a form other than JSON"):
        subject.render(ASK, TOOLS)


def test_auto_takes_a_template_that_refuses_some_conversations():
    template = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}"
    fussy = tokenizer("byte-level", CHATML, "<|im_end|>", template + TAGGED_CALLS.lstrip())
    chosen = chat_renderer(fussy)
    assert isinstance(chosen, TemplateRenderer)
    with pytest.raises(RenderingError, match="no system"):
        chosen.render((Message("system", "x"), *ASK), TOOLS)


def test_a_tokenizer_without_a_template_is_told_what_to_use():
    with pytest.raises(UserError, match="no chat template"):
        TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>"))


def test_a_template_that_ends_no_turn_is_refused():
    plain = tokenizer(
        "byte-level", CHATML, "<|im_end|>", "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    with pytest.raises(UserError, match="no special token"):
        TemplateRenderer(plain)


def test_a_template_without_tools_speaks_until_tools_are_shown():
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    subject = TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", template))
    assert subject.decode(subject.render(ASK, ())) == "Where was Kalor born?<|im_end|>"
    with pytest.raises(UserError, match="shows no tools"):
        subject.render(ASK, TOOLS)
