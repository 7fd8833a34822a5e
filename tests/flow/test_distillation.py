"""Distillation from start to end: what the policy takes over from a teacher that reads more than it does."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from contextlib import suppress

import httpx2
import pytest

import agentrl
from agentrl.errors import ConfigError, TeacherError, UserError
from agentrl.records import reconcile
from tests.engine.fleets import Served
from tests.flow.runs import TINY, WARM, journal_of, metrics_of, train
from tests.flow.test_replay import learned, replay_of, weights_of
from tests.flow.test_resume import same
from tests.flow.worlds import Struck, Talkative

CONTEXT = {"privileged_context_path": "tests.flow.taught:press_right"}
ALONE = {"use_opd": True, "opd_only": True}
SELF = {**ALONE, **CONTEXT, "opd_teacher": "self"}
MOVING = {**ALONE, **CONTEXT, "opd_teacher": "reference", "ref_update_interval": 1, "ref_mixup_alpha": 0.1}
SMALL = {
    **TINY,
    "num_rollout": 3,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "eval_episodes": 4,
    "save_interval": 1,
    "use_tensorboard": False,
}


@pytest.mark.learning
@pytest.mark.parametrize("teacher", [SELF, MOVING], ids=["self", "reference"])
def test_a_policy_takes_over_what_it_does_with_a_hint_without_any_reward(tmp_path, teacher):
    warm = {**WARM, "warm_start_steps": 80, "warm_start_split": "demo"}
    # A teacher that is the policy drifts with it: with larger steps both may agree on the wrong button.
    settings = {**warm, "num_rollout": 16, "lr": 3e-4, "shuffle_rewards": True, "n_samples_per_prompt": 1}
    result = train(
        "Bandit",
        tmp_path,
        "x",
        **{**settings, "env": "tests.flow.taught:Hinted"},
        rollout_batch_size=64,
        **teacher,
    )
    before, after = (result.reports[at]["sampled"].mean for at in ("after warm start", "after RL"))
    assert before < 0.5
    assert after > 0.8
    rows = [row["train/opd_kl"] for row in metrics_of(result.folder) if "train/opd_kl" in row]
    assert rows[0] > 0.05
    assert rows[-1] < rows[0] / 2


def privileged_in(folder):
    """By journalled trajectory: whether its first turn has a privileged prompt, and whether later ones do."""
    trajectories = [
        trajectory
        for entry in journal_of(folder, "step_*")
        for trajectory in entry["episode"]["trajectories"]
    ]
    has = [[bool(turn["tokens"].get("privileged_ids")) for turn in one["turns"]] for one in trajectories]
    return {(turns[0], any(turns[1:])) for turns in has}


@pytest.mark.parametrize("world", ["Talkative", "Forgetful"])
def test_a_journal_is_trained_on_again_with_the_prompts_of_its_teacher(tmp_path, world):
    settings = {**SMALL, **SELF, "opd_only": False}
    played = train(world, tmp_path, "played", **settings)
    assert privileged_in(played.folder) == {(True, False)}
    assert reconcile(played.folder).problems == ()
    acting = {name: value for name, value in settings.items() if name not in CONTEXT}
    again = replay_of(played.folder, world, tmp_path, "again", acting)
    assert weights_of(again) == weights_of(played.folder)
    assert learned(again) == learned(played.folder)
    for row in metrics_of(played.folder):
        assert ("perf/teacher_time" in row) == ("train/opd_kl" in row)
    plain = train(world, tmp_path, "plain", **SMALL)
    with pytest.raises(ConfigError, match="was played without one"):
        replay_of(plain.folder, world, tmp_path, "refused", acting)


def test_a_run_that_broke_off_goes_on_with_its_teacher(tmp_path):
    Struck.at = None
    settings = {**SMALL, **MOVING, "opd_only": False}
    whole = train("Struck", tmp_path / "whole", "x", **settings).folder
    Struck.at, Struck.resets = 21, 0
    with pytest.raises(UserError, match="struck"):
        train("Struck", tmp_path, "x", **settings)
    Struck.at = None
    same(agentrl.train(tmp_path / "x", quiet=True).folder, whole)


def test_a_privileged_text_that_leaves_no_room_ends_the_run_with_a_sentence(tmp_path):
    context = {"privileged_context_path": "tests.flow.taught:the_story_of_my_life"}
    with pytest.raises(UserError, match="its privileged prompt, and a row may have 64; shorten what"):
        train("Talkative", tmp_path, "x", **{**SMALL, **SELF, **context, "max_tokens_per_gpu": 64})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"use_opd": True, "opd_teacher": "self"}, "name a function that returns it"),
        ({**SELF, "privileged_context_path": "tests.flow.worlds:drop_all"}, "fails when it is tried out"),
        ({"use_opd": True, "opd_teacher_url": "nowhere"}, "nowhere"),
        ({"use_opd": True, "opd_teacher_url": "http://127.0.0.1:9"}, "cannot be reached"),
        (
            {"use_opd": True, "opd_teacher_url": "http://127.0.0.1:9", "rollout_temperature": 0.5},
            "servers give logprobs of prompts at temperature 1",
        ),
        (
            {"use_opd": True, "opd_teacher_url": "http://127.0.0.1:9", "rollout_top_k": 5},
            "servers give logprobs of all tokens, and replay_sampling_mask renormalises",
        ),
    ],
)
def test_a_teacher_that_cannot_score_is_refused_before_anything_is_played(tmp_path, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        train("Bandit", tmp_path, "x", **{**SMALL, **settings})
    assert not (tmp_path / "x" / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of a run, which others begin with."""
    return train("Talkative", tmp_path_factory.mktemp("model"), "x", **{**SMALL, "num_rollout": 1}).folder


