"""An image in a message: from an environment to a chat endpoint, the journal and the report."""

from __future__ import annotations

import base64
import struct
import zlib

import pytest

from agentrl import Image, Message, SingleTurnEnv, Task, Text, UserError, play
from agentrl.engine.chat.agent import ChatAgent
from agentrl.engine.chat.endpoint import ChatEndpoint
from agentrl.engine.chat.settings import ChatSettings
from agentrl.envs.dialect import Tags
from agentrl.records import Entry, Journal, Outcome, read_journal
from agentrl.rendering.inline import InlineRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.view.report import ReportEpisode, render_report
from agentrl.view.transcript import transcript_entries
from tests.engine.chat.chat_server import ChatServer, assistant
from tests.rendering.subjects import CHATML, renderer, tokenizer
from tests.view.synthetic import Page, report
from tests.worlds import Reciter


def png(red: int) -> bytes:
    """One red pixel as the bytes of a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes([0, red, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


PIXEL = Image.of(png(200))


def renderer_of(form):
    if form == "inline":
        return InlineRenderer(tokenizer("byte-level", CHATML, "<|im_end|>"), Tags())
    return renderer({"template": "template, tagged calls", "chat": "qwen3"}[form], "byte-level")


class Colours(SingleTurnEnv):
    """What colour is this?"""

    def tasks(self, split):
        prompt = (Message("user", (Text("What colour is this?"), PIXEL)),)
        return [Task("red", prompt, answer="red")]

    def grade(self, task, answer):
        return float(answer == task.answer)


@pytest.fixture
async def played():
    """An episode of the environment at a chat endpoint, and what the endpoint was asked."""
    server = ChatServer(lambda request: assistant("red"))
    async with server.serving(), ChatEndpoint(url=server.url).connected() as connection:
        agent = ChatAgent(connection, ChatSettings("m"))
        episode = await play(Colours(), agent, Colours().tasks("train")[0])
    return episode, server.requests


async def test_an_endpoint_is_sent_the_image_as_a_data_url(played):
    episode, requests = played
    assert episode.step_rewards == (1.0,)
    ((message,),) = [request["messages"] for request in requests]
    words, picture = message["content"]
    assert words == {"type": "text", "text": "What colour is this?"}
    kind, _, data = picture["image_url"]["url"].partition(",")
    assert (kind, base64.b64decode(data)) == ("data:image/png;base64", png(200))


async def test_the_journal_keeps_it_and_words_are_words(played, tmp_path):
    async with Journal(tmp_path) as journal:
        path = await journal.write_eval("x", 0, [Entry(played[0], (), Outcome.EVALUATED)])
    (entry,) = read_journal(path)
    (message,) = entry.episode.turns[0].observation
    assert message.content == (Text("What colour is this?"), PIXEL)
    assert (message.text, message.images[0].data) == ("What colour is this?", png(200))


async def test_the_report_shows_it_and_fetches_nothing(played):
    page = Page(html := render_report(report(episodes=[ReportEpisode("eval", played[0])])))
    sources = [page.attributes[i]["src"] for i, tag in enumerate(page.tags) if tag == "img"]
    assert sources == [PIXEL.url]
    assert "img-src data:" in html
    assert [passage.text for passage in transcript_entries(played[0])] == [
        "What colour is this?[image: image/png]",
        "red",
    ]


@pytest.mark.parametrize("form", ["inline", "template", "chat"])
async def test_a_renderer_without_images_says_so_in_a_sentence(form):
    agent = TokenAgent(Reciter(lambda *_: [1]), renderer_of(form), SamplingSettings())
    with pytest.raises(UserError, match=r"no form for the image in a message of role user; show words"):
        await play(Colours(), agent, Colours().tasks("train")[0])


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/picture.png",
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:text/html;base64,AA==",
        "data:image/png;base64,A",
        'data:image/png;base64,AA=="onerror="alert(1)',
    ],
)
def test_only_pictures_that_travel_with_the_message_are_images(url):
    with pytest.raises(ValueError, match=r"data URL|base64"):
        Image(url)
