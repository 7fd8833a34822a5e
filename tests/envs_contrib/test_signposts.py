"""Walks of pictures, read by another library: what is asked is what is seen."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image as PillowImage

from agentrl import ScriptedAgent, make, play, say
from agentrl.cli import main
from envs_contrib.signposts import Signposts
from envs_contrib.signposts.env import NUM_ARROWS, NUM_TASKS
from tests.engine.chat.chat_server import ChatServer, assistant

WORLD = Signposts()
# Written down here as a painter would name them.
NAMED = {"red": (255, 0, 0), "green": (0, 160, 0), "blue": (0, 0, 255), "orange": (255, 150, 0)}
NAMED |= {"purple": (128, 0, 128)}


def pixels_of(url):
    data = base64.b64decode(url.partition("base64,")[2])
    with PillowImage.open(io.BytesIO(data)) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.asarray(image).astype(int)


def seen(url):
    """(what, colour): the direction of an arrow or the name of a form, by its outline alone."""
    pixels = pixels_of(url)
    mask = np.any(pixels != pixels[0, 0], axis=-1)
    assert not mask[[0, -1]].any(), "nothing is cut at the edges"
    assert not mask[:, [0, -1]].any(), "nothing is cut at the edges"
    rows, columns = np.nonzero(mask)
    (colour,) = {tuple(pixel) for pixel in pixels[mask]}
    name = min(NAMED, key=lambda one: sum((a - b) ** 2 for a, b in zip(NAMED[one], colour, strict=True)))
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    share = len(rows) / (height * width)
    # The head of an arrow is heavier than its shaft.
    down = (rows.mean() - (rows.min() + rows.max()) / 2) / height
    right = (columns.mean() - (columns.min() + columns.max()) / 2) / width
    if max(height, width) > 1.25 * min(height, width):
        if height > width:
            return ("south" if down > 0 else "north"), name
        return ("east" if right > 0 else "west"), name
    what = "square" if share > 0.95 else "circle" if share > 0.7 else "triangle" if share > 0.47 else "cross"
    return what, name


def answers(urls):
    """What somebody says who has seen these pictures, one after the other."""
    what, _ = seen(urls[-1])
    return what if what in ("north", "east", "south", "west") else f"{seen(urls[0])[1]} {what}"


def urls_of(observation):
    return [part.url for message in observation for part in message.content if hasattr(part, "url")]


class Sees:
    """An agent that knows nothing but the pictures."""

    def __init__(self):
        self.urls = []

    async def act(self, observation, *, tools, session):
        self.urls += urls_of(observation)
        return await ScriptedAgent(iter([say(answers(self.urls))])).act(
            observation, tools=tools, session=session
        )

    async def close(self, session_id):
        del session_id


async def test_who_sees_the_pictures_earns_what_the_expert_does():
    for split in NUM_TASKS:
        for task in WORLD.tasks(split)[:60]:
            by_sight = await play(Signposts(), Sees(), task)
            by_heart = await play(Signposts(), ScriptedAgent(WORLD.expert(task)), task)
            assert by_sight.total_of() == by_heart.total_of() == 1.0
            assert [turn.action.text for turn in by_sight.turns] == [t.action.text for t in by_heart.turns]


def test_splits_have_their_size_and_share_no_walk():
    tasks = [task for split in WORLD.splits for task in WORLD.tasks(split)]
    assert Counter(task.split for task in tasks) == NUM_TASKS
    told = [(*(step.text for step in WORLD.expert(task)), urls_of(task.prompt)[0]) for task in tasks]
    assert len(set(told)) == len(told)
    lengths = Counter(task.metadata["arrows"] for task in WORLD.tasks("train"))
    assert set(lengths) == set(range(NUM_ARROWS[0], NUM_ARROWS[1] + 1))
    assert max(lengths.values()) - min(lengths.values()) <= 1
    assert Signposts(1).tasks("test") != WORLD.tasks("test") == Signposts(0).tasks("test")


@pytest.mark.parametrize(
    ("spoils", "worth", "invalid"),
    [
        (lambda script: script, 1.0, 0),
        (lambda script: [f" {word.upper()}.\n" for word in script], 1.0, 0),
        (lambda script: [{"north": "south"}.get(script[0], "north"), *script[1:]], 0.0, 0),
        (lambda script: ["left", *script[1:]], 0.0, 1),
        (lambda script: [f"go {script[0]}", *script[1:]], 0.0, 1),
        (lambda script: ["", *script[1:]], 0.0, 1),
        (lambda script: [*script[:-1], script[-1].split()[1]], 0.0, 0),
        (lambda script: [*script[:-1], " ".join(script[-1].split()[::-1])], 0.0, 0),
    ],
)
async def test_only_a_whole_walk_and_both_words_are_paid(spoils, worth, invalid):
    task = WORLD.tasks("test")[0]
    script = [message.text for message in WORLD.expert(task)]
    episode = await play(Signposts(), ScriptedAgent(iter(map(say, spoils(script)))), task)
    assert (episode.total_of(), episode.counts.get("invalid_moves", 0)) == (worth, invalid)


def test_a_model_behind_an_endpoint_gets_the_pictures(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def sees(request):
        parts = [part for message in request["messages"] for part in message["content"]]
        urls = [part["image_url"]["url"] for part in parts if isinstance(part, dict) and "image_url" in part]
        return assistant(answers(urls) if urls else "ready")

    async def evaluated():
        async with ChatServer(sees).serving() as server:
            where = ["--openai-url", server.url, "--openai-model", "m", "--n", "16", "--json"]
            await asyncio.to_thread(main, ["eval", "Signposts-v0", *where])

    asyncio.run(evaluated())
    report = json.loads(capsys.readouterr().out)
    assert (report["n"], report["mean"], report["failures"]) == (16, 1.0, {})


async def test_a_picture_is_the_same_whenever_it_is_drawn():
    env, task = make("Signposts-v0"), WORLD.tasks("test")[3]
    episodes = [await play(make("Signposts-v0"), ScriptedAgent(env.expert(task)), task) for _ in range(2)]
    first, second = ([turn.observation for turn in episode.turns] for episode in episodes)
    assert first == second
