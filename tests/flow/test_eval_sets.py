"""Held-out sets by name: rows, metrics and journals of their own; `agentrl eval` samples the same tokens."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

import agentrl
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import HeldOutSet, eval_sets
from agentrl.cli import main
from agentrl.config import parse, read_toml
from agentrl.data.config import ColumnChoice
from agentrl.data.eval_sets import EvalSet
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from agentrl.records import reconcile
from agentrl.run.held_out import HeldOut, PlayedSet
from tests.flow.runs import SHAPE, journal_of, metrics_of, tokens_of
from tests.flow.worlds import HINT

PROMPTS = str(Path(__file__).with_name("prompts.jsonl"))
SETS = {"first": f"{PROMPTS}@[:3]", "rest_1": f"{PROMPTS}@[3:5]"}
SAMPLING = {"n_samples_per_eval_prompt": 3, "eval_top_p": 0.8, "eval_max_response_len": 5}
COMMON = {
    "rollout_max_context_len": 64,
    "input_key": "question",
    "label_key": "answer",
    "reward": "exact_match",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One iteration, with two held-out sets of three and two prompts."""
    return agentrl.train(
        **SHAPE,
        **COMMON,
        **SAMPLING,
        env="SingleTurn-v0",
        prompt_data=PROMPTS,
        eval_prompt_data=SETS,
        eval_episodes=8,
        num_rollout=1,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        rollout_top_p=0.9,
        lr_warmup_iters=0,
        inline=True,
        use_tensorboard=False,
        quiet=True,
        output_dir=str(tmp_path_factory.mktemp("runs")),
        name="sets",
    )


def test_each_set_is_played_once_in_samples_and_greedily(run):
    names = sorted(path.name for path in (run.folder / "trajectories").glob("eval_*"))
    assert len(names) == 8, "two milestones, two sets, two modes"
    entries = journal_of(run.folder, "eval_first-sampled-after-RL*")
    assert [entry["episode"]["id"] for entry in entries] == [
        f"first/e{n}{sample}" for n in range(3) for sample in ("", "-1", "-2")
    ]
    assert len({entry["episode"]["seed"] for entry in entries}) == 3
    assert len(journal_of(run.folder, "eval_rest-1-greedy-after-RL*")) == 2
    assert max(len(tokens_of(entry)[1]) for entry in entries) <= 5


def test_each_set_has_metrics_rows_and_reports_of_its_own(run):
    metrics = metrics_of(run.folder)[-1]
    for name in ("eval/first", "eval/rest_1"):
        assert {f"{name}/sampled", f"{name}/greedy", f"{name}/sampled/failures"} <= metrics.keys()
        assert {f"{name}/sampled/pass@{k}" for k in (1, 2, 3)} <= metrics.keys()
    assert "eval/sampled" not in metrics
    assert "eval/first/greedy/pass@1" not in metrics
    reports = run.reports["after RL"]
    assert (reports["first/sampled"].n, reports["rest_1/greedy"].n) == (9, 2)
    page = (run.folder / "report.html").read_text()
    assert re.findall(r'scope="rowgroup"[^>]*>(.*?)<', page) == ["first", "rest_1"]
    assert "rest_1, sampled, pass@3" in page
    milestones = json.loads((run.folder / "summary.json").read_text())["milestones"]
    assert milestones[-1]["first/sampled"]["pass_at"].keys() == {"1", "2", "3"}


def test_an_eval_only_run_of_the_same_seed_has_the_same_tokens(run, tmp_path):
    report = agentrl.evaluate(
        "SingleTurn-v0",
        str(run.folder / "checkpoint"),
        quiet=True,
        prompt_data=SETS,
        n=8,
        output_dir=str(tmp_path / "eval"),
        **COMMON,
        **SAMPLING,
    )
    assert (report.n, list(report.sets)) == (15, ["first", "rest_1"])
    for name, file in {"first": "first", "rest_1": "rest-1"}.items():
        trained = journal_of(run.folder, f"eval_{file}-sampled-after-RL*")
        alone = {
            entry["episode"]["id"]: tokens_of(entry)
            for entry in journal_of(tmp_path / "eval", f"eval_{file}*")
        }
        # An eval-only run records each episode when it has ended.
        assert alone == {entry["episode"]["id"]: tokens_of(entry) for entry in trained}, name
        assert report.sets[name].mean == run.reports["after RL"][f"{name}/sampled"].mean