class Teaching(Served):
    """`agentrl serve` over the checkpoint of a run, started by a test that is not asynchronous."""

    def __init__(self, folder, model):
        super().__init__(folder)
        self.model = model

    def up(self):
        command = [sys.executable, "-m", "agentrl.cli", "serve", str(self.model), "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            with suppress(httpx2.TransportError):
                if httpx2.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError("the server did not start")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.mark.faults
def test_a_served_teacher_is_the_loaded_one_and_a_run_outlives_it(tmp_path, model, monkeypatch):
    checkpoint = model / "checkpoint"
    settings = {**SMALL, **ALONE, "seed": 1, "use_rollout_logprobs": False}
    teacher = Teaching(tmp_path, checkpoint)
    served = {**settings, "opd_teacher_url": teacher.url, "opd_teacher_timeout_s": 2.0}
    loaded = train("Talkative", tmp_path, "loaded", **settings, opd_teacher_load=str(checkpoint))
    teacher.up()
    try:
        whole = train("Talkative", tmp_path / "whole", "x", **served)
        for ours, theirs in zip(metrics_of(whole.folder), metrics_of(loaded.folder), strict=True):
            if "train/opd_kl" in ours:
                assert ours["train/opd_kl"] == pytest.approx(theirs["train/opd_kl"], abs=1e-4)
        monkeypatch.setattr(Talkative, "reset", _killing(Talkative.reset, 17, teacher.kill))
        with pytest.raises(TeacherError, match="opd_teacher_timeout_s") as caught:
            train("Talkative", tmp_path, "x", **served)
        assert "then resume the run" in str(caught.value)
        monkeypatch.undo()
        with pytest.raises(TeacherError, match="cannot be reached"):
            agentrl.train(tmp_path / "x", quiet=True)
        teacher.up()
        again = agentrl.train(tmp_path / "x", quiet=True).folder
    finally:
        teacher.kill()
    assert reconcile(again).problems == ()
    ours, theirs = (learned(folder) for folder in (again, whole.folder))
    assert len(ours) == len(theirs) == 3
    assert ours[-1]["train/opd_kl"] == pytest.approx(theirs[-1]["train/opd_kl"], abs=1e-4)


def _killing(reset, at, kill):
    """The reset of a world, which kills a server the at-th time."""
    count = itertools.count(1)

    async def counted(self, task, *, seed):
        if next(count) == at:
            kill()
        return await reset(self, task, seed=seed)

    return counted
