"""The guide lists every metric that a run logs, and no other."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import agentrl
from agentrl import Limits, SingleTurnEnv, Task
from agentrl.algorithms.off_policy import mismatch_by_depth
from agentrl.algorithms.tokens import Tokens
from agentrl.data.source import TOO_LONG
from agentrl.engine.sglang.fleet import Fleet
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.over_sampling import OVER_SAMPLED
from agentrl.run.colocation import Colocation
from agentrl.run.metrics import engine_metrics, rollout_metrics, skipped_metrics
from agentrl.trainer.config import TrainerConfig
from agentrl.types import Group, ToolStats, Verdict
from agentrl.types.statistics import SPECULATION
from agentrl.weights.hf.export import save_model
from tests.algorithms.episodes import TASK, episode, of_engine, sample, turn
from tests.docs.blocks import ROOT
from tests.flow.runs import SHAPE, metrics_of
from tests.flow.sft import conversations, settings_of, sft
from tests.flow.test_families import tokens
from tests.flow.test_routing import mixture
from tests.run.test_colocation import Calls, iterate

__all__ = ["tokens"]
GUIDE = ROOT / "docs" / "when-a-run-goes-wrong.md"
METRIC = re.compile(r"`((?:rollout|train|perf|engine|eval)/[^`]+)`")
PLACEHOLDER = re.compile(r"[A-Z]+")
OF_CARDS = {"perf/actor_train_mfu"}
# A run with SGLang and Megatron: `tests/trainer/megatron/test_ahead_trainer.py`.
OF_LAYERS_AHEAD = {"train/mtp_loss"}
SMALL = {
    **SHAPE,
    "inline": True,
    "quiet": True,
    "use_tensorboard": False,
    "num_rollout": 2,
    "rollout_batch_size": 3,
    "n_samples_per_prompt": 4,
    "eval_episodes": 4,
    "lr_warmup_iters": 0,
}
CRITIC = {
    "env": "tests.flow.worlds:Judged",
    "advantage_estimator": "ppo",
    "eps_clip_c": 3.0,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_tis": True,
    "self_normalize_correction": True,
    "gate_statistic": "k3",
    "shaping_turn_penalty": 0.01,
    "max_staleness": 1,
    "mask_offpolicy_in_partial_rollout": True,
    "dynamic_sampling_filter_path": "tests.flow.worlds:drop_even_seeds",
}
TALKATIVE = {"env": "tests.flow.worlds:Talkative"}
GRADED = {"env": "tests.docs.test_metrics_guide:Graded", "rollout_max_context_len": 64}
PROMPTS = str(ROOT / "tests" / "flow" / "prompts.jsonl")
OTHERS = {
    "a penalty in the reward, mis": {**TALKATIVE, "kl_coef": 0.1, "use_mis": True},
    "icepop": {**TALKATIVE, "use_icepop": True},
    "opsm": {**TALKATIVE, "use_opsm": True},
    "functions": {
        **{**TALKATIVE, "custom_reward_post_process_path": "tests.flow.worlds:mirrored"},
        **{"correction": "custom", "custom_tis_function_path": "tests.run.test_proximal_in_step:doubled"},
    },
    "a greedy baseline, tokens without a gradient": {
        **{**TALKATIVE, "advantage_estimator": "remax"},
        **{"entropy_control": "clip_cov", "entropy_target": 0.3},
    },
    "penalties that are adapted": {
        **{**TALKATIVE, "kl_coef": 0.1, "kl_target": 0.1},
        **{"entropy_control": "kl_cov", "ppo_epochs": 2, "advantage_estimator": "vespo"},
    },
    "uncertain tokens, a baseline by role": {
        **{**TALKATIVE, "entropy_control": "top_entropy", "advantage_estimator": "rae"},
    },
    "groups once more": {
        **{**TALKATIVE, "data_buffer_groups": 1, "data_buffer_size": 4},
        **{"correction": "tis", "num_rollout": 3},
    },
    "states": {**TALKATIVE, "advantage_estimator": "gigpo"},
    "evaluations beside training": {**TALKATIVE, "async_eval": True},
    "two agents": {"env": "RockPaperScissors-v0"},
    "named parts": GRADED,
    "samples": {**GRADED, "n_samples_per_eval_prompt": 2},
    "sets": {
        **GRADED,
        **{"prompt_data": PROMPTS, "input_key": "question", "label_key": "answer", "metadata_key": "facts"},
        **{"eval_prompt_data": {"first": f"{PROMPTS}@[:3]"}, "n_samples_per_eval_prompt": 2},
        "async_eval": True,
        "eval_interval": 1,
    },
}


class Graded(SingleTurnEnv):
    """One question, whose grade has a named part."""

    breakdown = "colour"

    def tasks(self, split):
        return [Task.ask(f"{split}{n}", f"{n}?", "x", colour="red") for n in range(8)]

    def grade(self, task, answer):
        return {"length": min(len(answer), 9) / 9}


def listed() -> list[str]:
    """The metrics in the first columns of the guide's tables of metrics."""
    tables = GUIDE.read_text(encoding="utf-8").partition("## Every metric")[2]
    rows = [line for line in tables.splitlines() if line.startswith("| `")]
    return [metric for row in rows for metric in METRIC.findall(row.split(" | ")[0])]


