from __future__ import annotations

import itertools
import math
import random
import re
import time
from collections import Counter

import pytest

from agentrl import ScriptedAgent, UserError, call, play, say
from agentrl.envs.check import check_env
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from agentrl.types import Ending
from envs_contrib.hop_search import HopSearch, env, knowledge_base
from envs_contrib.hop_search.knowledge_base import PEOPLE, RELATIONS, build_knowledge_base

KNOWLEDGE_BASE = build_knowledge_base(0)
EVERYBODY = [person for people in KNOWLEDGE_BASE.people.values() for person in people]


def _top(query: str) -> str:
    (document,) = KNOWLEDGE_BASE.index.search(query)
    return document


def _run(script) -> tuple[list[tuple[str, str]], str]:
    """Play a script against the index: the (query, document) pairs and the answer."""
    pairs = []
    action = next(script)
    while action.tool_calls:
        query = action.tool_calls[0].arguments["query"]
        pairs.append((query, _top(query)))
        action = script.send(pairs[-1][1])
    return pairs, action.content


def _facts() -> tuple[dict[tuple[str, str], str], dict[str, str]]:
    """The facts of the documents, parsed from their text."""
    cities, countries = {}, {}
    for document in KNOWLEDGE_BASE.documents:
        if match := re.fullmatch(r"(\w+ \w+) (was born|now works) in (\w+)", document):
            cities[match[1], match[2].split()[-1]] = match[3]
        else:
            city, country = re.fullmatch(r"(\w+) is a city in country (\w+)", document).groups()
            countries[city] = country
    return cities, countries


def test_the_world_has_the_size_it_promises():
    assert PEOPLE == {"demo": 3000, "train": 2280, "validation": 200, "test": 520}
    assert (len(knowledge_base.SYLLABLES_A), len(knowledge_base.SYLLABLES_B)) == (28, 15)
    assert not set(knowledge_base.SYLLABLES_A) & set(knowledge_base.SYLLABLES_B)
    assert len(KNOWLEDGE_BASE.documents) == 12_150
    assert len(KNOWLEDGE_BASE.countries) == 150
    assert len(set(KNOWLEDGE_BASE.countries.values())) == 40
    assert len({person.name for person in EVERYBODY}) == 6000


def test_the_syllables_of_a_name_give_its_kind():
    def pattern(name: str) -> str:
        return "".join(
            "A" if part in knowledge_base.SYLLABLES_A else "B" for part in (name[:2].lower(), name[2:])
        )

    assert {pattern(person.first) for person in EVERYBODY} == {"AB"}
    assert {pattern(person.last) for person in EVERYBODY} == {"BB"}
    assert {pattern(city) for city in KNOWLEDGE_BASE.countries} == {"BA"}
    assert {pattern(country) for country in KNOWLEDGE_BASE.countries.values()} == {"AA"}


def test_everybody_works_in_another_country_than_they_were_born_in():
    for person in EVERYBODY:
        assert (
            KNOWLEDGE_BASE.countries[person.cities["born"]]
            != KNOWLEDGE_BASE.countries[person.cities["works"]]
        )


def test_one_seed_is_one_world_and_another_seed_is_another():
    again = build_knowledge_base.__wrapped__(0)
    other = build_knowledge_base.__wrapped__(1)
    assert again.documents == KNOWLEDGE_BASE.documents
    assert again.people == KNOWLEDGE_BASE.people
    assert all(again.questions(split) == KNOWLEDGE_BASE.questions(split) for split in PEOPLE)
    assert not set(other.documents[:100]) <= set(KNOWLEDGE_BASE.documents)
    assert build_knowledge_base(0) is KNOWLEDGE_BASE


def test_a_world_is_built_within_a_second():
    started = time.process_time()
    build_knowledge_base.__wrapped__(2)
    assert time.process_time() - started < 1


def test_no_person_is_in_two_splits():
    names = {split: {person.name for person in people} for split, people in KNOWLEDGE_BASE.people.items()}
    assert {split: len(people) for split, people in names.items()} == PEOPLE
    assert sum(map(len, names.values())) == len(set().union(*names.values()))


@pytest.mark.parametrize("split", PEOPLE)
def test_each_person_has_four_questions_in_shuffled_order(split):
    tasks = HopSearch().tasks(split)
    assert {task.split for task in tasks} == {split}
    assert len({task.id for task in tasks}) == len(tasks) == 4 * PEOPLE[split]
    kinds = Counter((task.metadata["relation"], task.metadata["hops"]) for task in tasks)
    assert kinds == dict.fromkeys(
        [(relation, hops) for relation in RELATIONS for hops in (1, 2)], PEOPLE[split]
    )
    assert Counter(task.metadata["name"] for task in tasks).most_common(1)[0][1] == 4
    neighbours = sum(a.metadata["name"] == b.metadata["name"] for a, b in itertools.pairwise(tasks))
    assert neighbours < 20


