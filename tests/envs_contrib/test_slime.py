"""Functions in slime's form run unchanged: they play, pay and filter as they do there, token for token."""

from __future__ import annotations

import dataclasses
import json

import pytest

import agentrl
from agentrl import Message, Task, UserError
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.contract import check_group_filter, check_post_process, check_rollout_filter
from agentrl.algorithms.laws import TokenLaws
from agentrl.algorithms.samples import samples_of
from agentrl.assembly.algorithm import build_estimator
from agentrl.engine.sglang.wire import GenerateReply
from agentrl.envs.generate import generating
from agentrl.envs.scoring import GroupReward, Scorer, score
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Ending, Finish, Group, Verdict
from envs_contrib.slime import (
    Sample,
    filter_of,
    generate_of,
    group_reward_of,
    post_process_of,
    sample_filter_of,
)
from tests.algorithms.test_hierarchy import credited
from tests.envs.test_own_tokens import PROMPT, world
from tests.rollout.test_agent import Alphabet, Letters
from tests.worlds import ASK as TASK
from tests.worlds import Reciter

GREEK = [945, 946]


async def played(
    generate, reward=None, line=lambda turn, sampling: GREEK, *, settings=None, args=None, **more
):
    samples = more.pop("samples", "trajectories")
    agent = TokenAgent(
        Reciter(line, version=3), more.pop("renderer", Letters()), settings or SamplingSettings()
    )
    function = generate_of(generate, reward, args=args, samples=samples)
    return await generating(function)(more.pop("env", None) or world(), agent, more.pop("task", TASK), **more)


def answered(sample, reply, **more):
    """The sample with the reply as its response."""
    sample.tokens = [*PROMPT]
    sample.append_response_tokens(
        tokens=[item[1] for item in reply["meta_info"]["output_token_logprobs"]],
        log_probs=[item[0] for item in reply["meta_info"]["output_token_logprobs"]],
        meta_info=reply["meta_info"],
        text=reply["text"],
    )
    return dataclasses.replace(sample, **more) if more else sample


async def ask(args, payload):
    from slime.utils.http_utils import post

    return await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)


async def simple(args, sample, sampling_params):
    reply = await ask(
        args, {"text": sample.prompt, "sampling_params": sampling_params, "return_logprob": True}
    )
    return answered(sample, reply)


async def half(args, sample):
    return 0.5


async def test_a_function_gets_what_slime_gives_it():
    seen = {}

    async def looks(args, sample, sampling_params, evaluation=True):
        seen.update(args=args, sample=sample, params=dict(sampling_params), evaluation=evaluation)
        seen["reply"] = await ask(args, {"input_ids": PROMPT, "sampling_params": sampling_params})
        return answered(sample, seen["reply"])

    settings = SamplingSettings(temperature=0.7, top_p=0.9, top_k=5, max_response_len=4)
    task = Task("t", (Message("user", "How many?"),), '{"target": ["x"]}', {"source": "nq"})
    episode = await played(looks, half, settings=settings, task=task, args={"max_hops": 3})
    assert episode.failure is None
    sample, params, args = seen["sample"], seen["params"], seen["args"]
    assert (sample.prompt, sample.label, sample.metadata) == (
        "\x01How many?",
        {"target": ["x"]},
        {"source": "nq"},
    )
    assert (sample.index, sample.session_id, seen["evaluation"]) == (sample.index, episode.id, False)
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 4, "stop": ["</x>"]}
    assert {name: params[name] for name in expected} == expected
    assert (params["stop_token_ids"], params["skip_special_tokens"], params["no_stop_trim"]) == (
        [7, 9],
        False,
        True,
    )
    assert (args.rollout_max_context_len, args.rollout_temperature, args.max_hops) == (200, 0.7, 3)
    assert not args.partial_rollout
    with pytest.raises(
        AttributeError, match=r"args.rm_url is not known here; give its value, args=\{'rm_url'"
    ):
        _ = args.rm_url


async def test_a_prompt_may_be_that_of_the_data():
    prompts = []

    async def looks(args, sample, sampling_params):
        prompts.append(sample.prompt)
        return await simple(args, dataclasses.replace(sample, prompt="\x01How many?"), sampling_params)

    two = Task("t", (Message("system", "Be brief."), Message("user", "How many?")), "3")
    for task in (TASK, two):
        await played(looks, half, task=task, args={"apply_chat_template": False})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    assert prompts == ["How many?", messages]