def pattern(metric: str) -> re.Pattern[str]:
    """A listed metric as a pattern: a word in capitals stands for any part of a name."""
    parts = [re.escape(part) for part in PLACEHOLDER.split(metric)]
    return re.compile("[^/]+".join(parts))


def unlisted(logged: Iterable[str]) -> set[str]:
    patterns = [pattern(metric) for metric in listed()]
    return {name for name in logged if not any(p.fullmatch(name) for p in patterns)}


def logged(folder: Path) -> set[str]:
    return {name for row in metrics_of(folder) for name in row} - {"step", "time_s"}


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    return agentrl.train(**SMALL, **CRITIC, output_dir=str(tmp_path_factory.mktemp("runs"))).folder


def synthetic() -> set[str]:
    """The metrics of everything that may happen to a call of a tool, and of the counts of environments."""
    files = (path for path in (ROOT / "agentrl" / "envs").rglob("*.py") if "graders" not in path.parts)
    sources = [path.read_text(encoding="utf-8") for path in files]
    counts = {name: 1 for text in sources for name in re.findall(r'counts\["([a-z_]+)"\] \+= 1', text)}
    either = re.compile(r'counts\["([a-z_]+)" if [^]]+ else "([a-z_]+)"\] \+= 1')
    counts |= {name: 1 for text in sources for pair in either.findall(text) for name in pair}
    # What a client of the gateway changes, by its kind.
    counts |= {f"{name}_x": 1 for text in sources for name in re.findall(r'f"(changed|overruled)_\{', text)}
    assert {"tool_calls", "invalid_moves", "agent_failures", "changed_x", "overruled_x"} <= counts.keys()
    stats = ToolStats(3, 1, 1, 1, 1, {"type": 1}, {}, {"30ms": 2}, 0.1)
    # Its prompt is as long as an episode may be.
    bare = replace(episode("e", [turn([1], [2])]), limits=Limits(max_tokens=1))
    played = replace(bare, counts={**counts, "chat/retries": 1}, tools={"search": stats})
    failed = replace(bare, tools={"search": ToolStats(1, failed={"crashed": 1})})
    verdict = Verdict("e", "s", 1.0, parts={"right": 1.0, "env/kind": 0.0})
    outcome = GroupOutcome(Group("g", TASK, 0, (played,), (verdict,)), (failed,), (played,), "zero_std")
    rows = [replace(TASK, id=f"data/{name}.jsonl:0") for name in ("a", "b")]
    of_files = [
        GroupOutcome(Group(row.id, row, 0, (replace(bare, task=row),), (verdict,)), (), ()) for row in rows
    ]
    left = GroupOutcome(None, (), (), OVER_SAMPLED)
    removed = {verdict.rollout_id: "too_short"}
    return {*rollout_metrics([outcome, left, *of_files], removed), *skipped_metrics({TOO_LONG: 1})}