def test_a_resumed_run_reads_the_evaluations_of_its_sets(run):
    again = agentrl.train(run.folder, resume=True, num_rollout=2, quiet=True)
    assert again.reports["before"]["first/sampled"] == run.reports["before"]["first/sampled"]
    assert again.reports["after RL"]["rest_1/sampled"].n == 6


def test_sets_are_written_to_the_configuration_and_read_again(run):
    config = parse(RunConfig, read_toml(run.folder / "config.toml"), source="config.toml")
    assert config.eval.eval_prompt_data == SETS


def test_rows_of_data_are_played_once_and_tasks_of_an_environment_again():
    (rows,) = eval_sets(f"{PROMPTS}@[:3]", ColumnChoice(input_key="question"), split="test", n=9).values()
    assert (rows.num_prompts("", 2), rows.num_prompts("", 9)) == (2, 3)
    assert HeldOutSet(rows.tasks).num_prompts("", 9) == 9


OWN = {
    "plain": f"{PROMPTS}@[:2]",
    "own": {
        "path": f"{PROMPTS}@[3:9]",
        "input_key": "input",
        "num_prompts": 4,
        "n_samples_per_eval_prompt": 2,
        "temperature": 0.0,
        "max_response_len": 3,
        "system_prompt": "Be brief.",
        "reward": "tests.flow.test_eval_sets:brevity",
        "custom_generate_function_path": "tests.flow.worlds:hinted",
    },
}
# A model that nothing has trained hardly ever ends its turn.
STOPS = list(range(0, 256, 2))


def brevity(_task, answer):
    """The reward of one of the sets: never 0 or 1, so that no other grader gives it."""
    return 0.5 / (1 + len(answer))


def first_observation(entry):
    return entry["episode"]["trajectories"][0]["turns"][0]["observation"]


def check_own(entries, plain):
    """Check the episodes of the set that has settings of its own against what OWN says."""
    # An eval-only run records each episode when it has ended.
    entries = sorted(entries, key=lambda entry: entry["episode"]["id"])
    assert len(entries) == 8, "num_prompts x n_samples_per_eval_prompt"
    prompts = [entry["episode"]["task"]["prompt"] for entry in entries]
    rows = [json.loads(line) for line in Path(PROMPTS).read_text().splitlines()[3:7]]
    assert prompts == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["input"]}]
        for row in rows
        for _ in range(2)
    ]
    sampled = [tokens_of(entry) for entry in entries]
    assert sampled[::2] == sampled[1::2], "temperature 0: both samples of a prompt are the likeliest tokens"
    assert max(len(tokens[1]) for tokens in sampled) <= 3
    # An answer that is cut off is not graded.
    totals = {entry["verdicts"][0]["total"] for entry in entries if entry["episode"]["ending"] == "completed"}
    assert totals
    assert all(0.0 < total <= 0.5 for total in totals)
    assert {first_observation(entry)[-1]["content"] for entry in entries} == {HINT.content}
    assert HINT.content not in {first_observation(entry)[-1]["content"] for entry in plain}
    others = [entry["verdicts"][0]["total"] for entry in plain]
    assert all(total in (0.0, 1.0) for total in others)
    assert [entry["episode"]["task"]["prompt"][0]["role"] for entry in plain] == ["user"] * len(plain)


def test_a_set_with_settings_of_its_own_is_played_by_them_in_a_run_and_alone(tmp_path):
    run = agentrl.train(
        **SHAPE,
        **COMMON,
        env="SingleTurn-v0",
        prompt_data=PROMPTS,
        eval_prompt_data=OWN,
        rollout_stop_token_ids=STOPS,
        eval_episodes=8,
        num_rollout=1,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        inline=True,
        use_tensorboard=False,
        quiet=True,
        output_dir=str(tmp_path),
        name="own",
    )
    plain = journal_of(run.folder, "eval_plain-sampled-after-RL*")
    assert len(plain) == 2
    check_own(journal_of(run.folder, "eval_own-sampled-after-RL*"), plain)
    config = parse(RunConfig, read_toml(run.folder / "config.toml"), source="config.toml")
    assert config.eval.eval_prompt_data == {"plain": OWN["plain"], "own": EvalSet(**OWN["own"])}

    folder, checkpoint = tmp_path / "eval", str(run.folder / "checkpoint")
    report = agentrl.evaluate(
        "SingleTurn-v0",
        checkpoint,
        quiet=True,
        prompt_data=OWN,
        rollout_stop_token_ids=STOPS,
        output_dir=str(folder),
        **COMMON,
    )
    check_own(journal_of(folder, "eval_own*"), journal_of(folder, "eval_plain*"))
    assert (report.sets["own"].temperature, report.sets["plain"].temperature) == (0.0, 1.0)


