"""The static checks of a folder of OpenEnv: each has a planted fault, and OpenEnv's own validation agrees."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import yaml

from agentrl.cli import main
from agentrl.envs.check import check_package
from agentrl.envs.check.package.folder import read_package
from agentrl.envs.export import export_env
from agentrl.errors import ConfigError
from tests.house.source import ROOT

CLIENTS = ROOT / ".venv-clients" / "bin"
READER = ROOT / "tests/envs/openenv/scripts/report.py"
LOCKED = "RUN uv sync --frozen --no-cache"
STATIC = {
    "static.manifest": "pass",
    "static.reproducible_build": "skipped",
    "static.image_hygiene": "pass",
    "static.layout": "pass",
    "static.sbom": "skipped",
    "static.oci_labels": "pass",
    "static.resource_declaration": "pass",
    "static.timeout_ceiling": "pass",
    "static.dependency_pinning": "pass",
}
"""Of the folder below. The two that are skipped are of an image, which nothing builds."""


@pytest.fixture
def folder(tmp_path):
    """A written folder, whose image installs what a lock names."""
    export_env("Calculator-v0", {"seed": 3}, "openenv", tmp_path / "calculator")
    lines = (tmp_path / "calculator/Dockerfile").read_text().splitlines()
    lines = [LOCKED if "pip install" in line else line for line in lines]
    (tmp_path / "calculator/Dockerfile").write_text("\n".join(lines))
    return tmp_path / "calculator"


def static_of(folder):
    """The outcomes of what the files decide, and the sentences of those that fail."""
    decided = read_package(folder).decided
    return {
        name: "skipped" if faults is None else "fail" if faults else "pass"
        for name, (faults, _) in decided.items()
    }, [fault for faults, _ in decided.values() for fault in faults or ()]


def change(folder, name, old, new):
    text = (folder / name).read_text()
    assert old in text, text
    (folder / name).write_text(text.replace(old, new))


def declare(folder, path, value):
    """Declare something else; None = nothing."""
    declared = yaml.safe_load((folder / "openenv.yaml").read_text())
    place = declared
    *outer, last = path.split(".")
    for name in outer:
        place = place.setdefault(name, {})
    place[last] = value
    if value is None:
        del place[last]
    (folder / "openenv.yaml").write_text(yaml.safe_dump(declared))


def test_a_written_folder_passes_all_that_its_files_decide(folder):
    found, faults = static_of(folder)
    assert (found, faults) == (STATIC, [])
    assert read_package(folder).played == ("Calculator-v0", {"seed": 3})


@pytest.mark.parametrize(
    ("old", "new", "check", "sentence"),
    [
        (
            LOCKED,
            "RUN pip install --no-cache-dir uvicorn",
            "dependency_pinning",
            "installs uvicorn in any version",
        ),
        (LOCKED, "RUN pip install -e /here", "dependency_pinning", "installs /here as whatever is there"),
        (
            LOCKED,
            "RUN pip install a==1 'b @ git+https://127.0.0.1/b@main'",
            "dependency_pinning",
            "b@main in any version",
        ),
        (
            LOCKED,
            "RUN pip install \\\n  -r more.txt",
            "dependency_pinning",
            "more.txt has b>=2 in any version",
        ),
        (LOCKED, "RUN pip install -r here.txt", "dependency_pinning", "here.txt installs /here as whatever"),
        (LOCKED, "RUN pip install -r names.txt", "dependency_pinning", "more.txt has b>=2 in any version"),
        ("WORKDIR", "RUN pip install a==1\nWORKDIR", "image_hygiene", "keeps the cache of pip"),
        ("WORKDIR", "RUN apt-get install -y curl\nWORKDIR", "image_hygiene", "keeps the lists of apt"),
        (
            "LABEL",
            "RUN apt-get install git; rm -rf /var/lib/apt/lists/*\nLABEL",
            "image_hygiene",
            "installs git",
        ),
        ("image.version", "image.revision", "oci_labels", "no label org.opencontainers.image.version"),
        ("LABEL", "# LABEL", "oci_labels", "no label org.opencontainers.image.title"),
    ],
)
def test_what_a_dockerfile_does_wrong_fails_its_check_alone(folder, old, new, check, sentence):
    (folder / "more.txt").write_text("# names\na==1.0 ; python_version > '3'\nb >= 2\n")
    (folder / "here.txt").write_text("a==1\n-e /here\n")
    (folder / "names.txt").write_text("-r names.txt\n--requirement=more.txt\n")
    change(folder, "Dockerfile", old, new)
    found, faults = static_of(folder)
    assert found == {**STATIC, f"static.{check}": "fail"}
    assert any(sentence in fault for fault in faults), faults


def test_exact_versions_without_a_lock_prove_nothing(folder):
    exact = "RUN pip install 'a[x]==1.0' 'b @ git+https://127.0.0.1/b@" + 40 * "a" + "'"
    change(folder, "Dockerfile", LOCKED, exact)
    assert static_of(folder) == ({**STATIC, "static.dependency_pinning": "skipped"}, [])
    (folder / "Dockerfile").unlink()
    of_image = ("image_hygiene", "oci_labels", "dependency_pinning")
    assert static_of(folder)[0] == STATIC | {f"static.{name}": "skipped" for name in of_image}


def test_an_archive_fails_the_layout(folder):
    (folder / "data").mkdir()
    (folder / "data/tasks.tar.gz").write_bytes(b"x")
    assert static_of(folder)[0] == {**STATIC, "static.layout": "fail"}


DECLARATIONS = {
    "validation.reward.floor_margin": (0.05, None, 0.5, -1),
    "validation.reward.oracle_tolerance": (0.2, "much"),
    "validation.reward.range": ([1, 0], [0, 1], [0]),
    "validation.reward.more": (1,),
    "validation.reward.variance_tolerance": (0.1, 0.3),
    "validation.resources.episode_timeout_s": (3601, 0, 3600),
    "validation.resources.gpu_types": (["h200"],),
    "validation.resources": (None,),
    "validation.network": ({"mode": "allowlist"}, {"mode": "no-network"}, {"allowed_hosts": ["a"]}),
    "validation.capabilities.oracle": (
        {"form": "injected_state", "location": "x"},
        {"form": "script", "location": "x"},
    ),
    "validation.capabilities.verifier": ({"kind": "script"}, {"kind": "script", "entry": "x"}),
    "validation.capabilities.llm_judged": (True,),
    "validation.judge": ({"model": "m", "version": "1"},),
    "validation.types.tags": ([], [""], ["swe"]),
    "validation.task_distribution": ({"generator_seed": 3}, {"seed": 3}),
    "validation.execution": ({}, {"dockerfile": "../Dockerfile"}, {"requires_credentials": True}),
    "validation.unknown": (3,),
    "validation": (None, 3),
    "name": (None,),
    "version": (1, "1.0"),
}
CHANGES = [(path, value) for path, values in DECLARATIONS.items() for value in values]


def test_a_manifest_that_is_none_or_out_of_bounds_fails(folder):
    declare(folder, "validation.resources.episode_timeout_s", 7200)
    found, faults = static_of(folder)
    assert found == {**STATIC, "static.manifest": "fail", "static.timeout_ceiling": "fail"}
    assert set(faults) == {"episode_timeout_s is 7200, at most 3600 allowed."}
    declare(folder, "validation.resources", None)
    found, faults = static_of(folder)
    assert found["static.manifest"] == "fail"
    assert not {"static.timeout_ceiling", "static.resource_declaration"} & set(found)
    assert faults == ["resources: Field required."]
    (folder / "openenv.yaml").write_text("a: &a [1]\nb: *a\n")
    assert static_of(folder)[1] == [
        "openenv.yaml has an alias (*), or is nested too deep; write plain values."
    ]
    (folder / "openenv.yaml").write_text("a: [")
    assert static_of(folder)[1][0].startswith("openenv.yaml is no YAML: ")


@pytest.mark.full
def test_openenv_says_the_same_of_every_manifest_and_reads_the_report(folder, tmp_path):
    """Its own command, on the same folder with one declaration changed at a time."""
    assert CLIENTS.exists(), "make .venv-clients/.installed makes the environment of OpenEnv"
    written = (folder / "openenv.yaml").read_text()
    script = "import json, pathlib, sys; from openenv.validation import run_validation; "
    script += (
        "from openenv.validation.types import Level; from openenv.validation.runner import source_digest; "
    )
    script += "f = pathlib.Path(sys.argv[1]); texts = json.load(sys.stdin); out = []\n"
    script += "for text in texts:\n (f / 'openenv.yaml').write_text(text)\n"
    script += (
        " out.append([run_validation(f, max_level=Level.STATIC).results[0].status.value, source_digest(f)])\n"
    )
    script += "print(json.dumps(out))"
    texts = [written]
    for path, value in CHANGES:
        (folder / "openenv.yaml").write_text(written)
        declare(folder, path, value)
        texts.append((folder / "openenv.yaml").read_text())
    theirs = subprocess.run(
        [CLIENTS / "python", "-c", script, folder],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    ours = []
    for text in texts:
        (folder / "openenv.yaml").write_text(text)
        package = read_package(folder)
        ours.append([static_of(folder)[0]["static.manifest"], package.digest])
    assert ours == json.loads(theirs.stdout), [
        *zip(["", *CHANGES], ours, json.loads(theirs.stdout), strict=True)
    ]
    assert {status for status, _ in ours} == {"pass", "fail"}
    (folder / "openenv.yaml").write_text(written)
    file = tmp_path / "report.json"
    report = check_package(folder, n=2)
    report.write(file)
    read = subprocess.run(
        [CLIENTS / "python", READER, file], capture_output=True, text=True, check=True, timeout=120
    )
    (found,) = json.loads(read.stdout)["reports"]
    assert found == {"errors": [], "verdict": "warn", "missing": [], "same": True}
    assert json.loads(file.read_text())["manifest"]["capabilities"]["declared_tools"] == ["calc"]


def test_what_the_folder_serves_is_played_and_another_server_is_not(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "report.json"
    main(["envs", "check", str(folder), "--n", "2", "--report", str(file)])
    printed = capsys.readouterr().out.replace("\n", "")
    assert "calculator passed: 0 errors, 0 warnings." in printed
    theirs = json.loads(file.read_text())
    status = {result["check_id"]: result["status"] for result in theirs["results"]}
    assert {status["runtime.startup"], status["semantic.oracle_max"], status["static.manifest"]} == {"pass"}
    assert theirs["manifest"]["name"] == "calculator"
    change(folder, "server/app.py", 'application("Calculator-v0", ARGUMENTS)', "other(3)")
    change(folder, "Dockerfile", "LABEL", "# LABEL")
    with pytest.raises(SystemExit) as ended:
        main(["envs", "check", str(folder)])
    assert ended.value.code == 1
    printed = capsys.readouterr().out.replace("\n", "")
    assert "fail static.oci_labels: the last stage has no label org.opencontainers.image.title" in printed
    assert "calculator failed: 0 errors, 0 warnings, 1 check of the folder failed." in printed
    report = check_package(folder)
    statuses = {
        outcome.check.id: outcome.status for outcome in report.outcomes if outcome.check.lane == "local"
    }
    assert {name: statuses[name] for name in STATIC} == {**STATIC, "static.oci_labels": "fail"}
    assert {status for name, status in statuses.items() if name not in STATIC} == {"skipped"}


@pytest.mark.parametrize(
    ("path", "value", "check", "words"),
    [
        ("capabilities.declared_tools", ["bogus"], "runtime.tool_declaration_accuracy", '["calc"]'),
        ("capabilities.declared_tools", [], "runtime.tool_declaration_accuracy", '["calc"]'),
        ("capabilities.declared_task_count", {"train": 1}, "runtime.task_declaration_accuracy", '"test": '),
        ("reward.range", [0.0, 0.5], "runtime.reward_well_formed", "has [0.0, 1.0]"),
        ("reward.range", [0.0, 9.0], "semantic.oracle_max", "the expert earns 1"),
        ("reward.floor_margin", 2.0, "semantic.floor_gap", "doing nothing earns 0"),
    ],
)
def test_a_declaration_that_the_environment_does_not_keep_fails_its_check_alone(
    folder, path, value, check, words
):
    """What it has is known: a tool, its splits, rewards of 0 and 1."""
    declare(folder, f"validation.{path}", value)
    report = check_package(folder, n=2)
    assert not report.ok
    (failed,) = [outcome for outcome in report.outcomes if outcome.status == "fail"]
    assert (failed.check.id, failed in report.of_package) == (check, True)
    assert words in failed.evidence[0]


def test_what_is_no_package_is_one_sentence(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"tmp.* has no openenv.yaml; name an environment"):
        read_package(tmp_path)
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="link is a link or no file"):
        read_package(folder)
    (folder / "link").unlink()
    with (folder / "hole").open("wb") as hole:
        hole.truncate(2 << 30)
    with pytest.raises(ConfigError, match="has more than 1 GiB"):
        read_package(folder)
    (folder / "hole").unlink()
    (folder / "openenv.yaml").write_text("a" * (1 << 21))
    with pytest.raises(ConfigError, match=r"openenv\.yaml cannot be read"):
        read_package(folder)


def test_files_that_attack_their_reader_are_faults(folder):
    deep = 200_000 * "["
    (folder / "server/app.py").write_text(f"app = application({deep}")
    (folder / os.fsdecode(b"\xff")).write_text("a name that is no text")
    assert read_package(folder).played is None
    (folder / "openenv.yaml").write_text(deep)
    assert static_of(folder)[0]["static.manifest"] == "fail"