def test_a_run_with_a_critic_a_filter_and_a_correction_logs_nothing_that_the_guide_lacks(critic):
    names = logged(critic)
    assert {"train/value_loss", "train/tis_clipfrac", "rollout/dynamic_filter/drop_even"} <= names
    assert {"train/staleness_0/ess", "train/mask_offpolicy_fraction", "rollout/staleness/queue/mean"} <= names
    assert unlisted(names) == set()


def test_what_may_happen_to_tools_and_servers_is_in_the_guide():
    assert unlisted({*synthetic(), *depths(), *engine_counts(), *asyncio.run(offloads())}) == set()


class Gpu(Calls):
    """The calls of a trainer on a GPU."""

    async def onload(self):
        return 1


async def offloads() -> set[str]:
    calls = Gpu()
    colocation = Colocation.of(TrainerConfig(colocate=True), calls, calls)
    colocation.trainer = calls
    await iterate(colocation, calls, sends=True)
    return set(colocation.take_metrics())


def depths() -> set[str]:
    samples = [sample("e", [0] + [1] * 1100)]
    tokens = Tokens.of(samples)
    return {f"train/{name}" for name in mismatch_by_depth(tokens, tokens.scores(of_engine(samples)))}


def engine_counts() -> set[str]:
    idle = SimpleNamespace(clients=SimpleNamespace(counts=Counter()), _supervisor=SimpleNamespace(restarts=0))
    drafts = dict.fromkeys(SPECULATION, 4)
    return set(engine_metrics({**Fleet.counts.fget(idle), **drafts}, {}))


def test_no_metric_is_listed_twice_and_a_new_one_is_noticed():
    assert len(listed()) == len(set(listed())) > 80
    assert unlisted({"train/new", "eval/greedy/a/b", "rollout/raw_reward"}) == {
        "train/new",
        "eval/greedy/a/b",
    }


def of_experts(tokens, folder: Path) -> set[str]:
    save_model(mixture(), tokens, str(folder / "mixture"))
    settings = {name: value for name, value in SMALL.items() if name not in SHAPE} | TALKATIVE
    settings |= {"hf_checkpoint": str(folder / "mixture"), "router_replay": "R3", "name": "experts"}
    settings |= {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, "rollout_max_context_len": 160}
    settings |= {"use_rollout_logprobs": False, "rollout_max_response_len": 12}
    return logged(agentrl.train(**settings, output_dir=str(folder)).folder)


@pytest.mark.full
def test_the_guide_lists_no_metric_that_nothing_logs(critic, tokens, tmp_path):
    names = logged(critic) | synthetic() | depths() | engine_counts() | asyncio.run(offloads())
    names |= of_experts(tokens, tmp_path) | OF_CARDS | OF_LAYERS_AHEAD
    for number, settings in enumerate(OTHERS.values()):
        run = agentrl.train(**{**SMALL, **settings}, output_dir=str(tmp_path), name=f"run{number}")
        names |= logged(run.folder)
    teacher = {**TALKATIVE, "use_opd": True, "opd_teacher_load": str(tmp_path / "run1" / "checkpoint")}
    settings = {name: value for name, value in SMALL.items() if name not in SHAPE}
    student = {"hf_checkpoint": str(tmp_path / "run1" / "checkpoint")}
    names |= logged(agentrl.train(**settings, **student, **teacher, output_dir=str(tmp_path)).folder)
    conversations(tmp_path / "c.jsonl")
    names |= logged(sft(tmp_path, **settings_of(tmp_path)).folder)
    assert unlisted(names) == set()
    missing = [metric for metric in listed() if not any(map(pattern(metric).fullmatch, names))]
    assert missing == [], missing