def test_a_file_of_slimes_names_the_same_sets(tmp_path):
    file = tmp_path / "eval.yaml"
    file.write_text(
        """eval:
  defaults: {temperature: 0.6, top_p: 0.7, n_samples_per_eval_prompt: 1}
  datasets:
    - {name: aime, path: "aime.jsonl@[:30]", rm_type: deepscaler, n_samples_per_eval_prompt: 16}
    - name: own
      path: own.jsonl
      custom_rm_path: my_rewards.graded
      input_key: question
      max_response_len: 4096
      temperature: 1.0
"""
    )
    config = parse(RunConfig, {"eval": {"eval_config": str(file)}}, source="x")
    all_ = {"temperature": 0.6, "top_p": 0.7}
    assert config.eval.eval_prompt_data == {
        "aime": EvalSet(path="aime.jsonl@[:30]", reward="deepscaler", n_samples_per_eval_prompt=16, **all_),
        "own": EvalSet(
            path="own.jsonl",
            reward="my_rewards:graded",
            input_key="question",
            max_response_len=4096,
            n_samples_per_eval_prompt=1,
            **{**all_, "temperature": 1.0},
        ),
    }
    alone = parse(EvalConfig, {"data": {"eval_config": str(file)}}, source="x")
    assert alone.data.prompt_data == config.eval.eval_prompt_data


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("eval: [", "is not a YAML file"),
        ("eval: {datasets: []}", "has no list `datasets` below `eval`"),
        ("[]", "has no list `datasets` below `eval`"),
        ("eval: {datasets: [{path: x}]}", "has no name; give every one a name"),
        ("eval: {datasets: [{name: a}]}", "the set 'a' has no path"),
        ("eval: {datasets: [{name: a, path: x}, {name: a, path: y}]}", "two sets of .* have one name"),
        ("[" * 100_000, "is not a YAML file"),
        ("eval: {datasets: [{name: a, path: x, stop: y}]}", "has `stop`, which is no setting of single sets"),
        ("!!python/object/apply:os.abort []", "is not a YAML file"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_names_none_is_one_sentence(tmp_path, text, sentence):
    file = tmp_path / "eval.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse(RunConfig, {"eval": {"eval_config": str(file)}}, source="x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        ({"a": "x.jsonl", "b": 1.0}, "'b' has no path but 1.0"),
        ({"a": {"input_key": "x"}}, "the set 'a' has no path; name its file"),
        (
            {"a": {"path": "x", "temprature": 1}},
            "'a' has no setting `temprature`. Did you mean `temperature`?",
        ),
        ({"a": {"path": "x", "top_p": 0}}, "the set 'a': `top_p` = 0 does not fit: input should be greater"),
        ({"a": {"path": "x", "reward": "judge", "reward_kwargs": {"api_key": "sk-1"}}}, "is a secret, which"),
        ({"a": {"path": "x", "reward_kwargs": {"a": 1}}}, "'a': reward_kwargs has no effect without reward"),
        ({"sampled": "x.jsonl"}, "cannot be called 'sampled'"),
        ({"a/b": "x.jsonl"}, "cannot be called 'a/b'"),
        ({"a_b": "x.jsonl", "a-b": "x.jsonl"}, "differ only in"),
        ('{"a": "x.jsonl"', "neither a path nor JSON"),
    ],
)
def test_a_set_that_is_none_is_one_sentence(sets, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(RunConfig, {"eval": {"eval_prompt_data": sets}}, source="x")
    with pytest.raises(ConfigError, match=sentence):
        parse(EvalConfig, {"data": {"eval_prompt_data": sets}}, source="x")


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (RunConfig, {"eval": {"eval_temperature": 0.0, "eval_top_p": 0.5}}),
        (EvalConfig, {"eval": {"temperature": 0.0, "eval_top_p": 0.5}}),
    ],
)
def test_a_cut_of_greedy_sampling_is_refused_by_its_name(config, values):
    with pytest.raises(ConfigError, match="eval_top_p has no effect with"):
        parse(config, values, source="x")


