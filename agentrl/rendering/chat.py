"""Chat in a model family's own format, token for token, through the `renderers` library.

Only this file imports it. The library renders prompts, parses completions and bridges turns without
encoding sampled tokens again; a turn that it cannot bridge begins a new trajectory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from renderers.base import MODEL_RENDERER_MAP, create_renderer
from renderers.configs import BaseRendererConfig, config_from_name
from transformers import PreTrainedTokenizerBase

from agentrl.errors import RenderingError, UserError, did_you_mean
from agentrl.rendering.bare_calls import one_call_a_turn, read_bare_calls
from agentrl.rendering.bounded import TokenRenderer
from agentrl.rendering.messages import as_chat, read_call, tools_as_chat, unreadable_call, verbatim
from agentrl.rendering.template_facts import Chat, ChatTemplate
from agentrl.rendering.thoughts import THINK_END, Thoughts, continues, shows_thought
from agentrl.types import JSON, Message, Observation, Restart, ToolCall
from agentrl.types.seams import Seen, Stops, ToolSchema

# This family downloads a vocabulary of its own.
_ONLINE = {"gpt-oss"}
# The library takes a turn for a call only where it is one JSON object and nothing else.
_BARE_CALLS = "llama-3"
_PARSE_ERRORS = {
    "invalid_json": "The call is not valid JSON",
    "unclosed_block": "The call has no end",
    "missing_name": "The call names no tool",
    "malformed_structure": "The call is not of the form that was asked for",
}


class _Rendered(Protocol):
    token_ids: list[int]


class _Call(Protocol):
    name: str | None
    arguments: JSON
    raw: str
    status: str


class _Response(Protocol):
    content: str
    reasoning_content: str | None
    tool_calls: list[_Call]


class _Family(Protocol):
    """The methods of the library's renderers that are used here."""

    def render_ids(
        self,
        messages: list[dict[str, JSON]],
        *,
        tools: list[dict[str, JSON]] | None,
        add_generation_prompt: bool,
    ) -> list[int]: ...

    def parse_response(
        self, token_ids: list[int], *, tools: list[dict[str, JSON]] | None, prompt_ids: list[int]
    ) -> _Response: ...

    def get_stop_token_ids(self) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, JSON]],
        *,
        tools: list[dict[str, JSON]] | None,
    ) -> _Rendered | None: ...


def families() -> tuple[str, ...]:
    """Names of the formats that the library renders with the tokenizer alone, sorted."""
    return tuple(sorted(set(MODEL_RENDERER_MAP.values()) - _ONLINE))


def family_of(model_name: str) -> str | None:
    """The format of a published model by its full name, or None where the library has none for it."""
    family = MODEL_RENDERER_MAP.get(model_name)
    return family if family in families() else None


