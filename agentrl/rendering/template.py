"""Chat through the tokenizer's own chat template, for families that the library does not support.

Nothing is assumed about the template: how it ends a turn, how it writes a call and whether it drops
reasoning is determined once by rendering small conversations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from agentrl.errors import RenderingError, UserError
from agentrl.rendering.bare_calls import CALL_END, call_from_json, one_call_a_turn, read_bare_calls
from agentrl.rendering.bounded import TokenRenderer
from agentrl.rendering.cached import cached_encode
from agentrl.rendering.messages import as_chat, tools_as_chat, unreadable_call, verbatim
from agentrl.rendering.template_facts import (
    MARK,
    CallFormat,
    Chat,
    ChatTemplate,
    TemplateFacts,
    probe_turn,
)
from agentrl.rendering.thoughts import THINK, THINK_END, Thoughts, continues, shows_thought
from agentrl.types import JSON, Message, Observation, Restart, ToolCall
from agentrl.types.seams import Seen, Stops, ToolSchema


class TemplateRenderer(TokenRenderer):
    """A Renderer over a tokenizer's chat template whose calls are JSON objects.

    A call inside closed reasoning is reasoning; a turn that ends inside reasoning has no call.

    Raises:
        UserError: the tokenizer has no chat template, or one that ends turns with no special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._template = ChatTemplate(tokenizer)
        self._facts = self._template.facts()
        self._calls = self._facts.calls
        vocabulary = tokenizer.get_added_vocab()
        ends = (self._facts.close, self._facts.call_close, CALL_END)
        self._ends = {vocabulary[token] for token in ends if token in vocabulary}
        self._thoughts = Thoughts(lambda chat: self._text(chat, (), prompt=True))
        self._encode = cached_encode(self._encode_once)

    def __reduce__(self) -> tuple[type[TemplateRenderer], tuple[PreTrainedTokenizerBase]]:
        """The arguments for pickles."""
        return TemplateRenderer, (self._tokenizer,)

    def ends(self, tools: Sequence[ToolSchema]) -> Stops:
        """The tokens that end a turn, and the end-of-text token."""
        del tools
        ends = set(self._ends)
        if self._tokenizer.eos_token_id is not None:
            ends.add(int(self._tokenizer.eos_token_id))
        return Stops((), tuple(sorted(ends)))

    def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The prompt's tokens, up to where the assistant begins to write."""
        chat = [as_chat(message, self._escape) for message in messages]
        return list(self._encode(self._text(chat, tools, prompt=True)))

    def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """The tokens of an observation and of the next turn's opening; or why the prefix does not hold."""
        if tuple(tools) != tuple(seen.tools):
            return Restart.TOOLS_CHANGED
        last = seen.completion_ids[-1:]
        if not len(last) or last[0] == self._tokenizer.eos_token_id not in self._ends:
            return Restart.REWRITTEN
        if self.looks_back(observation) and self._drops_thought(seen, observation):
            return Restart.REASONING_STRIPPED
        results = sum(message.role == "tool" for message in observation)
        calls = results if self._facts.several else min(results, 1)
        chat = probe_turn(calls) + [as_chat(message, self._escape) for message in observation]
        after = self._text(chat, tools, prompt=True)
        for _ in range(max(calls, 1)):
            # Every call of the probe turn holds the mark once.
            after = after.partition(MARK)[2]
        _, close, added = after.partition(self._facts.call_close if calls else self._facts.close)
        if not close:
            # Some templates end the last turn of a conversation with another token than earlier ones.
            return self.rendered_on(seen, observation)
        # A turn that another stop has ended is closed here.
        return list(self._encode(added if last[0] in self._ends else close + added))

    def looks_back(self, observation: Observation) -> bool:
        """Whether thoughts may be dropped, so that `extend` renders the whole conversation."""
        return not self._thoughts.are_kept(observation)

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Reasoning, content and calls of a sampled turn."""
        ends = self.ends(tools).token_ids
        last = len(ids) - 1 if ids and ids[-1] in ends else len(ids)
        text = self.decode(ids[:last])
        prefilled = self.decode(prompt_ids[-8:]).rstrip().endswith(THINK)
        reasoning, is_open, text = _split_reasoning(text, self._facts, prefilled=prefilled)
        if is_open:
            return Message("assistant", "", reasoning)
        if self._calls is None:
            return Message("assistant", text.strip(), reasoning)
        content, calls = _find_calls(text, self._calls)
        if not self._facts.several:
            calls = one_call_a_turn(calls)
        return Message("assistant", content.strip(), reasoning, tuple(calls))

    def write(self, action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens of an action as a policy would have sampled them, the end of the turn included.

        Raises:
            ValueError: a call with unreadable arguments has no canonical form.
            UserError: the template begins a turn differently from how its prompt ends.
        """
        if any(call.arguments is None for call in action.tool_calls):
            raise ValueError("cannot write a malformed call")
        question: Chat = [{"role": "user", "content": "?"}]
        prompt = self._text(question, tools, prompt=True)
        text = self._text([*question, as_chat(action, verbatim)], tools, prompt=False)
        if not text.startswith(prompt):
            raise UserError(
                "the tokenizer's chat template begins an answer otherwise than its prompt ends, so no "
                "demonstration can be written in it; leave the warm start out, or use another dialect."
            )
        close = self._facts.call_close if action.tool_calls else self._facts.close
        return list(self._encode(text[len(prompt) :].rpartition(close)[0] + close))

    def _template_tools(self, tools: Sequence[ToolSchema]) -> list[JSON]:
        if tools and self._calls is None:
            raise UserError(
                "the tokenizer's chat template shows no tools, or writes calls in a form other than JSON; "
                "name the model family's chat format, or use the environment's inline dialect."
            )
        return [dict(tool) for tool in tools_as_chat(self.escaped_tools(tools))]

    def _text(self, chat: Chat, tools: Sequence[ToolSchema], *, prompt: bool) -> str:
        template_tools = self._template_tools(tools)
        try:
            return self._template.text(chat, template_tools, prompt=prompt)
        except UserError as error:
            # Text of a model or an environment may cause this error, which must not end the run.
            raise RenderingError(str(error)) from error

    def _drops_thought(self, seen: Seen, observation: Observation) -> bool:
        """Whether the conversation, rendered anew, lacks a thought that its prefix shows."""
        prefix = self.decode([*seen.prompt_ids, *seen.completion_ids])
        if not shows_thought(seen, prefix, self._escape):
            return False
        chat = [as_chat(message, self._escape) for message in (*seen.messages, *observation)]
        return not continues(prefix, self._text(chat, seen.tools, prompt=True))

    def _encode_once(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _split_reasoning(text: str, facts: TemplateFacts, *, prefilled: bool) -> tuple[str | None, bool, str]:
    """Split off the reasoning: its text, whether it is still open at the end, and the rest."""
    opening, closing = facts.thought
    if opening and text.startswith(opening):
        inside, end, rest = text.removeprefix(opening).partition(closing)
        return inside.strip() or None, not end, rest
    text = text.removeprefix(facts.header)
    begins = text.lstrip().startswith(THINK)
    if not begins and not prefilled:
        return None, False, text
    inside, end, rest = text.partition(THINK_END)
    reasoning = inside.lstrip().removeprefix(THINK).strip() or None
    return reasoning, not end, rest


def _find_calls(text: str, form: CallFormat) -> tuple[str, list[ToolCall]]:
    """The text before and between the calls, and the calls, readable or not."""
    if not form.opening:
        return read_bare_calls(text, form.name_key, form.arguments_key)
    content: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    for block in re.finditer(_block_pattern(form.opening, form.closing), text, re.DOTALL):
        content.append(text[position : block.start()])
        position = block.end()
        calls.append(_read(block, form, len(calls)))
    content.append(text[position:])
    return "".join(content), calls


@lru_cache(64)
def _block_pattern(opening: str, closing: str) -> str:
    # Without a closing delimiter a call extends to the next one, or to the end.
    end = re.escape(closing) if closing else f"(?={re.escape(opening)})"
    return rf"{re.escape(opening)}(?P<inner>.*?)(?P<end>{end}|\Z)"


def _read(block: re.Match[str], form: CallFormat, index: int) -> ToolCall:
    if form.closing and not block["end"]:
        return unreadable_call("The call has no end", block[0], index)
    return call_from_json(block["inner"], form.name_key, form.arguments_key, index)
