"""The search tool over an index in this process, and in an environment."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time

import pytest

from agentrl import Limits, ScriptedAgent, Task, ToolEnv, call, check_env, exact_match, play, say
from agentrl.errors import ToolRejected, UserError
from agentrl.tools import Bm25Index, DenseIndex, SearchTool, release_shared
from agentrl.tools.search.tool import MAX_QUERY_CHARS
from tests.tools.search.corpora import corpus, encoder, jsonl, queries, texts

RNG = random.Random(0)
CAPITALS = {f"land{n}": "".join(RNG.choices("abcdefghij", k=8)) for n in range(40)}
ATLAS = Bm25Index([f"{land}\nIts capital is {city}" for land, city in CAPITALS.items()])


class Atlas(ToolEnv):
    """Capitals to look up."""

    limits = Limits(max_turns=3, max_tokens=400)
    tools = (SearchTool(ATLAS, k=1),)

    def tasks(self, split):
        lands = list(CAPITALS)[:30] if split == "train" else list(CAPITALS)[30:]
        return [
            Task.ask(land, f"What is the capital of {land}?", CAPITALS[land], land=land) for land in lands
        ]

    def reward(self, task, answer):
        return exact_match(answer, task.answer)

    def expert(self, task):
        yield say((yield call("search", query=task.metadata["land"])).split()[-1])


async def test_a_model_reads_documents_as_search_r1_shows_them():
    async with SearchTool(ATLAS, name="find", k=2).episode() as (tool,):
        assert tool.name == "find"
        assert tool.schema.parameters["required"] == ["query"]
        text = await tool.invoke({"query": "LAND7 capital"})
        first = f"Doc 1(Title: land7) Its capital is {CAPITALS['land7']}\n"
        assert text.startswith(first + "Doc 2(Title: ")
        assert await tool.invoke({"query": "nowhere"}) == "Nothing was found; try other words."
    await release_shared()


async def test_other_forms_of_passages_can_be_chosen():
    tool = SearchTool(ATLAS, k=1, write=lambda hits: f"{hits[0].passage.id}: {hits[0].score > 0}")
    async with tool.episode() as (search,):
        assert await search.invoke({"query": "land3"}) == "3: True"
    await release_shared()


@pytest.mark.parametrize("query", ["", " \n\t", "a" * (MAX_QUERY_CHARS + 1)])
async def test_invalid_queries_count_as_the_models_mistake(query):
    async with SearchTool(ATLAS).episode() as (tool,):
        with pytest.raises(ToolRejected):
            await tool.invoke({"query": query})
        assert await tool.invoke({"query": chr(0xD800) + " land1 " + "a " * 500})
    await release_shared()


async def test_queries_run_in_batches_in_one_worker_thread():
    batches, free = [], threading.Event()

    def slow(several):
        batches.append((len(several), threading.current_thread() is threading.main_thread()))
        assert free.wait(10)
        return encoder(several)

    free.set()
    index = DenseIndex(corpus(), slow)
    del batches[:]
    async with SearchTool(index).episode() as (tool,):
        free.clear()
        tasks = [asyncio.create_task(tool.invoke({"query": query})) for query in queries(1, 20)]
        while not batches:
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(tool.invoke({"query": query})) for query in queries(2, 10)]
        await asyncio.sleep(0.01)
        free.set()
        texts = await asyncio.gather(*tasks)
        assert batches == [(20, False), (10, False)]
        assert texts == [await tool.invoke({"query": query}) for query in [*queries(1, 20), *queries(2, 10)]]
    await release_shared()


async def test_a_corpus_or_a_folder_is_opened_at_its_first_use_and_stays_open(tmp_path):
    path = jsonl(tmp_path / "corpus.jsonl", texts(1))
    Bm25Index(texts(1)).save(tmp_path / "saved")
    for path_or_folder in (path, str(tmp_path / "saved")):
        tool = SearchTool(path_or_folder, k=2)
        async with tool.episode() as (first,), tool.episode() as (second,):
            assert await first.invoke({"query": "w1 w2"}) == await second.invoke({"query": "w1 w2"}) != ""
        await release_shared()
        index = tool.index
        async with tool.episode():
            assert tool.index is index
        await release_shared()


def test_a_missing_path_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(UserError, match="no corpus and no saved index"):
        SearchTool(tmp_path / "nothing")
    with pytest.raises(ValueError, match="k must be at least 1"):
        SearchTool(ATLAS, k=0)


def test_an_environment_with_a_search_passes_the_check():
    report = check_env(Atlas)
    assert report.ok, report


async def test_cancelled_episodes_leave_no_thread_behind_and_siblings_see_no_difference():
    def sleepy(several):
        time.sleep(0.02)
        return encoder(several)

    class Library(Atlas):
        tools = (SearchTool(DenseIndex(ATLAS.corpus, sleepy), k=1),)

    task = Library().tasks("train")[0]
    before = set(threading.enumerate())
    played = [
        asyncio.create_task(play(Library(), ScriptedAgent(Library().expert(task)), task)) for _ in range(8)
    ]
    await asyncio.sleep(0.01)
    for playing in played[::2]:
        playing.cancel()
    await asyncio.wait(played)
    observations = [playing.result().trajectories[0].turns[1].observation for playing in played[1::2]]
    assert all(observation == observations[0] for observation in observations)
    await release_shared()
    for _ in range(100):
        threads = set(threading.enumerate()) - before
        if not threads:
            break
        await asyncio.sleep(0.02)
    assert not threads
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_what_only_some_searches_need_is_not_imported_with_the_tools():
    heavy = "{'faiss', 'httpx2', 'starlette', 'uvicorn', 'sentence_transformers', 'torch'}"
    code = f"import sys, agentrl.tools; print(*{heavy} & {{name.split('.')[0] for name in sys.modules}})"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "\n"
    )
