"""From end to end on a CPU: a tiny agent learns, and everything it did is on disk."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentrl
from agentrl import call, say
from agentrl.assembly.config import RunConfig
from agentrl.config import effective_values, parse, read_toml
from agentrl.errors import WorldBrokenError
from agentrl.records import reconcile
from tests.flow.runs import EPISODES_PER_STEP, TINY, WARM, journal_of, metrics_of, tokens_of, train
from tests.flow.worlds import Bandit

STEPS = 12


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A warm start and RL in the bandit's world."""
    return train("Bandit", tmp_path_factory.mktemp("runs"), "learned", num_rollout=STEPS, **WARM)


@pytest.fixture(scope="module")
def warm(learned, tmp_path_factory):
    """The model after the warm start, to begin other runs with."""
    return {"hf_checkpoint": str(learned.folder / "checkpoint-warm-start"), "eval_episodes": 16}


def rewards_of(folder):
    return [row["rollout/raw_reward"] for row in metrics_of(folder) if "rollout/raw_reward" in row]


def sound(folder, steps):
    """The books of a run, checked: every episode stands in them once, with what became of it."""
    books = reconcile(folder)
    assert books.problems == ()
    assert books.played == books.trained + sum(books.dropped.values())
    entries = journal_of(folder, "step_*")
    assert len(entries) == books.played
    for entry in entries:
        scored = bool(entry["verdicts"])
        assert "failure" not in entry["episode"] or not scored
        assert entry["outcome"] == "trained" or entry["reason"]
    num_complete = books.trained + books.dropped.get("zero_std", 0)
    assert num_complete == steps * EPISODES_PER_STEP
    return books


def test_the_agent_gets_better_by_what_it_was_rewarded_for(learned):
    rewards = rewards_of(learned.folder)
    assert len(rewards) == STEPS
    assert max(rewards[:2]) < 0.6
    assert min(rewards[-2:]) > 0.8
    before, after = learned.reports["after warm start"], learned.reports["after RL"]
    assert learned.reports["before"]["sampled"].mean < 0.1
    assert 0.1 < before["sampled"].mean < 0.5
    assert before["greedy"].mean == 0.0
    assert after["sampled"].mean > 0.8
    assert after["greedy"].mean == 1.0


def test_a_run_that_learns_has_no_diagnosis(learned):
    assert learned.diagnoses == ()
    assert not (learned.folder / "diagnoses.jsonl").exists()


def test_the_folder_holds_everything(learned):
    names = {path.name for path in learned.folder.iterdir()}
    assert names >= {
        "config.toml",
        "metrics.jsonl",
        "trajectories",
        "checkpoint",
        "report.html",
        "tensorboard",
    }
    assert any((learned.folder / "tensorboard").iterdir())
    steps = sorted(path.name for path in (learned.folder / "trajectories").glob("step_*"))
    assert steps == [f"step_{step:06d}.jsonl.gz" for step in range(1, STEPS + 1)]
    page = (learned.folder / "report.html").read_text()
    assert "<svg" in page
    own_settings, _, all_settings = page[page.index("How it was set up") :].partition("<details>")
    assert "warm_start_steps" in own_settings
    assert "max_turns" in own_settings
    assert "rollout_temperature" not in own_settings
    assert "rollout_temperature" in all_settings


def test_the_resolved_configuration_reads_back_equal_and_holds_what_was_asked(learned):
    config = parse(RunConfig, read_toml(learned.folder / "config.toml"), source="config.toml")
    again = parse(RunConfig, effective_values(config), source="itself")
    assert config == again
    assert config.rollout.num_rollout == STEPS
    assert config.model.hidden_size == TINY["hidden_size"]
    assert config.run_name == "learned"


def test_every_step_is_logged_once_under_the_fields_names(learned):
    rows = metrics_of(learned.folder)
    names = {name for row in rows for name in row}
    assert {name.split("/")[0] for name in names if "/" in name} == {"rollout", "train", "eval", "perf"}
    assert names >= {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "eval/sampled",
        "eval/greedy",
        "perf/step_time",
        "perf/update_weights_bytes",
    }
    assert all(row["perf/update_weights_bytes"] > 0 for row in rows if "perf/step_time" in row)


