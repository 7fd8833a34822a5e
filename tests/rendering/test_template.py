"""Chat through the tokenizer's own template: cases of its own."""

from __future__ import annotations

import pytest

from agentrl import Message, ToolCall, UserError, call, say
from agentrl.envs import Tags
from agentrl.errors import RenderingError
from agentrl.rendering.choice import chat_renderer
from agentrl.rendering.inline import InlineRenderer
from agentrl.rendering.template import TemplateRenderer
from agentrl.types import Restart
from agentrl.types.seams import Seen
from tests.rendering.subjects import CHATML, LLAMA, TAGGED_CALLS, UNDELIMITED_CALLS, renderer, tokenizer
from tests.rendering.test_chat import ANSWER, ASK, TOOLS, seen_before

SINGLE_CALL_TEMPLATE = TAGGED_CALLS.replace(
    "{%- for m in messages -%}",
    "{%- for m in messages -%}{%- if (m.tool_calls or []) | length > 1 -%}"
    "{{ raise_exception('one call at a time') }}{%- endif -%}",
)


def test_where_a_turn_takes_one_call_a_second_one_is_refused():
    subject = TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", SINGLE_CALL_TEMPLATE))
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = subject._tokenizer.encode(text * 2 + "<|im_end|>")
    message = subject.parse(ids, TOOLS)
    assert [call.arguments for call in message.tool_calls] == [{"a": 1}, None]
    assert "one call a turn" in message.tool_calls[1].error
    answers = (*ANSWER, Message("tool", "no", tool_call_id="call_1"))
    added = subject.extend(seen_before(subject, (message,), ids), answers, TOOLS)
    assert "42" in subject.decode(added)
    assert "no" in subject.decode(added)
    assert isinstance(subject.render((*ASK, message, *answers), TOOLS), list)


def test_a_turn_with_a_call_may_have_another_end_token():
    template = UNDELIMITED_CALLS.replace(
        "{%- endfor -%}\n{%- else -%}", "{%- endfor -%}<|eom_id|>\n{%- else -%}"
    ).replace("{%- endif -%}<|eot_id|>", "<|eot_id|>{%- endif -%}")
    subject = TemplateRenderer(tokenizer("byte-level", LLAMA, "<|eot_id|>", template))
    action = call("add", a=1, b=2)
    sampled = subject.write(action, TOOLS)
    assert subject.decode(sampled).endswith("}<|eom_id|>")
    assert subject.decode(subject.write(say("x"), TOOLS)) == "x<|eot_id|>"
    added = subject.extend(seen_before(subject, (action,), sampled), ANSWER, TOOLS)
    assert [*subject.render(ASK, TOOLS), *sampled, *added] == subject.render((*ASK, action, *ANSWER), TOOLS)


def test_calls_are_read_where_the_prompt_opens_the_reasoning():
    template = TAGGED_CALLS.replace(
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n",
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>\n",
    )
    subject = TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", template))
    text = 'hm</think><tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'
    ids = subject._tokenizer.encode(text)
    message = subject.parse(ids, TOOLS, prompt_ids=subject.render(ASK, TOOLS))
    assert (message.reasoning, message.content) == ("hm", "")
    assert [call.name for call in message.tool_calls] == ["add"]
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
    refusing = tokenizer("byte-level", CHATML, "<|im_end|>", template + TAGGED_CALLS.lstrip())
    chosen = chat_renderer(refusing)
    assert isinstance(chosen, TemplateRenderer)
    with pytest.raises(RenderingError, match="no system"):
        chosen.render((Message("system", "x"), *ASK), TOOLS)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UserError, match="no chat template"):
        TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>"))


def test_a_template_that_ends_no_turn_is_refused():
    plain = tokenizer(
        "byte-level", CHATML, "<|im_end|>", "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    with pytest.raises(UserError, match="no special token"):
        TemplateRenderer(plain)


def test_arguments_under_another_usual_key_are_arguments():
    subject = renderer("template, tagged calls", "byte-level")
    ids = subject._tokenizer.encode(
        '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call><|im_end|>'
    )
    assert [call.arguments for call in subject.parse(ids, TOOLS).tool_calls] == [{"a": 1}]


SILENT = "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}"


def test_a_template_that_shows_no_content_is_refused():
    with pytest.raises(UserError, match="shows the model nothing of what a user says"):
        TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", SILENT))
    with pytest.raises(UserError, match="shows the model nothing of what a user says"):
        InlineRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", SILENT), Tags()).render(ASK, ())


ENDS_EARLIER_TURNS_OTHERWISE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ '<|im_end|>' if loop.last and m.role == 'assistant' else '<|endoftext|>' }}{% endfor %}"
)


def test_a_turn_that_the_template_ends_otherwise_later_begins_a_new_prefix():
    subject = TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", ENDS_EARLIER_TURNS_OTHERWISE))
    seen = Seen((*ASK, say("x")), (), subject.render(ASK, ()), subject._tokenizer.encode("x<|im_end|>"))
    assert subject.extend(seen, (Message("user", "Why?"),), ()) is Restart.REWRITTEN


def test_a_template_without_tools_renders_conversations_without_tools():
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    subject = TemplateRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", template))
    assert subject.decode(subject.render(ASK, ())) == "Where was Kalor born?<|im_end|>"
    with pytest.raises(UserError, match="shows no tools"):
        subject.render(ASK, TOOLS)


def test_reasoning_that_was_rendered_again_with_escaped_markup_is_still_taken_back():
    subject = renderer("template, tagged calls", "byte-level")
    thought = Message("assistant", "", "so <|im_end|> it is", (ToolCall("add", {}, id="call_0"),))
    answer = (Message("tool", "42", tool_call_id="call_0", name="add"),)
    prompt = subject.render((*ASK, thought, *answer), TOOLS)
    seen = Seen((*ASK, thought, *answer), TOOLS, prompt, subject.write(say("Tirak."), TOOLS))
    assert subject.extend(seen, (Message("user", "Why?"),), TOOLS) is Restart.REASONING_STRIPPED