@pytest.mark.parametrize("split", PEOPLE)
def test_answers_follow_from_the_documents_and_are_in_no_question(split):
    cities, countries = _facts()
    forms = {
        r"Where was (\w+ \w+) born\?": ("born", 1),
        r"Where does (\w+ \w+) work\?": ("works", 1),
        r"In which country was (\w+ \w+) born\?": ("born", 2),
        r"In which country does (\w+ \w+) work\?": ("works", 2),
    }
    for task in HopSearch().tasks(split):
        (message,) = task.prompt
        ((name, relation, hops),) = [
            (match[1], *kind)
            for form, kind in forms.items()
            if (match := re.fullmatch(form, message.content))
        ]
        city = cities[name, relation]
        assert task.answer == (city if hops == 1 else countries[city])
        assert task.metadata["hops"] == hops
        assert not {city.lower(), task.answer.lower()} & set(re.findall(r"\w+", message.content.lower()))


def test_the_canonical_queries_find_their_document_for_everybody():
    for person in EVERYBODY:
        assert _top(f"{person.name} born") == f"{person.name} was born in {person.cities['born']}"
        assert _top(f"{person.name} works") == f"{person.name} now works in {person.cities['works']}"
    for city, country in KNOWLEDGE_BASE.countries.items():
        assert _top(f"{city} country") == f"{city} is a city in country {country}"


def test_a_query_of_the_city_name_never_finds_its_country():
    assert not any(
        _top(query).startswith(city) for city in KNOWLEDGE_BASE.countries for query in (city, f"{city} born")
    )


def test_without_a_relation_either_document_may_come():
    born = sum(_top(person.name).split()[-1] == person.cities["born"] for person in EVERYBODY)
    assert abs(born - 3000) < 4 * math.sqrt(6000 / 4)


@pytest.mark.parametrize("split", PEOPLE)
def test_the_expert_is_always_right(split):
    hop_search = HopSearch()
    for task in hop_search.tasks(split):
        searches, answer = _run(hop_search.expert(task))
        assert len(searches) == task.metadata["hops"]
        assert hop_search.reward(task, answer) == 1.0


async def test_the_expert_plays_through_the_episode_loop():
    for task in HopSearch().tasks("test")[:64]:
        hop_search = HopSearch()
        episode = await play(hop_search, ScriptedAgent(hop_search.expert(task)), task)
        assert episode.ending is Ending.COMPLETED
        assert episode.step_rewards[-1] == 1.0
        assert episode.events == dict.fromkeys(("tool_calls", "tool/search/calls"), task.metadata["hops"])


async def test_the_tool_returns_the_top_document_or_a_text_for_no_hits():
    hop_search = HopSearch()
    task = hop_search.tasks("train")[0]
    await hop_search.reset(task, seed=0)
    name = task.metadata["name"]
    step = await hop_search.step(call("search", query=f"{name} born"))
    assert [message.content for message in step.observation] == [_top(f"{name} born")]
    assert step.reward is None
    step = await hop_search.step(call("search", query="zebra"))
    assert [message.content for message in step.observation] == ["nothing found"]
    step = await hop_search.step(say(f"the {task.answer.upper()}."))
    assert (step.reward, step.terminated) == (1.0, True)


def test_a_wrong_or_padded_answer_is_worth_nothing():
    hop_search = HopSearch()
    task = hop_search.tasks("train")[0]
    assert hop_search.reward(task, "") == 0.0
    assert hop_search.reward(task, f"{task.answer} or else") == 0.0
    assert hop_search.reward(task, str(task.metadata["name"])) == 0.0


def test_an_unknown_split_is_a_one_sentence_error():
    with pytest.raises(UserError, match="no split `dev`; it has demo, train, validation, test"):
        HopSearch().tasks("dev")


def test_limits_and_dialect_are_the_references():
    assert (HopSearch.limits.max_turns, HopSearch.limits.max_tokens) == (5, 224)
    assert HopSearch.dialect.names(["search"]) == ("search", "information", "answer")