def test_the_journal_of_a_sound_run_holds_every_episode_once(learned):
    books = sound(learned.folder, STEPS)
    assert set(books.dropped) <= {"zero_std"}
    assert books.trained > 0
    assert books.played == STEPS * EPISODES_PER_STEP


def test_a_group_is_trained_on_or_dropped_as_a_whole_and_trained_only_with_signal(learned):
    groups = {}
    for entry in journal_of(learned.folder, "step_*"):
        groups.setdefault(entry["episode"]["id"].split("-")[0], []).append(entry)
    for members in groups.values():
        assert len({entry["outcome"] for entry in members}) == 1
        assert len({entry["episode"]["seed"] for entry in members}) == 1
        assert len({entry["episode"]["task"]["id"] for entry in members}) == 1
        totals = {entry["verdicts"][0]["total"] for entry in members}
        assert (len(totals) > 1) == (members[0]["outcome"] == "trained")


def test_every_token_trained_on_was_sampled_by_the_policy_of_its_step(learned):
    for step in range(1, STEPS + 1):
        for entry in journal_of(learned.folder, f"step_{step:06d}"):
            for turn in entry["episode"]["trajectories"][0]["turns"]:
                assert set(turn["tokens"]["completion"]["versions"]) <= {step - 1}


def test_the_checkpoint_is_the_policy_and_transformers_loads_it(learned):
    model, report = AutoModelForCausalLM.from_pretrained(
        learned.folder / "checkpoint", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(learned.folder / "checkpoint")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "press 0"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt if not hasattr(prompt, "input_ids") else prompt.input_ids
    written = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=3)[0, ids.shape[1] :])
    assert written == "<press> right</press>"


@pytest.mark.parametrize(("mode", "temperature"), [("sampled", 1.0), ("greedy", 0.0)])
def test_evaluating_the_checkpoint_gives_what_the_run_reported(learned, mode, temperature):
    inside = learned.reports["after RL"][mode]
    outside = agentrl.evaluate(
        "tests.flow.worlds:Bandit",
        str(learned.folder / "checkpoint"),
        n=inside.n,
        temperature=temperature,
        split="test",
        seed=0,
        quiet=True,
    )
    measured = ("mean", "low", "high", "n", "by", "failures", "endings", "counts", "turns", "policy_tokens")
    assert {name: getattr(outside, name) for name in measured} == {
        name: getattr(inside, name) for name in measured
    }


def test_a_run_that_begins_with_the_checkpoint_plays_the_same_tokens(learned, tmp_path):
    again = train(
        "Bandit", tmp_path, "again", num_rollout=0, hf_checkpoint=str(learned.folder / "checkpoint")
    )
    for mode in ("sampled", "greedy"):
        played = journal_of(learned.folder, f"eval_{mode}-after-RL_{STEPS:06d}")
        repeated = journal_of(again.folder, f"eval_{mode}-before_000000")
        assert [tokens_of(entry) for entry in repeated] == [tokens_of(entry) for entry in played]


def test_the_same_seed_is_the_same_run_and_another_seed_another(warm, tmp_path):
    def tokens(name, seed):
        run = train("Bandit", tmp_path, name, num_rollout=3, seed=seed, **warm)
        return [tokens_of(entry) for entry in journal_of(run.folder, "step_*")]

    first = tokens("a", 1)
    assert tokens("b", 1) == first
    assert tokens("c", 2) != first


class Scripted(Bandit):
    """A warm start imitates its expert, in this form of a script or in another one."""

    def demonstrator(self, task, rng):
        return self.expert(task)


class ListScripted(Scripted):
    """Its expert is a list of actions."""

    def expert(self, task):
        return [call("press", button="right"), "gold"]


class AsyncScripted(Scripted):
    """Its expert is an async generator, which waits for what it does next."""

    async def expert(self, task):
        answer = yield call("press", button="right")
        await asyncio.sleep(0)
        yield say(answer)


