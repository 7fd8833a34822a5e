"""`agentrl serve-search`: the protocol, its bounds, and its end."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager

import httpx2
import pytest

from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.http.serving import bound
from agentrl.tools import Bm25Index, DenseIndex, HybridIndex
from agentrl.tools.search import Corpus, wire
from agentrl.tools.search.client import SearchClient
from agentrl.tools.search.index import hits_of
from agentrl.tools.search.server import RetrieveApp
from agentrl.tools.search.tool import MAX_QUERY_CHARS
from agentrl.tools.search.wire import QueryBounds
from tests.listening import listening
from tests.tools.search.corpora import corpus, encoder, jsonl, queries, texts

BOUNDS = QueryBounds(max_bytes=2000, max_queries=5, max_query_chars=20, max_topk=7)


@asynccontextmanager
async def asking(app):
    async with app.app.router.lifespan_context(app.app):
        transport = httpx2.ASGITransport(app.app)
        headers = {"Content-Type": "application/json"}
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=headers
        ) as client:
            yield client


async def test_replies_are_those_of_search_r1_with_and_without_scores():
    index = Bm25Index(texts(1))
    async with asking(RetrieveApp(index, topk=2)) as client:
        best, second = hits_of(index, ["w1 w2"], 2)[0]
        documents = [{"id": hit.passage.id, "contents": hit.passage.contents} for hit in (best, second)]
        without_scores = await client.post("/retrieve", json={"queries": ["w1 w2", "unknown"]})
        assert without_scores.json() == {"result": [documents, []]}
        scored = await client.post("/retrieve", json={"queries": ["w1 w2"], "topk": 1, "return_scores": True})
        assert scored.json() == {"result": [[{"document": documents[0], "score": best.score}]]}
        assert (await client.get("/health")).json() == {"status": "ok", "passages": 200}


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        *[(body, 400, "the body is not JSON.") for body in (b"", b"{", b"\xff", b"[" * 1500)],
        *[(body, 422, "the body must be a JSON object with `queries`.") for body in (b"7", b"[]", b"null")],
        *[(body, 422, "`queries` must be a list of strings.") for body in (b"{}", b'{"queries": "a"}')],
        (b'{"queries": [7]}', 422, "`queries` must be a list of strings."),
        (b'{"queries": []}', 422, "`queries` holds 1 to 5 queries, got 0."),
        (json.dumps({"queries": ["a"] * 6}).encode(), 422, "`queries` holds 1 to 5 queries, got 6."),
        (json.dumps({"queries": ["a" * 21]}).encode(), 422, "a query has at most 20 characters."),
        *[
            (
                json.dumps({"queries": ["a"], "topk": k}).encode(),
                422,
                "`topk` must be a whole number from 1 to 7.",
            )
            for k in (0, -1, 8, 1.5, "3", True, 10**30)
        ],
        (b'{"queries": ["a"], "return_scores": 1}', 422, "`return_scores` must be true or false."),
        (b'{"queries": ["a"]}' + b" " * 2000, 413, "A request has at most 2,000 bytes."),
        (b'{"queries": ["\\ud800"]}', 422, "a query holds half of a surrogate pair; send valid Unicode."),
    ],
)
async def test_a_wrong_request_is_a_one_sentence_error(body, status, sentence):
    async with asking(RetrieveApp(Bm25Index(["a"]), bounds=BOUNDS)) as client:
        answer = await client.post("/retrieve", content=body)
        assert (answer.status_code, answer.json()) == (status, {"detail": sentence})
        assert (
            await client.post("/retrieve", json={"queries": ["a"], "topk": None, "x": 1})
        ).status_code == 200
        assert (await client.get("/retrieve")).status_code == 405
        assert (await client.get("/elsewhere")).status_code == 404


async def test_requests_at_once_each_have_their_own_topk():
    index = HybridIndex(Bm25Index(corpus()), DenseIndex(corpus(), encoder), depth=5)
    entered, free = threading.Event(), threading.Event()

    class Held:
        corpus = index.corpus

        def rank(self, queries, k):
            entered.set()
            assert free.wait(10)
            return index.rank(queries, k)

    app = RetrieveApp(Held())
    requests = [{"queries": queries(n, 1 + n % 3), "topk": 1 + n % 7} for n in range(12)]
    async with asking(app) as client:
        tasks = [asyncio.create_task(client.post("/retrieve", json=requests[0]))]
        while not entered.is_set():
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(client.post("/retrieve", json=request)) for request in requests[1:]]
        await asyncio.sleep(0.05)
        free.set()
        for request, answer in zip(requests, await asyncio.gather(*tasks), strict=True):
            expected = [
                [h.passage.contents for h in hits]
                for hits in hits_of(index, request["queries"], request["topk"])
            ]
            assert [[d["contents"] for d in documents] for documents in answer.json()["result"]] == expected
    assert app.served["requests"] == 12


async def test_an_encoder_gets_the_queries_of_all_requests_together():
    sizes = []

    def counting(texts):
        sizes.append(len(texts))
        return encoder(texts)

    index = DenseIndex(corpus(), counting)
    expected = hits_of(index, queries(1, 8), 2)
    sizes.clear()
    async with asking(RetrieveApp(index)) as client:
        bodies = [{"queries": queries(1, 8)[n : n + 2], "topk": 2} for n in range(0, 8, 2)]
        answers = await asyncio.gather(*(client.post("/retrieve", json=body) for body in bodies))
    contents = [[d["contents"] for d in hits] for answer in answers for hits in answer.json()["result"]]
    assert contents == [[hit.passage.contents for hit in hits] for hits in expected]
    assert sum(sizes) == 8
    assert max(sizes) > 2, "a call of the encoder has queries of several requests"


async def test_costly_queries_of_one_client_do_not_hold_up_another():
    index = Bm25Index(corpus())

    class Slow:
        """Every query for `costly` takes 20 ms, as a query of many words does over a large corpus."""

        corpus = index.corpus

        def rank(self, queries, k):
            time.sleep(0.02 * queries.count("costly"))
            return index.rank(queries, k)

    async with listening(RetrieveApp(Slow()).app) as url, httpx2.AsyncClient(trust_env=False) as client:
        flood = [asyncio.create_task(client.post(f"{url}/retrieve", json={"queries": ["costly"] * 512}))]
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        answer = await client.post(f"{url}/retrieve", json={"queries": queries(1, 20)})
        elapsed_s = time.perf_counter() - began
        assert [[d["contents"] for d in hits] for hits in answer.json()["result"]] == [
            [hit.passage.contents for hit in hits] for hits in hits_of(index, queries(1, 20), 3)
        ]
        assert elapsed_s < 5, "512 costly queries take 10 s"
        assert not flood[0].done()
        # Its queries leave the queue with it.
        flood[0].cancel()
        await asyncio.wait(flood)


async def test_half_a_surrogate_pair_fails_its_own_request():
    body = b'{"queries": ["w1", "\\udc80"]}'
    headers = {"Content-Type": "application/json"}
    app = RetrieveApp(Bm25Index(texts(1))).app
    async with listening(app) as url, httpx2.AsyncClient(trust_env=False, headers=headers) as client:
        bad = [client.post(f"{url}/retrieve", content=body) for _ in range(5)]
        good = [client.post(f"{url}/retrieve", json={"queries": ["w1"]}) for _ in range(5)]
        answers = await asyncio.gather(*bad, *good)
    assert [answer.status_code for answer in answers] == [422] * 5 + [200] * 5


async def test_a_page_of_another_site_searches_nothing():
    app = RetrieveApp(Bm25Index(texts(1)))
    async with listening(app.app) as url, httpx2.AsyncClient(trust_env=False) as client:
        body = json.dumps({"queries": ["w1"]})
        for headers, status in (
            ({"Content-Type": "text/plain"}, 415),
            ({"Content-Type": "application/json", "Origin": "https://www.w3.org"}, 403),
            ({"Content-Type": "application/json", "Host": "attacker.example"}, 403),
        ):
            answer = await client.post(f"{url}/retrieve", content=body, headers=headers)
            assert answer.status_code == status, headers
            assert answer.json()["detail"]
        assert (await client.get(f"{url}/health", headers={"Host": "attacker.example"})).status_code == 403
    assert app.served["requests"] == 0


async def test_replies_are_not_held_back_for_a_delayed_acknowledgement():
    nodelay = []

    async def accept(reader, writer):
        nodelay.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bound("127.0.0.1", 0) as holder:
        async with await asyncio.start_server(accept, sock=holder):
            reader, writer = await asyncio.open_connection(*holder.getsockname())
            await reader.read()
            writer.close()
    assert nodelay == [1]


async def test_the_largest_batch_of_the_longest_queries_is_no_request_too_large():
    query = chr(1) * MAX_QUERY_CHARS
    body = wire.request_body(wire.RetrieveRequest((query,) * wire.QueryBounds().max_queries))
    assert wire.read_request(body, wire.QueryBounds(), 3).queries[-1] == query
    assert len(body) <= wire.QueryBounds().max_bytes


def test_an_address_that_is_taken_is_a_one_sentence_error():
    with bound("127.0.0.1", 0) as holder:
        holder.listen()
        with pytest.raises(UserError, match="cannot be used: Address already in use; choose another"):
            bound("127.0.0.1", holder.getsockname()[1])


def serving(*arguments):
    command = [
        sys.executable,
        "-m",
        "agentrl.cli",
        "serve-search",
        *map(str, arguments),
        "--port",
        "0",
        "--json",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_the_client_and_ends_cleanly(number, tmp_path):
    path, saved = jsonl(tmp_path / "corpus.jsonl", texts(1)), tmp_path / "saved"
    arguments = (path, "--save", saved)
    if number == signal.SIGTERM:
        Bm25Index(Corpus.read(path)).save(saved)
        arguments = (saved,)
    with serving(*arguments) as process:
        try:
            status = json.loads(process.stdout.readline())
            assert status["passages"] == 200
            assert status["url"].startswith("http://127.0.0.1:")

            async def ask():
                async with SearchClient(status["url"], k=3).connected() as search:
                    return await asyncio.gather(*(search(query) for query in queries(1)))

            assert asyncio.run(ask()) == hits_of(Bm25Index.load(saved), queries(1), 3)
        finally:
            process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.full
def test_a_server_at_its_limit_of_open_files_serves_on_and_logs_little(tmp_path):
    with serving(jsonl(tmp_path / "corpus.jsonl", texts(1))) as process:
        idle = []
        try:
            url = json.loads(process.stdout.readline())["url"]
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (40, 40))
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            idle += [socket.create_connection(address, timeout=20) for _ in range(100)]
            answer = httpx2.post(
                f"{url}/retrieve", json={"queries": ["w1"]}, trust_env=False, timeout=httpx2.Timeout(60)
            )
            assert answer.status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
            for connection in idle:
                connection.close()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert err.count("out of system resource") <= 20
    assert len(err) < 100_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "There is no corpus and no saved index at nowhere.jsonl"),
        (["--topk", "0"], "topk"),
        (["--save", "tests"], "tests is there already"),
        (["--encoder", "nothing"], "There is no encoder nothing"),
        (["--encoder", "json:nothing"], "There is no encoder json:nothing"),
        (["--encoder", "json:decoder"], "no function from texts to vectors"),
        (["--encoder", "tests"], "holds no sentence-transformers model"),
    ],
)
def test_bad_input_is_a_one_sentence_error_and_exit_code_2(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve-search", "nowhere.jsonl", *arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