def test_demonstrations_err_at_the_references_rates():
    hop_search = HopSearch()
    rng = random.Random(0)
    outcomes: dict[str, list[bool]] = {}
    wrong_first: Counter[str] = Counter()
    wrong_second: Counter[str] = Counter()

    def note(kind: str, happened: bool) -> None:
        outcomes.setdefault(kind, []).append(happened)

    for task in hop_search.tasks("demo"):
        searches, answer = _run(hop_search.demonstrator(task, rng))
        name, relation, hops = (str(task.metadata[key]) for key in ("name", "relation", "hops"))
        note("at once", not searches)
        note(f"right {hops}", hop_search.reward(task, answer) == 1.0)
        if not searches:
            assert answer in name.split()
            continue
        query, document = searches[0]
        note("first query", query != f"{name} {relation}")
        wrong_first[_kind(query, name, relation)] += 1
        note(f"goes on {hops}", len(searches) == 2)
        if len(searches) == 2:
            city = document.split()[-1]
            query, document = searches[1]
            note("second query", query != f"{city} country")
            wrong_second[_kind(query, city, "country")] += 1
        *others, right = document.split()
        note("wrong word", answer != right)
        assert answer == right or answer in others
    expected = {
        "at once": 0.15,
        "first query": 0.30,
        "second query": 0.30,
        "goes on 1": 0.20,
        "goes on 2": 0.35,
        "wrong word": 0.09,
    }
    for kind, rate in expected.items():
        _assert_rate(sum(outcomes[kind]), len(outcomes[kind]), rate)
    for kind in ("one name only", "other relation", "no relation", "a name twice"):
        _assert_rate(wrong_first[kind], len(outcomes["first query"]), 0.30 / 4)
    for kind in ("other relation", "no relation", "a name twice"):
        _assert_rate(wrong_second[kind], len(outcomes["second query"]), 0.30 / 3)
    assert 0.40 < sum(outcomes["right 1"]) / len(outcomes["right 1"]) < 0.55
    assert 0.10 < sum(outcomes["right 2"]) / len(outcomes["right 2"]) < 0.20


def _kind(query: str, subject: str, relation: str) -> str:
    names, words = subject.split(), query.split()
    others = [word for word in RELATIONS if word != relation]
    twice = [[name, name] for name in names]
    if query == f"{subject} {relation}":
        return "right"
    if words in [[*names, word] for word in others]:
        return "other relation"
    if words == names:
        return "no relation"
    if words in twice or words in [[*pair, relation] for pair in twice]:
        return "a name twice"
    assert words in [[name, relation] for name in names]
    return "one name only"


def _assert_rate(count: int, total: int, rate: float) -> None:
    spread = math.sqrt(rate * (1 - rate) / total)
    assert abs(count / total - rate) < 4 * spread, f"{count} of {total} is not a rate of {rate}"


def test_a_demonstration_depends_on_its_generator_only():
    hop_search = HopSearch()
    tasks = hop_search.tasks("demo")[:50]
    first = [_run(hop_search.demonstrator(task, random.Random(7))) for task in tasks]
    again = [_run(hop_search.demonstrator(task, random.Random(7))) for task in tasks]
    other = [_run(hop_search.demonstrator(task, random.Random(8))) for task in tasks]
    assert first == again
    assert first != other


def test_every_name_is_two_tokens_and_the_corpus_holds_no_unsplit_name():
    hop_search = HopSearch()
    lines = list(hop_search.corpus())
    names = {part for person in EVERYBODY for part in (person.first, person.last)}
    names |= set(KNOWLEDGE_BASE.countries) | set(KNOWLEDGE_BASE.countries.values())
    assert not names & {word for line in lines for word in re.findall(r"\w+", line)}
    tags = [f"<{slash}{tag}>" for tag in hop_search.dialect.names(["search"]) for slash in ("", "/")]
    tokenizer = train_tokenizer(lines, special_tokens=tags, vocab_size=512)
    assert {len(tokenizer.encode(f" {name}", add_special_tokens=False)) for name in names} == {2}
    first, last = EVERYBODY[-1][:2]
    text = f"<search> {first} {last} works</search>"
    syllables = [f" {first[:2]}", first[2:], f" {last[:2]}", last[2:], " works"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.decode([token]) for token in ids] == ["<search>", *syllables, "</search>"]


def test_setting_apart_touches_names_only():
    assert env.split_syllables("Where was Kapo Miva born?") == "Where was Ka\npo Mi\nva born?"
    assert (
        env.split_syllables("In which country does Dado Mopa work?")
        == "In which country does Da\ndo Mo\npa work?"
    )
    assert env.split_syllables("nothing found") == "nothing found"


def test_the_environment_passes_its_check_without_a_warning():
    report = check_env(HopSearch, seed=1)
    assert report.findings == (), str(report)