class AwaitedScripted(Scripted):
    """Its expert is an async function that returns a list."""

    async def expert(self, task):
        await asyncio.sleep(0)
        return [call("press", button="right"), say("gold")]


def test_a_warm_start_learns_the_same_from_an_expert_in_any_form_of_a_script(tmp_path):
    steps = {"warm_start_steps": 2, "warm_start_batch_size": 8, "num_demonstrations": 8}
    weights = {}
    for form in (Scripted, ListScripted, AsyncScripted, AwaitedScripted):
        name = form.__name__
        folder = train(name, tmp_path, name, env=form, **steps, num_rollout=0, eval_episodes=1).folder
        weights[form] = (folder / "checkpoint-warm-start" / "model.safetensors").read_bytes()
        assert weights[form] == weights[Scripted], name
        assert weights[form] != (folder / "model" / "model.safetensors").read_bytes()


def test_shuffled_rewards_teach_nothing(warm, tmp_path):
    run = train("Bandit", tmp_path, "control", num_rollout=STEPS, shuffle_rewards=True, **warm)
    rewards = rewards_of(run.folder)
    assert max(rewards) < 0.7


def test_several_optimizer_steps_an_iteration_learn_too(warm, tmp_path):
    run = train("Bandit", tmp_path, "steps", num_rollout=6, num_steps_per_rollout=2, **warm)
    sound(run.folder, 6)
    assert rewards_of(run.folder)[-1] > rewards_of(run.folder)[0] + 0.2


def test_a_world_that_fails_in_a_fifth_of_its_resets_is_journalled_replaced_and_learned(warm, tmp_path):
    run = train("Shaky", tmp_path, "shaky", num_rollout=8, max_episode_retries=3, **warm)
    books = sound(run.folder, 8)
    assert books.dropped["reset_error"] > 50
    failed = [entry for entry in journal_of(run.folder, "step_*") if entry.get("reason") == "reset_error"]
    assert all(not entry["verdicts"] for entry in failed)
    assert all("the world shook" in entry["episode"]["failure"]["detail"] for entry in failed)
    assert rewards_of(run.folder)[-1] > 0.6
    assert (
        run.reports["after RL"]["sampled"].failures.get("reset_error", 0)
        + run.reports["after RL"]["sampled"].n
        == 16
    )


def test_groups_that_cannot_be_filled_are_dropped_whole_and_replaced(warm, tmp_path):
    run = train("Shaky", tmp_path, "broken", num_rollout=2, max_episode_retries=1, **warm)
    books = sound(run.folder, 2)
    assert books.dropped["group_incomplete"] > 0


def test_a_tool_that_hangs_is_text_for_the_model_and_is_scored(warm, tmp_path):
    run = train("Sticky", tmp_path, "sticky", num_rollout=2, rollout_max_context_len=128, **warm)
    books = sound(run.folder, 2)
    assert set(books.dropped) <= {"zero_std"}
    rows = [row for row in metrics_of(run.folder) if "rollout/raw_reward" in row]
    assert all(row["rollout/tool_timeouts/mean"] > 0.2 for row in rows)
    assert all(row["rollout/failed_episodes"] == 0 for row in rows)


def test_a_world_that_hangs_is_a_failure_replaced_by_another_episode(warm, tmp_path):
    run = train("Stuck", tmp_path, "stuck", num_rollout=2, **warm)
    books = sound(run.folder, 2)
    assert books.dropped["step_timeout"] > 5


def test_a_world_that_always_fails_ends_the_run_in_a_sentence(warm, tmp_path):
    with pytest.raises(WorldBrokenError, match=r"reset failed: RuntimeError: no such planet"):
        train("Dead", tmp_path, "dead", num_rollout=2, **warm)


def test_a_folder_that_holds_a_run_is_left_alone(learned, tmp_path):
    copy = tmp_path / "learned"
    shutil.copytree(learned.folder, copy)
    before = (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(
        agentrl.UserError, match=r"already holds a run; resume it .*--resume`\), choose another --name"
    ):
        train("Bandit", tmp_path, "learned")
    assert (copy / "metrics.jsonl").read_bytes() == before
