"""The request bodies of /generate, and the completions from its replies."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.request import Draft
from agentrl.errors import ConfigError, EngineError, RequestTooLargeError
from agentrl.http.requests import num_values
from agentrl.types import KEPT_IDS, Finish, RequestTimes
from agentrl.types.seams import Sampling
from tests.engine.serving import generated
from tests.engine.subjects import text_of

STOP_AT = {"type": "stop", "matched": 7}


def read(*replies, sampling=None, decode=text_of):
    draft = Draft(sampling or Sampling(3), decode)
    for reply in replies:
        draft.add(wire.read(wire.GenerateReply, json.dumps(reply).encode(), "the reply"))
    return draft.completion()


def test_a_request_sets_every_sampling_parameter():
    rule = Sampling(5, 0.7, 0.9, 20, stop=("a", "b"), stop_token_ids=(3, 4), seed=2**64 - 1)
    payload = json.loads(wire.generate_body("r1", np.asarray([1, 2]), rule))
    assert payload == {
        "rid": "r1",
        "input_ids": [1, 2],
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 5,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "stop": ["a", "b"],
            "stop_token_ids": [3, 4],
            "sampling_seed": 2**63 - 1,
        },
    }
    free = json.loads(wire.generate_body("r1", [1], Sampling(5, temperature=0.0)))["sampling_params"]
    assert free["top_k"] == -1
    assert {"stop", "stop_token_ids", "sampling_seed"} & free.keys() == set()


def test_an_observed_reply_is_read():
    reply = generated([59, 25, 45], cached_tokens=3, weight_version="12")
    reply["meta_info"]["output_token_logprobs"] = [[-3.8934, 59, None], [-3.3032, 25, "I"], [-1, 45, None]]
    completion = read(reply)
    assert completion.token_ids.tolist() == [59, 25, 45]
    assert completion.logprobs.tolist() == pytest.approx([-3.8934, -3.3032, -1.0])
    assert completion.versions.tolist() == [12, 12, 12]
    assert (completion.finish, completion.matched, completion.cached_tokens) == (Finish.LENGTH, None, 3)


def test_what_a_request_took_is_read_as_far_as_the_server_says_so_and_added_up_over_its_parts():
    # As an SGLang on the CPU with --enable-metrics replied.
    metered = {
        "e2e_latency": 0.75,
        "queue_time": 0.125,
        "forward_entry_time": 1764406980.25,
        "prefill_finished_time": 1764406980.5,
        "request_finished_ts": 1764406981.0,
    }

    def times(**meta):
        return read(generated([59], **meta), sampling=Sampling(1)).seconds

    assert times(**metered) == RequestTimes(request=0.75, queue=0.125, prefill=0.25, decode=0.5)
    assert times(e2e_latency=1) == RequestTimes(request=1.0)
    assert times() == RequestTimes()
    # The clocks of a machine that prefills and of one that decodes need not agree.
    apart = metered | {"prefill_finished_time": 1764406981.5, "queue_time": -1.0}
    assert times(**apart) == RequestTimes(request=0.75, prefill=1.25)
    begun = generated([1, 2], {"type": "abort"}, **metered)
    rule = Sampling(3, temperature=0.0)
    whole = read(begun, generated([4], e2e_latency=0.25), sampling=rule).seconds
    assert whole == RequestTimes(request=1.0, queue=0.125, prefill=0.25, decode=0.5)


def test_an_abort_keeps_its_tokens_and_may_have_none():
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert read(generated([5], finish)).token_ids.tolist() == [5]
    empty = {"text": "", "meta_info": {"id": "x", "finish_reason": finish, "weight_version": "default"}}
    completion = read(empty)
    assert (completion.finish, len(completion.token_ids)) == (Finish.ABORT, 0)


@pytest.mark.parametrize(
    ("ids", "finish", "sampling", "num_tokens", "matched"),
    [
        pytest.param([5, 6, 7], STOP_AT, Sampling(9, stop_token_ids=(7,)), 3, 7, id="stop token"),
        pytest.param([5, 7], STOP_AT, Sampling(9), 2, 7, id="the model's own end token"),
        pytest.param([5, 6, 7], None, Sampling(3, stop_token_ids=(7,)), 3, 7, id="stop token at the limit"),
        pytest.param([5, 6, 7], None, Sampling(3, stop=("67",)), 3, "67", id="stop string at the limit"),
        pytest.param([5, 6, 7, 8], None, Sampling(4, stop=("67",)), 3, "67", id="overlooked, then the limit"),
        pytest.param(
            [6, 7, 8, 7], STOP_AT, Sampling(9, stop=("67",)), 2, "67", id="overlooked, then a token"
        ),
        pytest.param(
            [6, 7, 8, 6, 7],
            {"type": "stop", "matched": "67"},
            Sampling(9, stop=("67",)),
            2,
            "67",
            id="overlooked once",
        ),
        pytest.param(
            [5, 6, 7], {"type": "stop", "matched": "67"}, Sampling(9, stop=("67",)), 3, "67", id="stop string"
        ),
        pytest.param([6, 7], STOP_AT, Sampling(9, stop=("67",)), 2, 7, id="token and string at once"),
    ],
)
def test_a_completion_ends_with_its_first_stop_string(ids, finish, sampling, num_tokens, matched):
    completion = read(generated(ids, finish), sampling=sampling)
    assert completion.token_ids.tolist() == ids[:num_tokens]
    assert (completion.finish, completion.matched, len(completion.logprobs)) == (
        Finish.STOP,
        matched,
        num_tokens,
    )


def test_without_a_decoder_no_token_is_cut():
    completion = read(generated([5, 6, 7, 8]), sampling=Sampling(4, stop=("67",)), decode=None)
    assert (completion.token_ids.tolist(), completion.finish, completion.matched) == (
        [5, 6, 7, 8],
        Finish.STOP,
        "67",
    )


def test_versions_of_single_tokens_are_used_where_they_are_reported():
    reply = generated([1, 2, 3], weight_version="4", output_token_versions=["3", "3", "4"])
    assert read(reply).versions.tolist() == [3, 3, 4]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"output_ids": [1, 2]}, "logprobs of 3 that are not the same"),
        ({"output_ids": [1, 2, 4]}, "that are not the same"),
        ({"output_ids": "123"}, "output_ids"),
        ({"meta_info": {}}, "finish_reason"),
        ({"meta_info": generated([1, 2, 3], {"type": "tired"})["meta_info"]}, "finish_reason.type"),
        ({"meta_info": generated([1, 2, 3], weight_version="blue")["meta_info"]}, "'blue'"),
        ({"meta_info": generated([1, 2, 3], weight_version=None)["meta_info"]}, "weight_version"),
        ({"meta_info": generated([1, 2, 3], output_token_versions=["1"])["meta_info"]}, "1 versions"),
        (
            {
                "meta_info": generated([1, 2, 3], output_token_logprobs=[[None, i, None] for i in (1, 2, 3)])[
                    "meta_info"
                ]
            },
            "output_token_logprobs.0.0",
        ),
        (
            {"meta_info": generated([1, 2, 3], {"type": "stop", "matched": "NaN happened"})["meta_info"]},
            "'NaN happened', which is no stop string of the request",
        ),
    ],
)
def test_an_invalid_reply_is_one_sentence(change, sentence):
    with pytest.raises(EngineError) as raised:
        read(generated([1, 2, 3]) | change)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"7", b"<html>"])
def test_what_is_not_json_is_no_reply(body):
    with pytest.raises(EngineError, match="does not follow the SGLang protocol"):
        wire.read(wire.GenerateReply, body, "it")


def test_a_truncated_request_is_detected():
    with pytest.raises(RequestTooLargeError, match="memory for 3 of max_new_tokens = 9"):
        read(generated([1, 2, 3]), sampling=Sampling(9))


def test_the_capacity_of_a_server_is_what_it_really_samples():
    # Observed: with a context of 64 a prompt of 7 gets 55 tokens and not 56, and a prompt of 58 is refused.
    capacity = wire.capacity_of(
        wire.ServerInfo(context_length=64, max_req_input_len=58, max_total_num_tokens=4000)
    )
    assert capacity == (62, 57)
    capacity.check(7, 55)
    for prompt, new in ((7, 56), (58, 1)):
        with pytest.raises(RequestTooLargeError, match=f"{prompt} tokens and max_new_tokens = {new}"):
            capacity.check(prompt, new)
    assert wire.capacity_of(wire.ServerInfo(context_length=64)) == (64, 64)
    small = wire.ServerInfo(context_length=64, max_total_num_tokens=40, page_size=4)
    assert wire.capacity_of(small) == (32, 32)
    assert wire.capacity_of(wire.ServerInfo()) == wire.UNBOUNDED_CAPACITY


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"error": {"message": "too\\nlong"}}', "answered 400: too long"),
        (b'{"message": "no"}', "answered 400: no"),
        (b"{broken", "answered 400: {broken"),
        (b'{"error": 7}', 'answered 400: {"error": 7}'),
        (b"[" * 2000, "answered 400: " + "[" * 300),
    ],
)
def test_a_refusal_has_the_servers_message(body, sentence):
    assert wire.refusal(400, body) == sentence


KEEPING = Sampling(3, top_p=0.75, top_k=3, return_kept_ids=True)


def likeliest(*probs):
    """Top logprobs of tokens 10, 11, ..., as SGLang writes them; null where the probability is 0."""
    return [[float(np.log(p)) if p else None, 10 + n, None] for n, p in enumerate(probs)]


def kept_of(top, entries, sampling=KEEPING):
    ids = [entry[1] for entry in entries]
    sampling = replace(sampling, max_new_tokens=len(ids))
    reply = generated(ids, output_top_logprobs=top, output_token_logprobs=entries)
    completion = read(reply, sampling=sampling)
    return [ids.tolist() for ids in completion.extras[KEPT_IDS].lists()], np.exp(completion.logprobs)


def test_only_a_request_that_asks_and_cuts_has_the_server_report_kept_ids():
    def body(**rule):
        return json.loads(wire.generate_body("r", [1], Sampling(3, **rule)))

    names = ("return_kept_ids", "top_logprobs_num")
    assert {name: body(top_k=20, return_kept_ids=True).get(name) for name in names} == {
        "return_kept_ids": True,
        "top_logprobs_num": 20,
    }
    # The bound of what a prefill server hands on; `agentrl serve` has none.
    assert "top_logprobs_num" not in body(top_k=129, return_kept_ids=True)
    assert body(top_p=0.5, return_kept_ids=True)["return_kept_ids"] is True
    for rule in ({"top_k": 20}, {"return_kept_ids": True}):
        assert not body(**rule).keys() & set(names)


def test_the_prefix_of_the_likeliest_tokens_is_kept():
    top = [likeliest(0.5, 0.2, 0.1), likeliest(0.6, 0.2, 0.1), likeliest(1.0, 0, 0)]
    entries = [[float(np.log(p)), id_, None] for p, id_ in ((0.2, 11), (0.2, 11), (1.0, 10))]
    kept, probs = kept_of(top, entries)
    # 0.7 before the third is at most 0.75, 0.8 is not; what has probability 0 cannot be drawn.
    assert kept == [[10, 11, 12], [10, 11], [10]]
    np.testing.assert_allclose(probs, [0.2 / 0.8, 0.2 / 0.8, 1.0], rtol=1e-6)


def test_a_sampled_token_that_ties_with_the_last_one_is_kept_beside_it():
    kept, probs = kept_of([likeliest(0.4, 0.2, 0.1)], [[float(np.log(0.1)), 30, None]])
    assert kept == [[10, 11, 12, 30]]
    np.testing.assert_allclose(probs, [0.1 / 0.8], rtol=1e-6)


def test_kept_ids_of_several_parts_are_joined_and_cut_with_the_tokens():
    parts = [
        generated(ids, finish, output_kept_ids=kept)
        for ids, finish, kept in (
            ([1, 2], {"type": "abort"}, [[1], [2, 3]]),
            ([4], None, [[4, 5, 6]]),
        )
    ]
    completion = read(*parts, sampling=KEEPING)
    assert [ids.tolist() for ids in completion.extras[KEPT_IDS].lists()] == [[1], [2, 3], [4, 5, 6]]
    assert completion.logprobs.tolist() == [-0.5] * 3


@pytest.mark.parametrize(
    ("meta", "error", "sentence"),
    [
        ({}, ConfigError, "set rollout_top_k to 1 to 128"),
        ({"output_kept_ids": [[1]]}, EngineError, "2 tokens, and kept ids of 1"),
        ({"output_kept_ids": [[1], [3]]}, EngineError, "without the token that was sampled"),
        ({"output_top_logprobs": [[[-1.0, 1, None]]]}, EngineError, "2 tokens, and kept ids of 1"),
    ],
)
def test_kept_ids_that_are_missing_or_wrong_are_refused(meta, error, sentence):
    with pytest.raises(error, match=sentence):
        read(generated([1, 2], **meta), sampling=KEEPING)


@pytest.mark.parametrize(
    ("field", "entry"),
    [
        ("output_ids", "x"),
        ("output_token_logprobs", []),
        ("output_token_versions", 1),
        ("output_kept_ids", "x"),
        ("output_kept_ids", ["x"] * 1_000),
        ("output_top_logprobs", 1),
        ("output_top_logprobs", [1] * 1_000),
    ],
)
def test_of_many_wrong_entries_the_first_one_is_described(field, entry):
    reply = generated([59])
    holder = reply if field == "output_ids" else reply["meta_info"]
    holder[field] = [entry] * 1_000
    with pytest.raises(ValidationError) as caught:
        wire.GenerateReply.model_validate_json(json.dumps(reply))
    # Without FailFast there are a thousand; a tuple has one for each of its missing fields.
    assert caught.value.error_count() <= 3


@pytest.mark.parametrize("sampling", [Sampling(4_000), replace(KEEPING, max_new_tokens=4_000)])
def test_the_longest_replies_that_were_asked_for_are_within_their_bounds(sampling):
    entry = [-123.45678901234567, 151_000, None]
    reply = generated([151_000] * 4_000, weight_version="123456789")
    # 200 characters a token: none of a vocabulary is longer, but for blanks.
    reply["text"] = " " * 200 * 4_000
    reply["meta_info"]["output_token_logprobs"] = [entry] * 4_000
    reply["meta_info"]["output_token_versions"] = ["123456789"] * 4_000
    if sampling.keeps_ids:
        reply["meta_info"]["output_top_logprobs"] = [[entry] * sampling.top_k] * 4_000
    body, bounds = json.dumps(reply).encode(), wire.bounds_of(sampling)
    assert len(body) <= bounds.max_bytes
    assert num_values(body) <= bounds.max_values


def test_a_long_refusal_is_not_parsed(monkeypatch):
    body = b'{"message": "no", "rest": [' + b"[]," * 100_000 + b"[]]}"
    monkeypatch.setattr(wire, "json_of", lambda text: pytest.fail("it was parsed"))
    assert wire.refusal(500, body).startswith('answered 500: {"message": "no", "rest": [[],[],')