async def test_a_reply_is_one_of_sglang():
    replies = []

    async def asks(args, sample, sampling_params):
        replies.append(
            await ask(
                args, {"input_ids": PROMPT, "sampling_params": {**sampling_params, "max_new_tokens": 1}}
            )
        )
        replies.append(await ask(args, {"text": sample.prompt, "sampling_params": sampling_params}))
        return answered(sample, replies[1])

    episode = await played(asks, half)
    cut, whole = (GenerateReply.model_validate_json(json.dumps(reply)) for reply in replies)
    assert (cut.meta_info.finish_reason.type, whole.meta_info.finish_reason.type) == ("length", "stop")
    assert (whole.output_ids, whole.text, whole.meta_info.weight_version) == (GREEK, "αβ", "3")
    completion = episode.turns[0].tokens.completion
    pairs = zip(completion.logprobs.tolist(), completion.token_ids.tolist(), strict=True)
    assert [entry[:2] for entry in whole.meta_info.output_token_logprobs] == [*pairs]
    assert replies[1]["meta_info"]["prompt_tokens"] == len(PROMPT)


class Merging(Alphabet):
    """A tokenizer that writes `ab` as one token: what was sampled as two is one when it is encoded."""

    def encode(self, text, *, add_special_tokens=True):
        return super().encode(text.replace("ab", "\u00ab"), add_special_tokens=add_special_tokens)

    def decode(self, token_ids, skip_special_tokens=False):
        return super().decode(token_ids, skip_special_tokens).replace("\u00ab", "ab")


class MergingLetters(Letters):
    tokenizer = Merging()


async def test_a_text_is_never_encoded_twice():
    prompts = []

    async def two_turns(args, sample, sampling_params):
        sample.tokens, text = [*PROMPT], sample.prompt
        for shown in ("cab", ""):
            prompts.append(text)
            reply = await ask(args, {"text": text, "sampling_params": sampling_params})
            answered_ids = [item[1] for item in reply["meta_info"]["output_token_logprobs"]]
            sample.append_response_tokens(
                tokens=answered_ids, log_probs=[-0.1] * 2, meta_info=reply["meta_info"]
            )
            if shown:
                more = Merging().encode(shown, add_special_tokens=False)
                sample.append_response_tokens(tokens=more, trainable=False)
            text += reply["text"] + shown
        return sample

    policy_line = [ord("a"), ord("b")]
    agent = TokenAgent(Reciter(lambda turn, sampling: policy_line), MergingLetters(), SamplingSettings())
    episode = await generating(generate_of(two_turns, half))(world(), agent, TASK)
    (sample,) = samples_of(episode)
    assert sample.token_ids.tolist() == [*PROMPT, *policy_line, ord("c"), 0xAB, *policy_line]
    assert prompts[1].endswith("abcab")


async def encodes_again(args, sample, sampling_params):
    """As Search-R1 without logprobs: the text of the reply as other tokens."""
    reply = await ask(args, {"text": sample.prompt, "sampling_params": sampling_params})
    sample.tokens, sample.response = [*PROMPT, 0xAB], reply["text"]
    sample.response_length = 1
    return sample


async def hotter(args, sample, sampling_params):
    return answered(
        sample, await ask(args, {"text": "x", "sampling_params": {**sampling_params, "temperature": 2}})
    )


async def penalised(args, sample, sampling_params):
    params = {**sampling_params, "repetition_penalty": 1.1}
    return answered(sample, await ask(args, {"text": "x", "sampling_params": params}))


async def several(args, sample, sampling_params):
    return answered(sample, await ask(args, {"text": "x", "sampling_params": {**sampling_params, "n": 4}}))


async def constrained(args, sample, sampling_params):
    return answered(
        sample, await ask(args, {"text": "x", "sampling_params": {**sampling_params, "regex": "a+"}})
    )


async def promptless(args, sample, sampling_params):
    return answered(sample, await ask(args, {"sampling_params": sampling_params}))


async def elsewhere(args, sample, sampling_params):
    from slime.utils.http_utils import post

    await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/flush_cache", {})


async def nothing(args, sample, sampling_params):
    return None


async def gives_up(args, sample, sampling_params):
    return dataclasses.replace(sample, status=Sample.Status.ABORTED)


async def short_mask(args, sample, sampling_params):
    done = await simple(args, sample, sampling_params)
    return dataclasses.replace(done, loss_mask=[1])


async def no_number(args, sample):
    return "good"


async def several_numbers(args, sample):
    return {"right": 1.0, "short": 0.5}


