"""`agentrl envs export` writes thin packages, and says what they lose."""

from __future__ import annotations

import ast
import asyncio
import json
import shlex
import tomllib

import pytest
import yaml

from agentrl import Env, GroupReward, Limits, Task, UserError, make, register
from agentrl.cli import main
from agentrl.envs.export import FORMATS, export_env, lost_in
from agentrl.envs.scaffold import PackageOrigin
from agentrl.types import Resources

KWARGS = {"seed": 3, "max_calls": 2}


@pytest.mark.parametrize("form", FORMATS)
def test_a_package_is_a_thin_file_that_names_the_environment(form, tmp_path, capsys):
    out = tmp_path / "new"
    flags = ["--format", form, "--out", str(out), "--env-kwargs", json.dumps(KWARGS)]
    main(["envs", "export", "Calculator-v0", *flags])
    printed = capsys.readouterr().out
    assert f"Calculator-v0 is in {out} as calculator for {form}" in printed
    for sentence in lost_in(make("Calculator-v0"), form):
        assert sentence in printed
        assert sentence in next(out.rglob("README.md")).read_text()
    code = [path.read_text() for path in out.rglob("*.py") if "tests" not in path.parts]
    (text,) = [text for text in code if "from agentrl." in text]
    assert len([line for line in text.splitlines() if line.strip()]) <= 10
    assert str(KWARGS) in text
    assert '"Calculator-v0"' in text
    imported = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    assert [node.module.startswith("agentrl.envs.export.") for node in imported] == [True]


def test_the_package_of_verifiers_needs_versions_that_play_it_and_no_agentrl_by_name(tmp_path):
    export_env("Calculator-v0", {}, "verifiers", tmp_path / "new")
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["dependencies"]) == ("calculator", ["verifiers>=0.3.1,<0.5", "openai<3"])
    origin = PackageOrigin.of_this().pip_arguments()
    assert f"pip install {origin}\n" in (tmp_path / "new" / "README.md").read_text()


def test_a_row_of_nemo_gym_is_the_first_prompt_of_the_world_it_names(tmp_path):
    written = export_env("Calculator-v0", KWARGS, "nemo-gym", tmp_path / "new", rows=3)
    server = tmp_path / "new" / "resources_servers" / written.package
    env = make("Calculator-v0", **KWARGS)
    for row in map(json.loads, (server / "data" / "example.jsonl").read_text().splitlines()):
        (task,) = [task for task in env.tasks(row["split"]) if task.id == row["task"]]
        observation, _ = asyncio.run(make("Calculator-v0", **KWARGS).reset(task, seed=row["seed"]))
        asked = row["responses_create_params"]
        assert [message["content"] for message in asked["input"]] == [message.text for message in observation]
        assert [tool["name"] for tool in asked["tools"]] == ["calc"]
    config = yaml.safe_load((server / "configs" / "calculator.yaml").read_text())
    agent = config["calculator_simple_agent"]["responses_api_agents"]["simple_agent"]
    assert agent["resources_server"]["name"] in config
    assert agent["max_steps"] == env.limits.max_turns
    (data,) = agent["datasets"]
    assert (tmp_path / "new" / data["jsonl_fpath"]).exists()
    requirements = (server / "requirements.txt").read_text().splitlines()
    assert requirements[1] == " ".join(shlex.split(PackageOrigin.of_this().pip_arguments()))


class Compared(Env):
    """Has a reward that compares siblings."""

    limits = Limits(max_tokens=None)
    rewards = (GroupReward(lambda episodes: [0.0] * len(episodes), name="rank"),)

    def tasks(self, split):
        return [Task.ask("one", "Go on.")]

    async def reset(self, task, *, seed):
        return task.prompt, {}

    async def step(self, action):
        return (), 1.0, True, False, {}


@pytest.mark.parametrize(
    ("env", "form", "says", "says_not"),
    [
        (Compared(), "verifiers", "see one episode: rank", "limit of"),
        (make("Calculator-v0"), "verifiers", "is not kept: verifiers 0.3 has its own", "compare siblings"),
        (make("Calculator-v0"), "nemo-gym", "Several calls in one turn", "played by scripts"),
        (make("Wordle-v0"), "nemo-gym", "Images are left out", "Several calls"),
        (make("Wordle-v0"), "openenv", "that OpenEnv's trainer records", "Images are left out"),
        (make("Wordle-v0"), "ors", "is a call of the tool `say`", "Several calls"),
        (make("Calculator-v0"), "ors", "A message without a call ends the episode", "the tool `say`"),
    ],
)
def test_what_is_lost_is_said_where_it_applies(env, form, says, says_not):
    text = " ".join(lost_in(env, form))
    assert says in text
    assert says_not not in text


def test_the_others_of_an_environment_of_several_agents_are_scripts(tmp_path):
    written = export_env("RockPaperScissors-v0", {}, "verifiers", tmp_path / "new")
    assert "The other agents are played by scripts." in written.lost