class FamilyRenderer(TokenRenderer):
    """A Renderer for one family's chat format.

    Calls inside closed reasoning are reasoning. A call that opens while reasoning is still open ends the
    reasoning where the family's own parser does so. Unreadable calls become ToolCalls with an error.

    Raises:
        UserError: no such family, or the tokenizer lacks its special tokens.
    """

    has_linear_parser = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, family: str) -> None:
        if family not in families():
            raise UserError(
                f"there is no chat format `{family}`.{did_you_mean(family, families())} Known: "
                f"{', '.join(families())}; or `template`, the tokenizer's own chat template."
            )
        try:
            self._family: _Family = create_renderer(tokenizer, _config(tokenizer, family))
        except (AssertionError, ValueError) as error:
            raise UserError(
                f"the tokenizer does not fit the chat format `{family}`: {str(error).splitlines()[0]}; "
                "choose the model's own format, or `template`."
            ) from None
        super().__init__(tokenizer)
        self._name = family
        self._thoughts = Thoughts(self._probed)

    def __reduce__(self) -> tuple[type[FamilyRenderer], tuple[PreTrainedTokenizerBase, str]]:
        """The arguments for pickles."""
        return FamilyRenderer, (self._tokenizer, self._name)

    def _probed(self, chat: Chat) -> str:
        try:
            return self.decode(self._family.render_ids(chat, tools=None, add_generation_prompt=True))
        except ValueError as error:
            raise RenderingError(str(error)) from error

    def ends(self, tools: Sequence[ToolSchema]) -> Stops:
        """The tokens that end a turn in this family."""
        del tools
        return Stops((), tuple(sorted(set(self._family.get_stop_token_ids()))))

    def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The prompt's tokens, up to where the assistant begins to write.

        Raises:
            RenderingError: the format refuses the messages, such as a result without its call.
        """
        chat = [as_chat(message, self._escape) for message in messages]
        offered = _tools(self.escaped_tools(tools))
        try:
            return self._family.render_ids(chat, tools=offered, add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            # Schemas of tools come from servers and clients; the library trusts that each is well-formed.
            raise RenderingError(f"the chat format `{self._name}` refuses the messages: {error}") from error

    def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """The tokens of an observation and of the next turn's opening; or why the prefix does not hold."""
        if tuple(tools) != tuple(seen.tools):
            return Restart.TOOLS_CHANGED
        prefix = [*seen.prompt_ids, *seen.completion_ids]
        bridge = self._family.bridge_to_next_turn(
            list(seen.prompt_ids),
            list(seen.completion_ids),
            [as_chat(message, self._escape) for message in observation],
            tools=_tools(self.escaped_tools(tools)),
        )
        # Some bridges cut the tokens sampled after the end of a turn, which changes the prefix.
        holds = bridge is not None and bridge.token_ids[: len(prefix)] == prefix
        if self.looks_back(observation):
            # The library bridges no question of some families, though no thought could be dropped there, and
            # every question of others, though their templates drop thoughts.
            text = self.decode(prefix)
            if not holds or shows_thought(seen, text, self._escape):
                anew = self._rendered_anew(seen, observation, text)
                return self.rendered_on(seen, observation, anew) if isinstance(anew, Restart) else anew
        if bridge is None or not holds:
            return self.rendered_on(seen, observation)
        return bridge.token_ids[len(prefix) :]

    def looks_back(self, observation: Observation) -> bool:
        """Whether thoughts may be dropped, so that `extend` renders the whole conversation."""
        return not self._thoughts.are_kept(observation)

    def _rendered_anew(self, seen: Seen, observation: Observation, prefix: str) -> list[int] | Restart:
        """What follows the prefix in the whole conversation, rendered; or why that changes the prefix."""
        stripped = any(message.reasoning for message in seen.messages) or THINK_END in prefix
        reason = Restart.REASONING_STRIPPED if stripped else Restart.REWRITTEN
        stops = self.ends(seen.tools).token_ids
        try:
            rendered = self.render((*seen.messages, *observation), seen.tools)
        except RenderingError:
            return reason
        turns = sum(token in stops for token in (*seen.prompt_ids, *seen.completion_ids))
        ends = [index for index, token in enumerate(rendered) if token in stops]
        last = list(seen.completion_ids[-1:])
        if not turns or len(ends) < turns or [rendered[ends[turns - 1]]] != last:
            return reason
        end = ends[turns - 1] + 1
        return rendered[end:] if continues(prefix, self.decode(rendered[:end])) else reason

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Reasoning, content and calls of a sampled turn."""
        if self._name == _BARE_CALLS:
            ends = self.ends(tools).token_ids
            text = self.decode(ids[:-1] if ids and ids[-1] in ends else ids)
            content, bare = read_bare_calls(text, "name", "parameters")
            return Message("assistant", content.strip(), tool_calls=tuple(one_call_a_turn(bare)))
        try:
            response = self._family.parse_response(
                list(ids), tools=_tools(tools), prompt_ids=list(prompt_ids)
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            # Arguments nested a thousand levels deep, numbers of ten thousand digits: Python's JSON parser,
            # which the library uses, raises on them.
            logging.getLogger(__name__).debug("unreadable turn: %s", error)
            raw = self.decode(ids)
            return Message("assistant", tool_calls=(unreadable_call("The turn cannot be read", raw, 0),))
        calls = tuple(_read(call, index) for index, call in enumerate(response.tool_calls))
        reasoning = (response.reasoning_content or "").strip() or None
        return Message("assistant", response.content.strip(), reasoning, calls)

    def write(self, action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens of an action as a policy would have sampled them, the end of the turn included.

        Raises:
            ValueError: a call with unreadable arguments has no canonical form.
            UserError: the format begins a turn differently from how its prompt ends.
        """
        if any(call.arguments is None for call in action.tool_calls):
            raise ValueError("cannot write a malformed call")
        described = _tools(self.escaped_tools(tools))
        chat: list[dict[str, JSON]] = [{"role": "user", "content": "?"}]
        prompt = self._family.render_ids(chat, tools=described, add_generation_prompt=True)
        chat.append(as_chat(action, verbatim))
        ids = self._family.render_ids(chat, tools=described, add_generation_prompt=False)
        if ids[: len(prompt)] != prompt:
            raise UserError(
                "this chat format begins an answer otherwise than its prompt ends, so no demonstration can "
                "be written in it; leave the warm start out, or use another dialect."
            )
        stops = self.ends(tools).token_ids
        ends = [index for index, token in enumerate(ids) if token in stops and index >= len(prompt)]
        if ends:
            return ids[len(prompt) : ends[-1] + 1]
        # Some families end a turn with the token that begins the next one.
        role = "tool" if action.tool_calls else "user"
        chat.append({"role": role, "content": "?", "tool_call_id": "call_0", "name": "?"})
        longer = self._family.render_ids(chat, tools=described, add_generation_prompt=False)
        return [*ids[len(prompt) :], *(token for token in longer[len(ids) :][:1] if token in stops)]


def _config(tokenizer: PreTrainedTokenizerBase, family: str) -> BaseRendererConfig | None:
    """The library's settings; whether a prompt opens a thought is the template's default, not the name's."""
    config = config_from_name(family)
    if tokenizer.chat_template is None or getattr(config, "enable_thinking", True) is not None:
        return config
    prompt = ChatTemplate(tokenizer).text([{"role": "user", "content": "?"}], prompt=True)
    return config.model_copy(update={"enable_thinking": not prompt.rstrip().endswith("</think>")})


def _tools(tools: Sequence[ToolSchema]) -> list[dict[str, JSON]] | None:
    # With the envelope of OpenAI's API, which templates show where they show a schema as it is.
    return tools_as_chat(tools) or None


def _read(call: _Call, index: int) -> ToolCall:
    reason = _PARSE_ERRORS.get(str(call.status))
    if reason is not None:
        return unreadable_call(reason, call.raw, index)
    return read_call(call.name, call.arguments, call.raw, index)