@pytest.mark.parametrize(
    ("generate", "reward", "detail"),
    [
        (encodes_again, half, "token 10 ('ab') is to be trained, and the policy did not sample it"),
        (hotter, half, "the request samples with temperature = 2, the run with 1.0"),
        (penalised, half, "the request sets repetition_penalty, and no run samples so; leave it out"),
        (several, half, "the request sets n, and no run samples so; leave it out"),
        (constrained, half, "the request sets regex, which has no effect here; leave it out"),
        (promptless, half, "the request has neither `input_ids` nor `text`"),
        (elsewhere, half, "the engine of a run answers /generate, not /flush_cache"),
        (nothing, half, "a generate function of slime returns a Sample, or a list of them, not None"),
        (gives_up, half, "it returned a sample with the status aborted"),
        (short_mask, half, "the sample has 12 tokens, a response of 2, a loss mask of 1"),
        (simple, no_number, "the reward is 'good', not a number"),
        (
            simple,
            several_numbers,
            'the reward has the numbers right, short; name one with args={"reward_key": ...}',
        ),
    ],
)
async def test_what_cannot_be_is_a_failed_episode_with_a_sentence(generate, reward, detail):
    renderer = MergingLetters() if generate is encodes_again else Letters()
    line = [ord("a"), ord("b")] if generate is encodes_again else GREEK
    episode = await played(generate, reward, lambda turn, sampling: line, renderer=renderer)
    assert episode.ending is Ending.FAILED
    assert episode.failure.detail == detail or episode.failure.detail.startswith(detail)


async def test_the_reward_is_the_functions_the_samples_or_the_environments():
    def parts(args, sample):
        return {"score": -0.6, "acc": False, "pred": "x"}

    episode = await played(simple, parts, args={"reward_key": "score"})
    assert (episode.total_of(), episode.total_of().parts) == (-0.6, {"score": -0.6, "acc": 0.0})

    async def pays_itself(args, sample, sampling_params):
        return dataclasses.replace(await simple(args, sample, sampling_params), reward=0.25)

    assert (await played(pays_itself, half)).total_of() == 0.25
    env = world(steps=[agentrl.Step.finished(reward=0.75)])
    assert (await played(simple, env=env)).total_of() == 0.75
    assert env.actions == [Message("assistant", "αβ")]
    assert (await played(simple, half, args={"group_rm": True})).total_of() == 0.0


async def test_how_it_ended_is_the_samples_status():
    cut = await played(simple, half, settings=SamplingSettings(max_response_len=1))
    assert (cut.ending, cut.total_of()) == (Ending.TRUNCATED, 0.5)
    assert cut.turns[0].tokens.completion.finish is Finish.LENGTH
    assert (await played(simple, half)).ending is Ending.COMPLETED

    async def removes(args, sample, sampling_params):
        return dataclasses.replace(await simple(args, sample, sampling_params), remove_sample=True)

    assert not any(sample.loss_mask.any() for sample in samples_of(await played(removes, half)))


async def forks(args, sample, sampling_params):
    first = await ask(args, {"input_ids": PROMPT, "sampling_params": sampling_params})
    samples = []
    for written in (40, 41):
        branch = answered(Sample(prompt=sample.prompt, label=sample.label), first)
        branch.append_response_tokens(tokens=[written], trainable=False, text="?")
        reply = await ask(args, {"input_ids": branch.tokens, "sampling_params": sampling_params})
        entries = reply["meta_info"]["output_token_logprobs"]
        branch.append_response_tokens(tokens=[e[1] for e in entries], log_probs=[e[0] for e in entries])
        samples.append(dataclasses.replace(branch, status=Sample.Status.COMPLETED))
    return samples


async def test_several_samples_are_trajectories_of_one_rollout():
    def all_equal(args, samples):
        assert [sample.label for sample in samples] == ["3", "3"]
        return [1.0] * len(samples)

    episode = await played(forks, all_equal, lambda turn, sampling: [900 + turn])
    one, other = samples_of(episode)
    assert one.token_ids[one.loss_mask].tolist() == [900, 901]
    # What both have was sampled once, and is trained once.
    assert other.token_ids[other.loss_mask].tolist() == [902]
    assert episode.total_of() == 1.0

    episode = await played(forks, lambda args, samples: [0.0, 1.0])
    assert 'different rewards; with samples = "rollouts" each has its own' in episode.failure.detail


