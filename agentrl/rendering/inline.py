"""The inline dialect in tokens: the world writes into the assistant's own text.

    <prompt> <search>Kalor Mendos born</search> <information>...</information> <answer>Tirak</answer>
    world    policy                             world                          policy

A turn ends with the closing tag of a tool or of the answer. Where that tag is one token of
the tokenizer it is a stop token, elsewhere a stop string, whose tokens are kept as sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from agentrl.envs import inline_text
from agentrl.envs.dialect import Tags, closing, opening
from agentrl.protocols import Seen, Stops, ToolSchema
from agentrl.rendering.template_facts import Chat, ChatTemplate
from agentrl.rendering.words import Disarm, plain_text
from agentrl.types import Message, Observation

_CACHED_TEXTS = 16_384


class InlineRenderer:
    """A Renderer for `Tags` over a tokenizer.

    The first prompt goes through the tokenizer's chat template where it has one. What the
    world adds later stands between the result tags, without any chat markup.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tags: Tags) -> None:
        self._tokenizer = tokenizer
        self._tags = tags
        # Tags that are no tokens of their own would be read as tags all the same.
        self._disarm = Disarm(tokenizer, (opening(tags.result), closing(tags.result)))
        # Prompts and results recur: siblings share prompts, searches find the same documents.
        self._encode = lru_cache(_CACHED_TEXTS)(self._encode_once)
        self._stops = lru_cache(64)(self._find_stops)

    def stops(self, tools: Sequence[ToolSchema]) -> Stops:
        """The closing tags of the tools and of the answer, and the end-of-text token."""
        return self._stops(tuple(tool.name for tool in tools))

    def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The prompt's tokens, up to where the assistant begins to write, or goes on in its own text."""
        roles = [message.role for message in messages]
        begun = roles.index("assistant") if "assistant" in roles else len(messages)
        prompt = self._prompt(messages[:begun])
        return [*prompt, *(t for m in messages[begun:] for t in self._encode(self._written(m, tools)))]

    def extend(self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The world's answers, each between the result tags. Tools and reasoning change nothing here."""
        del seen
        return [token for message in observation for token in self._encode(self._written(message, tools))]

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """The first complete tag of a turn; what stands before it is reasoning.

        A turn without one comes back as a ToolCall with an error for the model to read.
        """
        del prompt_ids
        return inline_text.read(self.decode(ids), tools, self._tags)

    def write(self, action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens of an action as a policy would have sampled them, closing tag included.

        Raises:
            ValueError: a call whose arguments could not be read has no canonical form.
        """
        return list(self._encode(inline_text.write(action, tools, self._tags)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _prompt(self, messages: Observation) -> tuple[int, ...]:
        if self._tokenizer.chat_template is None:
            return self._encode("\n".join(self._shown(message) for message in messages) + "\n")
        # Templates refuse a conversation of nothing.
        shown = messages or (Message("user"),)
        turns: Chat = [{"role": message.role, "content": self._shown(message)} for message in shown]
        return self._encode(ChatTemplate(self._tokenizer).text(turns, prompt=True))

    def _shown(self, message: Message) -> str:
        words = plain_text(message)
        return self._disarm(words) if message.role == "tool" else words

    def _written(self, message: Message, tools: Sequence[ToolSchema]) -> str:
        """What stands for a message in the assistant's own text."""
        if message.role != "assistant":
            return self._tags.framed(self._disarm(plain_text(message)))
        if any(one.arguments is None for one in message.tool_calls):
            return "".join(one.raw for one in message.tool_calls)
        return inline_text.write(message, tools, self._tags)

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
