"""Random conversations: any tools, any texts, any number of turns, well-formed or not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from agentrl import Env, Limits, Message, Step, Tags, Task, call, say
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from agentrl.rendering.inline import InlineRenderer
from agentrl.tools import Tool
from tests.worlds import Reciter, add, echo

DIALECT = Tags(result="facts")
TOOLS = (Tool.of(echo).schema, Tool.of(add).schema)
NAMES = DIALECT.names(tool.name for tool in TOOLS)
TAGS = [form for name in NAMES for form in (f"<{name}>", f"</{name}>")]
CORPUS = ["Where was Kalor born?", "Kalor was born in Tirak", "12 and 30 is 42"] * 5


@dataclass(frozen=True)
class Words:
    """A tokenizer and the renderer over it."""

    tokenizer: object
    renderer: InlineRenderer

    @classmethod
    def train(cls, special, *, template=True):
        tokenizer = train_tokenizer(CORPUS, special_tokens=special, vocab_size=360)
        if not template:
            tokenizer.chat_template = None
        return cls(tokenizer, InlineRenderer(tokenizer, DIALECT))

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def pieces(self, text, cuts):
        """The tokens of `text`, cut into parts that are encoded apart: seldom the canonical ones."""
        bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
        return [token for a, b in pairwise(bounds) for token in self.ids(text[a:b])]


WORDS = (Words.train(TAGS), Words.train(()), Words.train((), template=False))

TEXT = st.lists(
    st.sampled_from(["Kalor", " born", "12", "\n", "é", "🎉", " ", *TAGS, "<|end|>", "{", '"'])
    | st.text(max_size=3),
    max_size=6,
).map("".join)
ACTION = st.one_of(
    TEXT.map(say),
    TEXT.map(lambda text: call("echo", text=text)),
    st.builds(lambda a, b: call("add", a=a, b=b), st.integers(), st.integers()),
)


class Oracle(Env):
    """Replies with given answers, in order; then the episode ends."""

    id = "Oracle-v0"
    dialect = DIALECT

    def __init__(self, answers, limits):
        super().__init__()
        self.limits = limits
        self.answers = [tuple(Message("tool", text) for text in texts) for texts in answers]
        self.actions = []

    @property
    def tool_schemas(self):
        return TOOLS

    def tasks(self, split):
        return ()

    async def reset(self, task, *, seed):
        self.seed_rng(seed)
        return task.prompt, {}

    async def step(self, action):
        self.actions.append(action)
        if len(self.actions) > len(self.answers):
            return Step.finished(reward=1.0)
        return Step.going(*self.answers[len(self.actions) - 1])


@dataclass
class Conversation:
    """A scripted conversation: the answers of the environment and the turns of the policy."""

    words: Words
    task: Task
    answers: list
    turns: list
    limits: Limits
    version: int = 0

    def env(self):
        return Oracle(self.answers, self.limits)

    def policy(self):
        return Reciter(lambda turn, sampling: self.turns[turn % len(self.turns)], self.version)


@st.composite
def sampled_turn(draw, words):
    """Tokens as a policy might sample them: well-formed, split otherwise, or anything at all."""
    match draw(st.sampled_from(["written", "cut", "any"])):
        case "written":
            return words.renderer.write(draw(ACTION), TOOLS)
        case "cut":
            text = words.text(words.renderer.write(draw(ACTION), TOOLS))
            return words.pieces(text, draw(st.lists(st.integers(0, 100), max_size=8)))
    return draw(st.lists(st.integers(0, len(words.tokenizer) - 1), min_size=1, max_size=20))


@st.composite
def conversations(draw):
    words = draw(st.sampled_from(WORDS))
    prompt = tuple(
        Message(role, draw(TEXT)) for role in draw(st.sampled_from([("user",), ("system", "user")]))
    )
    return Conversation(
        words=words,
        task=Task("t", prompt),
        answers=draw(st.lists(st.lists(TEXT, min_size=1, max_size=2), max_size=5)),
        turns=draw(st.lists(sampled_turn(words), min_size=1, max_size=6)),
        limits=Limits(max_turns=draw(st.integers(1, 6)), max_tokens=draw(st.none() | st.integers(1, 200))),
        version=draw(st.integers(0, 9)),
    )
