"""The inline dialect in tokens: results of tools are inserted into the assistant's own text.

    <prompt> <search>Kalor Mendos born</search> <information>...</information> <answer>Tirak</answer>
    world    policy                             world                          policy

A turn ends with the closing tag of a tool or of the answer. Where that tag is one token of
the tokenizer it is a stop token, elsewhere a stop string, whose tokens are kept as sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

from transformers import PreTrainedTokenizerBase

from agentrl.envs import inline_text
from agentrl.envs.dialect import Tags, closing, opening
from agentrl.rendering.bounded import TokenRenderer
from agentrl.rendering.cached import cached_encode
from agentrl.rendering.messages import MarkupEscaper, escaped, plain_text
from agentrl.rendering.template_facts import Chat, ChatTemplate
from agentrl.types import Message, Observation
from agentrl.types.seams import Seen, Stops, ToolSchema


class InlineRenderer(TokenRenderer):
    """A Renderer for `Tags` over a tokenizer.

    The first prompt is rendered by the tokenizer's chat template; where it has none, as a base model's, it is
    the messages, one a line, after what the tokenizer begins every text with (BOS). Later observations are
    inserted between the result tags, without any chat markup.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tags: Tags) -> None:
        super().__init__(tokenizer)
        self._tags = tags
        # Tags are parsed as tags also where they are no single tokens.
        self._escape = MarkupEscaper(tokenizer, (opening(tags.result), closing(tags.result)))
        # Prompts and results recur: siblings share prompts, searches return the same documents.
        self._encode = cached_encode(self._encode_once)
        self._first_text = lru_cache(64)(self._render_first)
        self._stops = lru_cache(64)(self._find_stops)
        self._escape_outside_tags = lru_cache(64)(self._find_markup)

    def __reduce__(self) -> tuple[type[InlineRenderer], tuple[PreTrainedTokenizerBase, Tags]]:
        """The arguments for pickles."""
        return InlineRenderer, (self._tokenizer, self._tags)

    def ends(self, tools: Sequence[ToolSchema]) -> Stops:
        """The closing tags of the tools and of the answer, and the end-of-text token."""
        return self._stops(tuple(tool.name for tool in tools))

    def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The prompt's tokens, up to where the assistant begins or continues its own text."""
        roles = [message.role for message in messages]
        start = roles.index("assistant") if "assistant" in roles else len(messages)
        prompt = self._prompt(messages[:start], tools)
        return [*prompt, *(t for m in messages[start:] for t in self._encode(self._inline_text(m, tools)))]

    def extend(self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens of the results, each between the result tags. Tools and reasoning have no effect."""
        del seen
        return [token for message in observation for token in self._encode(self._inline_text(message, tools))]

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Parse the first complete tag of a turn; the text before it is reasoning.

        A turn without a complete tag becomes a ToolCall with an error for the model.
        """
        del prompt_ids
        return inline_text.read(self.decode(ids), tools, self._tags)

    def write(self, action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens of an action as a policy would have sampled them, closing tag included.

        Raises:
            ValueError: a call with unreadable arguments has no canonical form.
        """
        return list(self._encode(inline_text.write(action, tools, self._tags)))

    def _prompt(self, messages: Observation, tools: Sequence[ToolSchema]) -> tuple[int, ...]:
        if self._tokenizer.chat_template is None:
            text = "\n".join(self._content(message, tools) for message in messages) + "\n"
            return (*self._beginning, *self._encode(text))
        # Templates refuse an empty conversation.
        nonempty = messages or (Message("user"),)
        turns = tuple((message.role, self._content(message, tools)) for message in nonempty)
        return self._encode(self._first_text(turns))

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    def _render_first(self, turns: tuple[tuple[str, str], ...]) -> str:
        chat: Chat = [{"role": role, "content": content} for role, content in turns]
        return self._template.text(chat, prompt=True)

    def _content(self, message: Message, tools: Sequence[ToolSchema]) -> str:
        escape = self._escape if message.role == "tool" else self._outside_tags(tools)
        return escape(plain_text(message))

    def _inline_text(self, message: Message, tools: Sequence[ToolSchema]) -> str:
        """The form of a message inside the assistant's own text."""
        if message.role != "assistant":
            return self._tags.framed(self._escape(plain_text(message)))
        message = escaped(message, self._outside_tags(tools))
        if any(call.arguments is None for call in message.tool_calls):
            return "".join(call.raw for call in message.tool_calls)
        return inline_text.write(message, tools, self._tags)

    def _outside_tags(self, tools: Sequence[ToolSchema]) -> MarkupEscaper:
        return self._escape_outside_tags(tuple(tool.name for tool in tools))

    def _find_markup(self, names: tuple[str, ...]) -> MarkupEscaper:
        """Escapes all special tokens but tags: prompts explain these, and the model's own text holds them."""
        tags = (*names, self._tags.answer, self._tags.result, "think")
        return MarkupEscaper(self._tokenizer, keep=[form(tag) for tag in tags for form in (opening, closing)])

    @cached_property
    def _beginning(self) -> tuple[int, ...]:
        """What the tokenizer puts in front of a text of its own accord: BOS, or nothing."""
        text = list(self._encode("x"))
        whole = [int(token) for token in self._tokenizer.encode("x")]
        starts = [n for n in range(len(whole)) if whole[n : n + len(text)] == text]
        return tuple(whole[: starts[0]]) if starts else ()

    def _encode_once(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _find_stops(self, names: tuple[str, ...]) -> Stops:
        tags = [closing(name) for name in (*names, self._tags.answer)]
        encoded = {tag: self._encode(tag) for tag in tags}
        strings = tuple(tag for tag, ids in encoded.items() if len(ids) > 1)
        tokens = {ids[0] for ids in encoded.values() if len(ids) == 1}
        if self._tokenizer.eos_token_id is not None:
            tokens.add(int(self._tokenizer.eos_token_id))
        return Stops(strings, tuple(sorted(tokens)))
