"""What is sent to /generate, and what its replies become."""

from __future__ import annotations

import json

import numpy as np
import pytest

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.request import Draft
from agentrl.errors import EngineError, RequestTooLargeError
from agentrl.protocols import Sampling
from agentrl.types import Finish
from tests.engine.serving import generated
from tests.engine.subjects import text_of

STOP_AT = {"type": "stop", "matched": 7}


def read(*told, sampling=None, decode=text_of):
    draft = Draft(sampling or Sampling(3), decode)
    for one in told:
        draft.add(wire.read(wire.GenerateReply, json.dumps(one).encode(), "the reply"))
    return draft.completion()


def test_a_request_says_all_that_decides():
    rule = Sampling(5, 0.7, 0.9, 20, stop=("a", "b"), stop_token_ids=(3, 4), seed=2**64 - 1)
    told = json.loads(wire.generate_body("r1", np.asarray([1, 2]), rule))
    assert told == {
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
    told = generated([59, 25, 45], cached_tokens=3, weight_version="12")
    told["meta_info"]["output_token_logprobs"] = [[-3.8934, 59, None], [-3.3032, 25, "I"], [-1, 45, None]]
    got = read(told)
    assert got.token_ids.tolist() == [59, 25, 45]
    assert got.logprobs.tolist() == pytest.approx([-3.8934, -3.3032, -1.0])
    assert got.versions.tolist() == [12, 12, 12]
    assert (got.finish, got.matched, got.cached_tokens) == (Finish.LENGTH, None, 3)


def test_an_abort_keeps_what_it_had_and_may_have_nothing():
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert read(generated([5], finish)).token_ids.tolist() == [5]
    empty = {"text": "", "meta_info": {"id": "x", "finish_reason": finish, "weight_version": "default"}}
    got = read(empty)
    assert (got.finish, len(got.token_ids)) == (Finish.ABORT, 0)


@pytest.mark.parametrize(
    ("ids", "told", "sampling", "kept", "matched"),
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
def test_a_completion_ends_where_its_first_stop_is_whole(ids, told, sampling, kept, matched):
    got = read(generated(ids, told), sampling=sampling)
    assert got.token_ids.tolist() == ids[:kept]
    assert (got.finish, got.matched, len(got.logprobs)) == (Finish.STOP, matched, kept)


def test_without_a_decoder_no_token_is_cut():
    got = read(generated([5, 6, 7, 8]), sampling=Sampling(4, stop=("67",)), decode=None)
    assert (got.token_ids.tolist(), got.finish, got.matched) == ([5, 6, 7, 8], Finish.STOP, "67")


def test_versions_of_single_tokens_are_taken_where_they_are_told():
    told = generated([1, 2, 3], weight_version="4", output_token_versions=["3", "3", "4"])
    assert read(told).versions.tolist() == [3, 3, 4]


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
def test_a_reply_that_is_none_is_one_sentence(change, sentence):
    with pytest.raises(EngineError) as raised:
        read(generated([1, 2, 3]) | change)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"7", b"<html>"])
def test_what_is_not_json_is_no_reply(body):
    with pytest.raises(EngineError, match="does not follow the SGLang protocol"):
        wire.read(wire.GenerateReply, body, "it")


def test_a_server_that_cut_a_request_is_noticed():
    with pytest.raises(RequestTooLargeError, match="room for 3 of max_new_tokens = 9"):
        read(generated([1, 2, 3]), sampling=Sampling(9))


def test_the_room_of_a_server_is_what_it_really_samples():
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
    ("body", "said"),
    [
        (b'{"error": {"message": "too\\nlong"}}', "answered 400: too long"),
        (b'{"message": "no"}', "answered 400: no"),
        (b"{broken", "answered 400: {broken"),
        (b'{"error": 7}', 'answered 400: {"error": 7}'),
        (b"[" * 2000, "answered 400: " + "[" * 300),
    ],
)
def test_a_refusal_is_told_in_its_own_words(body, said):
    assert wire.refusal(400, body) == said
