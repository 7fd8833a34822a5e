"""The data of `agentrl view`, read back by code of the tests' own: base64, zlib, JSON."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, RunExistsError
from agentrl.records import Outcome, lines, members, read_journal
from agentrl.records.journal import to_line
from agentrl.types import Episode, Extra, Limits, Trajectory, Verdict
from agentrl.view.episodes import shards as shards_module
from agentrl.view.episodes import write_site
from agentrl.view.episodes.index import Codes
from agentrl.view.episodes.journals import JournalFile
from agentrl.view.episodes.shards import SIGNATURE_BITS, signature
from agentrl.view.episodes.site import _behind
from tests.records.episodes import episodes
from tests.view.episodes.journals import (
    HOSTILE,
    WORDS,
    entry,
    failed,
    hostile,
    manifest,
    payloads,
    rows,
    searched,
    shown_entries,
    write,
)
from tests.view.synthetic import Page

STEP_1 = [
    entry(searched("g0-0"), 1.0, advantages={"agent": np.array([0.75], np.float32)}),
    entry(searched("g0-1", answer=8, reward=0.0, version=4), 0.0),
    failed(),
    entry(searched("g1-0"), 0.5, Outcome.DROPPED, reason="zero_std"),
]
HELD_OUT = [entry(searched(f"e{n}"), float(n), Outcome.EVALUATED) for n in range(2)]


@pytest.fixture
def run(tmp_path):
    """A run with two steps and an evaluation."""
    steps = {1: STEP_1, 2: [entry(searched("g2-0"))]}
    return write(tmp_path / "run", steps, {("greedy after RL", 2): HELD_OUT})


def site_of(folder, out=None, **options):
    return write_site(folder, out or folder / "view", title="a run", **options)


def test_every_entry_has_its_row_in_the_order_of_the_journal(run):
    site = site_of(run)
    listed = rows(site)
    keys = ["step_000001"] * 4 + ["step_000002"] + ["eval_greedy-after-RL_000002"] * 2
    assert [row["file"] for row in listed] == keys
    assert [row["id"] for row in listed] == ["g0-0", "g0-1", "g0-1-retry1", "g1-0", "g2-0", "e0", "e1"]
    first, second, third, dropped = listed[:4]
    assert first == {
        **{"prompt": "Where was Torba born?"},
        **{"id": "g0-0", "task": "rl/1", "file": "step_000001", "group": 0, "env": "Echo-v0"},
        **{"ending": "completed", "outcome": "trained", "tools": "search", "reward": 1.0, "advantage": 0.75},
        **{"turns": 2, "tokens": 3, "length": 10, "calls": 1, "problems": 0, "version": 3, "seconds": 0.25},
    }
    assert (second["reward"], second["version"], second["advantage"]) == (0.0, 4, None)
    assert (third["ending"], third["reward"], third["tokens"]) == ("failed: tool_timeout", None, 0)
    assert dropped["outcome"] == "dropped: zero_std"
    # Siblings: of a prompt of the run; in an evaluation, of a task.
    assert [row["group"] for row in listed] == [0, 0, 0, 1, 2, 3, 3]
    assert (site.num_episodes, site.num_files) == (7, 3)
    assert site.num_bytes == sum(
        path.stat().st_size for path in site.page.parent.rglob("*") if path.is_file()
    )


def test_the_page_reads_the_journals_own_entries(run):
    shown = shown_entries(site_of(run))
    for path, part in (("step_000001", shown[:4]), ("step_000002", shown[4:5])):
        assert part == list(members.read(run / "trajectories" / f"{path}.jsonl.gz"))


@given(st.lists(episodes(), min_size=1, max_size=4))
def test_any_episode_has_a_row_and_is_shown_without_extras_and_with_four_decimals(drawn):
    with tempfile.TemporaryDirectory() as folder:
        run = write(Path(folder), (), {("x", 0): [entry(e, None, Outcome.EVALUATED) for e in drawn]})
        site = site_of(run)
        assert [row["id"] for row in rows(site)] == [episode.id for episode in drawn]
        recorded = list(members.read(run / "trajectories" / "eval_x_000000.jsonl.gz"))
        shown = shown_entries(site)
    for part in (part for line in recorded for part in line["episode"]["trajectories"]):
        for turn in (turn for turn in part["turns"] if turn.get("tokens")):
            completion = turn["tokens"]["completion"]
            completion.pop("extras", None)
            completion["logprobs"] = [round(value, 4) for value in completion["logprobs"]]
    assert shown == [json.loads(lines.to_line(line)) for line in recorded]


LINE = json.loads(to_line(entry(searched())))


def test_rewards_are_of_the_agents_that_the_policy_played(tmp_path):
    turn = searched().trajectories[0].turns[1]
    episode = replace(
        searched(),
        trajectories=(Trajectory((turn,), agent="a"), Trajectory((turn,), agent="b", trainable=False)),
        agents=("a", "b"),
        frozen_agents=("b",),
    )
    verdicts = (Verdict(episode.id, "env", 0.25, agent="a"), Verdict(episode.id, "env", 9.0, agent="b"))
    (row,) = rows(site_of(write(tmp_path, {1: [replace(entry(episode), verdicts=verdicts)]})))
    assert (row["reward"], row["tokens"], row["length"]) == (0.25, 1, 6)


def test_extras_of_an_engine_are_left_out(tmp_path):
    first, last = searched().trajectories[0].turns
    sampled = last.tokens.completion
    extra = Extra.dense(np.zeros((1, 64), np.int16))
    tokens = replace(last.tokens, completion=replace(sampled, extras={"experts": extra}))
    part = Trajectory((first, replace(last, tokens=tokens)))
    run = write(tmp_path, {1: [entry(replace(searched(), trajectories=(part,)))]})
    assert b"experts" not in payloads(site_of(run))["episodes-000000"]


def test_the_text_of_an_entry_is_searched_in_lower_case(run):
    text = payloads(site_of(run))["texts-000000"].decode().split("\0")
    assert len(text) == 7
    parts = ("g0-0", "echo-v0", "rl/1", "kelmar", "where was torba born?", "search", "<search>torba</search>")
    assert all(part in text[0] for part in parts)
    assert "took longer than 3 s" in text[2]
    assert "where was torba born?" in text[2]


@given(st.text(min_size=1, max_size=60), st.data())
def test_a_signature_has_all_sequences_of_any_part_of_its_text(text, data):
    folded = text.lower().encode("utf-8", "replace")
    start = data.draw(st.integers(0, len(folded)))
    query = folded[start : data.draw(st.integers(start, len(folded)))]
    bits = np.unpackbits(np.frombuffer(signature(folded), np.uint8), bitorder="little")
    hashes = [
        (query[i] * 7919 + query[i + 1] * 131 + query[i + 2]) % SIGNATURE_BITS for i in range(len(query) - 2)
    ]
    assert bits[hashes].all()
    assert bits.sum() <= max(len(folded) - 2, 0)


def test_long_journals_are_in_many_scripts_which_hold_every_line_once(run, monkeypatch):
    monkeypatch.setattr(shards_module, "_BYTES", 500)
    monkeypatch.setattr("agentrl.view.episodes.index._ROWS", 3)
    site = site_of(run)
    facts, contents = manifest(site), payloads(site)
    assert [entry["episode"]["id"] for entry in shown_entries(site)] == [row["id"] for row in rows(site)]
    assert facts["starts"]["index"] == [0, 3, 6]
    for kind, separator in (("episodes", b"\n"), ("texts", b"\0")):
        starts = facts["starts"][kind]
        sizes = [len(contents[f"{kind}-{n:06d}"].split(separator)) for n in range(len(starts))]
        assert len(starts) > 1
        assert starts == np.cumsum([0, *sizes])[:-1].tolist()
        assert sum(sizes) == 7
    assert len(contents["signatures-000000"]) == SIGNATURE_BITS // 8 * len(facts["starts"]["texts"])


def test_only_ids_that_occur_have_texts(run):
    homes = []

    def decoder_of(home):
        homes.append(home)
        return WORDS.__getitem__

    contents = payloads(site_of(run, decoder_of=decoder_of))
    assert homes == [run]
    assert json.loads(contents["tokens-000000"]) == {str(id): WORDS[id] for id in range(1, 9)}


def test_folders_of_a_benchmark_are_one_list(tmp_path):
    for policy in ("a", "b"):
        write(tmp_path / policy / "Echo-v0", (), {("test", 0): HELD_OUT})
    write(tmp_path / "a" / "rolled_back" / "attempt_1", {1: STEP_1})
    site = site_of(tmp_path)
    keys = [file["key"] for file in manifest(site)["files"]]
    assert keys == ["a/Echo-v0/eval_test_000000", "b/Echo-v0/eval_test_000000"]
    assert site.num_episodes == 4
    assert len({row["group"] for row in rows(site)}) == 2


def test_one_file_is_enough(run):
    site = site_of(run / "trajectories" / "step_000002.jsonl.gz", run / "one")
    assert [row["id"] for row in rows(site)] == ["g2-0"]


def test_a_journal_that_grows_is_read_up_to_its_last_complete_part(run):
    path = run / "trajectories" / "step_000002.jsonl.gz"
    path.write_bytes(path.read_bytes() * 2 + path.read_bytes()[:40])
    assert site_of(run).num_episodes == 8


def test_pages_replace_older_pages_and_nothing_else(run):
    site_of(run)
    site = site_of(run)
    assert site.num_episodes == 7
    assert sorted(path.name for path in run.iterdir()) == ["trajectories", "view"]
    kept = run / "kept"
    kept.mkdir()
    (kept / "thesis.txt").write_text("x")
    with pytest.raises(RunExistsError, match="holds no pages of `agentrl view`; name another --out"):
        site_of(run, kept)
    assert (kept / "thesis.txt").exists()


@pytest.mark.parametrize(
    "line",
    [
        *(b"{}\n", b"[]\n", b'{"episode": {"id": 3}}\n', b'{"episode": {"id": "x", "task": "y"}}\n', b"7\n"),
        # Of an entry that is one, but for its logprobs.
        *(
            json.dumps(LINE).replace("[-0.0, -0.5]", values).encode() + b"\n"
            for values in ("[[-0.0], [-0.5]]", '["x", "y"]', "[null, null]", "[{}, {}]", f"[1{'0' * 400}]")
        ),
    ],
)
def test_a_file_that_is_no_journal_is_one_sentence(run, line):
    path = run / "trajectories" / "step_000003.jsonl.gz"
    members.append(path, [line], at=0)
    with pytest.raises(
        ConfigError, match=r"step_000003.jsonl.gz holds no entries of a journal .*; restore"
    ) as error:
        site_of(run)
    assert "\n" not in str(error.value)
    assert not (run / "view").exists()


def test_a_folder_without_a_journal_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="holds no journal"):
        site_of(tmp_path)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_recorded_text_reaches_a_page_or_a_script(tmp_path, text):
    run = write(tmp_path, {1: [entry(hostile(text)), failed("g9-1", detail=text)]})
    site = site_of(run, decoder_of=lambda _: lambda id: text)
    for path in site.page.parent.glob("*.html"):
        assert text not in path.read_text(encoding="utf-8")
    assert len(shown_entries(site)) == 2
    texts = payloads(site)["texts-000000"].split(b"\0")
    assert len(texts) == 2
    assert all(text.lower().replace("\0", " ").encode("utf-8", "replace") in part for part in texts)


def test_a_hostile_title_is_text(run):
    site = write_site(run, run / "view", title="</title><script>alert(1)</script>")
    page = Page(site.page.read_text(encoding="utf-8"))
    assert page.tags.count("script") == 1
    assert page.texts[page.tags.index("title")] == "</title><script>alert(1)</script>"


def test_the_policy_of_the_page_allows_its_own_script_alone(run, monkeypatch):
    site = site_of(run)
    page = Page(site.page.read_text(encoding="utf-8"))
    (policy,) = [a["content"] for a in page.attributes if "http-equiv" in a]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    (nonce,) = re.findall(r"'nonce-([\w-]{24,})'", rules["script-src"])
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'nonce-{nonce}' 'strict-dynamic'",
        "style-src": f"'nonce-{nonce}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "agentrl",
    }
    scripts = [a for tag, a in zip(page.tags, page.attributes, strict=True) if tag in {"script", "style"}]
    assert [a["nonce"] for a in scripts] == [nonce, nonce]
    assert nonce not in site_of(run).page.read_text(encoding="utf-8")
    assert not [name for a in page.attributes for name in a if name.startswith("on") or name == "src"]


def test_the_scripts_make_no_markup_of_text_and_ask_no_network():
    folder = Path(shards_module.__file__).parents[1] / "templates" / "episodes"
    code = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.js")))
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function"):
        assert forbidden not in code
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|https?:|localStorage|setAttribute\(\"on", code)


LOGGED = [
    {"step": 1, "time_s": 1.0, "rollout/raw_reward": 0.5, "eval/sampled": 0.25},
    {"step": 2, "time_s": 2.0, "rollout/raw_reward": 0.75, "eval/greedy": 0.5, "eval/greedy/hops=2": 0.5},
    {"step": 3, "time_s": 3.0, "rollout/raw_reward": 1.0},
]


def test_a_point_of_a_curve_leads_to_the_files_behind_it(run):
    lines.append(run / "metrics.jsonl", map(lines.to_line, LOGGED))
    (run / "report.html").write_text("x")
    site = site_of(run)
    page = Page((site.page.parent / "curves.html").read_text(encoding="utf-8"))
    links = {
        a["href"]: t for a, t in zip(page.attributes, page.texts, strict=True) if "#" in a.get("href", "")
    }
    points = {
        text.strip(): href.removeprefix("index.html#file=")
        for a, text in zip(page.attributes, page.texts, strict=True)
        if (href := a.get("href", "")).startswith("index.html#")
    }
    assert links
    assert points == {
        "step 2 · greedy: 0.500": "eval_greedy-after-RL_000002",
        "step 2 · 2: 0.500": "eval_greedy-after-RL_000002",
        "step 1 · reward: 0.500": "step_000001",
        "step 2 · reward: 0.750": "step_000002",
    }
    index = Page(site.page.read_text(encoding="utf-8"))
    assert [a["href"] for a in index.attributes if "href" in a] == ["curves.html", "../report.html"]


EVALUATIONS = ["aime-sampled-after-RL", "aime-greedy-after-RL", "greedy-before", "greedy-after-warm-start"]


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        ("eval/aime/sampled", ["aime-sampled-after-RL"]),
        ("eval/aime/sampled/pass@8", ["aime-sampled-after-RL"]),
        ("eval/aime", ["aime-sampled-after-RL", "aime-greedy-after-RL"]),
        ("eval/greedy/hops=2", ["greedy-before", "greedy-after-warm-start"]),
        (
            "eval/odd",
            ["aime-sampled-after-RL", "aime-greedy-after-RL", "greedy-before", "greedy-after-warm-start"],
        ),
        ("train/loss", [""]),
    ],
)
def test_a_metric_belongs_to_its_evaluations_or_to_the_training_step(metric, names):
    journals = [JournalFile(Path("x"), name, Path(), name, 0) for name in [*EVALUATIONS, ""]]
    assert [journal.set for journal in _behind(metric, journals)] == names


def test_a_value_of_which_there_are_too_many_is_other():
    codes = Codes()
    numbers = [codes.of(str(n)) for n in range(1100)]
    assert numbers[:1000] == list(range(1000))
    assert set(numbers[1000:]) == {1000}
    assert list(codes.values)[-1] == "other"


def test_the_advantages_of_an_entry_come_back_from_the_journal(tmp_path):
    run = write(tmp_path, {1: STEP_1[:2]})
    first, second = read_journal(run / "trajectories" / "step_000001.jsonl.gz")
    assert {agent: values.tolist() for agent, values in first.advantages.items()} == {"agent": [0.75]}
    assert second.advantages == {}


def test_an_episode_without_tokens_has_its_messages(tmp_path):
    turns = tuple(replace(turn, tokens=None) for turn in searched().trajectories[0].turns)
    episode = Episode("e0", "E-v0", searched().task, 0, Limits(), (Trajectory(turns),), (), searched().ending)
    run = write(tmp_path, (), {("x", 0): [entry(episode, None, Outcome.EVALUATED)]})
    site = site_of(run, decoder_of=lambda _: str)
    assert "tokens-000000" not in payloads(site)
    (row,) = rows(site)
    assert (row["tokens"], row["version"], row["reward"]) == (0, None, None)