@pytest.fixture
def maze(tmp_path, monkeypatch):
    """What pip calls My.Maze: a module and its class of one name, and a class named as Python's json."""
    folder = tmp_path / "site"
    for name, class_name in (("my_maze", "MyMaze"), ("worlds", "Json")):
        (folder / name).mkdir(parents=True)
        source = f"from tests.envs.export.test_package import Compared\nclass {class_name}(Compared): pass\n"
        (folder / name / "__init__.py").write_text(source)
    (folder / "My.Maze-1.0.dist-info").mkdir()
    (folder / "My.Maze-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: My.Maze\nVersion: 1.0\n"
    )
    (folder / "My.Maze-1.0.dist-info/top_level.txt").write_text("my_maze\nworlds\n")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.usefixtures("maze")
@pytest.mark.parametrize("form", FORMATS)
def test_no_package_hides_the_one_of_its_environment_which_its_readme_names(form, tmp_path):
    for env_id in ("my_maze:MyMaze", "worlds:Json"):
        out = tmp_path / env_id
        export_env(env_id, {}, form, out)
        if (out / "pyproject.toml").exists():
            declared = tomllib.loads((out / "pyproject.toml").read_text())
            built = declared["tool"]["setuptools"]
            modules = {*built.get("py-modules", ()), *built.get("packages", ())}
            tops = {module.partition(".")[0] for module in modules}
            assert not tops & {"my_maze", "json"}
            assert declared["project"]["name"] not in ("my-maze", "json")
            assert tops <= {f"my_maze_{form}", f"json_{form}"}
        assert "My.Maze" in next(out.rglob("README.md")).read_text()
    export_env("Calculator-v0", {}, form, tmp_path / "ours")
    assert "the package of the environment" not in next((tmp_path / "ours").rglob("README.md")).read_text()


def test_the_command_for_more_rows_works_as_it_is_written(tmp_path, monkeypatch):
    export_env("Calculator-v0", KWARGS, "nemo-gym", tmp_path / "new")
    lines = next((tmp_path / "new").rglob("README.md")).read_text().splitlines()
    (command,) = [line for line in lines if line.startswith("agentrl ")]
    monkeypatch.chdir(tmp_path)
    main(shlex.split(command)[1:])
    rows = next((tmp_path / "more").rglob("example.jsonl")).read_text().splitlines()
    assert len(rows) == min(1000, len(make("Calculator-v0", **KWARGS).tasks("train")))


ORIGINS = {
    "from an index": PackageOrigin(None, "1.0"),
    "from https://127.0.0.1/agentrl.git": PackageOrigin(
        {"url": "https://127.0.0.1/agentrl.git", "vcs_info": {"vcs": "git", "commit_id": "a" * 40}}
    ),
    "which no image has": PackageOrigin({"url": "file:///here", "dir_info": {"editable": True}}),
}


@pytest.mark.parametrize("form", ["openenv", "ors"])
@pytest.mark.parametrize("words", ORIGINS)
def test_a_readme_says_where_its_dockerfile_takes_agentrl_from(form, words, tmp_path, monkeypatch):
    monkeypatch.setattr(PackageOrigin, "of_this", lambda: ORIGINS[words])
    export_env("Calculator-v0", {}, form, tmp_path / "new")
    text = (tmp_path / "new/README.md").read_text()
    assert [each for each in ORIGINS if each in text] == [words]


class Priced(Compared):
    """Its expert earns more than 1, chance less than nothing, and it counts its memory."""

    expert_score = 2.5
    chance_score = -0.5
    resources = Resources(num_cpus=2.0, memory_gb=3.0)


def test_openenv_is_told_of_the_rewards_and_the_machine_that_the_class_declares(tmp_path):
    register("Priced-v0", Priced)
    export_env("Priced-v0", {}, "openenv", tmp_path / "new")
    declared = yaml.safe_load((tmp_path / "new/openenv.yaml").read_text())["validation"]
    assert declared["reward"]["range"] == [-0.5, 2.5]
    assert (declared["resources"]["cpu"], declared["resources"]["memory_mb"]) == (2.0, 3000)


def test_what_cannot_be_exported_leaves_no_folder(tmp_path):
    register("Compared-v0", Compared)
    for env_id, kwargs, form, sentence in (
        ("Compared-v0", {}, "verifier", "Did you mean `verifiers`"),
        ("Compared-v0", {"api_key": "sesame"}, "verifiers", "the secret `api_key`"),
        ("Compared-v0", {"size": 3}, "verifiers", "no argument `size`"),
        ("SingleTurn-v0", {}, "nemo-gym", "no tasks of its own"),
    ):
        with pytest.raises(UserError, match=sentence):
            export_env(env_id, kwargs, form, tmp_path / "new")
        assert not (tmp_path / "new").exists()