def test_flags_take_pairs_of_name_and_path(tmp_path, capsys):
    words = ["eval", "SingleTurn-v0", "--model", "nowhere", "--eval-prompt-data", "aime", "a.jsonl", "gpqa"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "'gpqa' has no path" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "g.jsonl", "--n", "3"])
    assert "a.jsonl" in capsys.readouterr().err, "the sets are read"


EACH = {"often": {"path": f"{PROMPTS}@[:2]", "interval": 2}, "seldom": f"{PROMPTS}@[2:4]"}
BOTH = frozenset(("often", "seldom"))
STEPS = {0: BOTH, 2: {"often"}, 3: {"seldom"}, 4: {"often"}, 6: BOTH}
"""Of six iterations, after which of them each set is played."""


def played(folder):
    """The sets that each record of an evaluation has, by step, and those in the journal."""
    rows = [row for row in metrics_of(folder) if any(name.startswith("eval/") for name in row)]
    names = {
        int(row["step"]): {name.split("/")[1] for name in row if name.startswith("eval/")} for row in rows
    }
    assert len(names) == len(rows), "no step has two"
    files = defaultdict(set)
    for path in (folder / "trajectories").glob("eval_*"):
        files[int(re.search(r"_(\d+)\.jsonl", path.name)[1])].add(path.name.split("-")[0][len("eval_") :])
    assert files == names
    return names


@pytest.mark.parametrize("beside", [False, True])
def test_a_set_is_played_at_its_own_interval_also_where_the_run_is_resumed(tmp_path, beside):
    settings = {
        **{**SHAPE, **COMMON, "env": "SingleTurn-v0", "prompt_data": PROMPTS, "eval_prompt_data": EACH},
        **{"eval_interval": 3, "eval_episodes": 2, "rollout_batch_size": 1, "n_samples_per_prompt": 2},
        **{"inline": True, "use_tensorboard": False, "quiet": True, "output_dir": str(tmp_path)},
        "metric_for_best_model": "eval/seldom/sampled",
        "save_total_limit": 1,
        "async_eval": beside,
    }
    begun = agentrl.train(**settings, num_rollout=3, name="resumed")
    assert played(begun.folder)[3] == BOTH, "what ends a run is a row of its table"
    # A run that goes on is one that never ended.
    ended = agentrl.train(begun.folder, resume=True, num_rollout=6, quiet=True).folder
    found = played(ended)
    assert found[0] == found[6] == BOTH
    if not beside:
        assert found == STEPS
    assert reconcile(ended).problems == ()
    text = (ended / "config.toml").read_text()
    assert "interval = 2" in text


def test_what_waits_is_played_with_the_sets_of_all_that_were_due():
    sets = {"a": 2, "b": 3, "c": 5}
    held_out = HeldOut(
        None,
        None,
        {name: PlayedSet(HeldOutSet(()), 1, None, 1, interval) for name, interval in sets.items()},
        "test",
        0,
    )
    expected = {(1,): "abc", (2,): "a", (4, 9): "ab", (3, 5): "bc", (30,): "abc"}
    assert {steps: "".join(held_out.due_after(*steps).sets) for steps in expected} == expected
    due = {step for step in range(1, 31) if held_out.is_due(step)}
    assert due == {n for n in range(1, 31) if any(n % interval == 0 for interval in sets.values())}


def test_an_evaluation_alone_has_no_interval(tmp_path):
    for settings in ({"prompt_data": EACH}, {"eval_prompt_data": EACH}):
        with pytest.raises(ConfigError, match="the set 'often' has an interval, which only evaluations of a"):
            agentrl.evaluate("SingleTurn-v0", str(tmp_path), **settings)
    with pytest.raises(ConfigError, match="`interval` = 0 does not fit"):
        parse(RunConfig, {"eval": {"eval_prompt_data": {"x": {"path": "x", "interval": 0}}}}, source="x")
