"""Environments of verifiers 0.3 are played here, and by verifiers itself, with the same replies."""

import asyncio
import json
import signal

import verifiers as vf
from endpoint import endpoint
from verifiers.clients import OpenAIChatCompletionsClient

from agentrl import ScriptedAgent, UserError, call, play, say
from agentrl.algorithms.samples import samples_of
from agentrl.envs.scoring import sum_of_steps
from agentrl.envs.verifiers import VerifiersEnv
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from tests.envs.gateway.worlds import WORDS, Speech, adds, says

REPLIES = {
    "guess": [[say("3"), say("20"), say("7")], [say("1"), say("2"), say("3"), say("4")]],
    "tools": [[call("add", a=2, b=3), say("5")], [call("add", a="x"), call("take", a=1), say("no")]],
    "stateful": [[call("pay", amount=5), call("pay", amount=2), say("done")], [say("done")]],
    "single": [[say("5")], [say("6")]],
    "lost": [[call("lose"), say("5")]],
}


def same_form(role, text, calls=()):
    return [role, text or "", [[name, json.loads(arguments)] for name, arguments in calls]]


def of_theirs(message):
    # Calls are texts of JSON in what verifiers puts out.
    read = [json.loads(each) for each in message.get("tool_calls") or ()]
    calls = [(each["name"], each["arguments"]) for each in read]
    return same_form(message["role"], message.get("content"), calls)


def of_ours(message):
    calls = [(c.name, json.dumps(dict(c.arguments))) for c in message.tool_calls]
    return same_form(message.role, message.text, calls)


async def theirs(kind, replies):
    environment = vf.load_environment("their_envs", kind=kind)
    client = OpenAIChatCompletionsClient(endpoint(lambda prompt: replies))
    rollout = await environment.run_rollout(environment.get_dataset().to_list()[0], client, "m", {})
    messages = [*rollout["prompt"], *rollout["completion"]]
    named = {f"env/{name}": value for name, value in rollout["metrics"].items()}
    return rollout["reward"], named, [of_theirs(json.loads(json.dumps(m, default=dict))) for m in messages]


async def ours(kind, replies):
    env = VerifiersEnv("their_envs", num_test=0, kind=kind)
    episode = await play(env, ScriptedAgent(iter(replies)), env.tasks("train")[0])
    if episode.failure is not None:
        return [str(episode.failure), {}, []]
    verdict = sum_of_steps(episode)
    (trajectory,) = episode.trajectories
    messages = [m for turn in trajectory.turns for m in (*turn.observation, turn.action)]
    named = {name: value for name, value in verdict.parts.items() if name != "env"}
    return verdict.total, named, [of_ours(message) for message in messages]


async def tokens():
    """What is trained of a rollout with tools: the policy's own tokens, each once, in one sample."""
    policy = Speech(says("", adds(2, 3)), says("5"))
    env = VerifiersEnv("their_envs", num_test=0, kind="tools")
    agent = TokenAgent(policy, WORDS, SamplingSettings(), WORDS.bounded)
    episode = await play(env, agent, env.tasks("train")[0], episode_id="e-1")
    assert episode.failure is None, episode.failure
    (sample,) = samples_of(episode)
    (first, said), (second, answered) = policy.asked
    assert second[: len(first) + len(said)] == (*first, *said)
    assert sample.token_ids.tolist() == [*second, *answered]
    assert sample.token_ids[sample.loss_mask].tolist() == [*said, *answered]
    return episode.total_of()


def refused(**settings):
    try:
        VerifiersEnv(**settings).tasks("train")
    except UserError as error:
        return str(error)


async def main():
    found = {}
    for kind, each in REPLIES.items():
        found[kind] = [[await theirs(kind, replies), await ours(kind, replies)] for replies in each]
    splits = ("train", "test")
    envs = [VerifiersEnv("their_envs", num_test=1, kind=kind) for kind in ("guess", "tools")]
    sizes = [[len(env.tasks(split)) for split in splits] for env in envs]
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    VerifiersEnv("their_envs", num_test=2, kind="single").tasks("train")
    assert signal.signal(signal.SIGTERM, handler) is signal.SIG_IGN
    refusals = [refused(environment="nowhere"), refused(environment="their_envs", kind="ranked")]
    print(json.dumps({"found": found, "sizes": sizes, "tokens": await tokens(), "refusals": refusals}))


asyncio.run(main())