async def test_samples_with_rewards_of_their_own_are_compared_in_their_place():
    """Advantages by hand: in each place the mean of both siblings is the baseline."""
    paid = ([1.0, 5.0], [0.0, 7.0])
    episodes = [
        await played(
            forks, lambda args, samples, own=own: own, samples="rollouts", seed=5, episode_id=f"e{number}"
        )
        for number, own in enumerate(paid)
    ]
    scored = await score(episodes, [])
    group = Group("g", TASK, 5, tuple(episodes), tuple(scored.verdicts))
    assert [(verdict.agent, verdict.total) for verdict in group.verdicts] == [
        *(("agent", 1.0), ("agent_1", 5.0), ("agent", 0.0), ("agent_1", 7.0)),
    ]
    TokenLaws(vocab_size=2000).check_samples([group], [s for e in episodes for s in samples_of(e)])
    own = {("e0", "agent"): 0.5, ("e0", "agent_1"): -1.0, ("e1", "agent"): -0.5, ("e1", "agent_1"): 1.0}
    assert credited(build_estimator(AlgorithmConfig(scale_rewards="none")), [group]) == own
    pooled = AlgorithmConfig(scale_rewards="none", hierarchy_roles={"agent*": "any"})
    assert credited(build_estimator(pooled), [group])["e1", "agent_1"] == 7.0 - 13.0 / 4
    episode = await played(forks, lambda args, samples: [1.0])
    assert episode.failure.detail == "a reward of 2 samples returns as many, not [1.0]"


async def test_a_reward_of_siblings_gets_their_samples():
    def by_length(args, samples):
        return [float(sample.response_length) for sample in samples]

    siblings = [
        await played(simple, half, lambda turn, sampling, n=n: [50] * n, episode_id=f"e{n}") for n in (1, 3)
    ]
    scorer = Scorer((GroupReward(group_reward_of(by_length), name="length"),))
    marked = [await scorer.mark(episode) for episode in siblings]
    verdicts = await scorer.judge(marked)
    assert [verdict.parts["length"] for verdict in verdicts] == [1.0, 3.0]


async def group_of(*totals):
    episodes = [
        await played(simple, lambda args, sample, t=t: t, episode_id=f"e{n}", seed=5)
        for n, t in enumerate(totals)
    ]
    verdicts = tuple(
        Verdict(e.id, "x", t, {"env": t, "env/acc": 1.0}) for e, t in zip(episodes, totals, strict=True)
    )
    return Group("g", TASK, 5, tuple(episodes), verdicts)


async def test_a_filter_sees_samples_and_gives_its_reason():
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    keeps = filter_of(path)
    check_group_filter(keeps)
    assert keeps(await group_of(1.0, 1.0)) == "zero_std_1_0"
    assert keeps(await group_of(1.0, 0.0)) is None

    def only_right(args, samples, **kwargs):
        return all(sample.get_reward_value(args) > 0 and sample.reward["acc"] == 1.0 for sample in samples)

    own = filter_of(only_right, args={"reward_key": "score"})
    assert (own(await group_of(1.0, 0.5)), own(await group_of(0.0, 1.0))) == (None, "only_right")


async def test_a_filter_of_samples_and_a_post_processing_keep_their_order():
    def wrong_ones(args, groups):
        for sample in groups[0]:
            sample.remove_sample = sample.reward < 0.5

    def doubled(args, samples):
        raw = [sample.reward for sample in samples]
        return raw, [2 * reward for reward in raw]

    group = await group_of(1.0, 0.0, 0.75)
    assert {id.episode: why for id, why in sample_filter_of(wrong_ones)([group]).items()} == {"e1": "removed"}
    totals = post_process_of(doubled)([group])
    assert {id.episode: total for id, total in totals.items()} == {"e0": 2.0, "e1": 0.0, "e2": 1.5}
    check_rollout_filter(sample_filter_of(wrong_ones))
    check_post_process(post_process_of(doubled))
    with pytest.raises(UserError, match="returns raw rewards and rewards, 3 each, not 7"):
        post_process_of(lambda args, samples: 7)([group])


async def test_a_view_of_an_episode_has_its_tokens():
    from envs_contrib.slime.sample import sample_of

    episode = await played(forks, lambda args, samples: [1.0, 1.0], lambda turn, sampling: [900 + turn])
    sample = sample_of(episode, Verdict(episode.id, "x", 1.0))
    assert sample.tokens == [*PROMPT, 900, 40, 901]
    assert (sample.response_length, sample.loss_mask) == (3, [1, 0, 1])
    logprobs = [turn.tokens.completion.logprobs.tolist() for turn in episode.trajectories[0].turns]
    assert sample.rollout_log_probs == [*logprobs[0], 0.0, *logprobs[1]]
    assert (sample.prompt, sample.response) == ("\x01How many?", "\u0384(\u0385")
    assert (sample.label, sample.reward, sample.status) == ("3", 1.0, Sample.Status.COMPLETED)


async def test_a_path_without_a_function_is_a_sentence():
    with pytest.raises(
        UserError, match=r"no function 'json.nothing' of slime: .*; name it `package.module.name`"
    ):
        await played("json.nothing", half)
    with pytest.raises(UserError, match=r"json.decoder.NaN is a float, not a function"):
        await played("json.decoder.NaN", half)
