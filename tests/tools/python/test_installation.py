"""The sandbox mounts only the own files of installed packages."""

from __future__ import annotations

import pytest

from agentrl.errors import UserError
from agentrl.tools.python import installation


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution: its files are created, and listed in RECORD as written."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, files=(), requires=(), record=True, origin=""):
        about = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        about.mkdir()
        needed = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}")
        if origin:
            (about / "direct_url.json").write_text(origin)
        for file in files:
            if not file.startswith(("/", "..")):
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / file).touch()
        if record:
            lines = [*files, f"{about.name}/METADATA"]
            (about / "RECORD").write_text("".join(f"{line},,\n" for line in lines))

    return make


def mounted(*packages: str) -> set[str]:
    """The paths of these packages inside the sandbox, without their metadata."""
    inside = [path for _, path in installation.plan(packages, ())["mounts"]]
    names = {path.removeprefix("/packages/") for path in inside if path.startswith("/packages/")}
    return {name for name in names if ".dist-info" not in name}


def test_packages_modules_and_compiled_modules_are_mounted(install):
    install(
        "zz-several", ["zz_pack/__init__.py", "zz_pack/in/x.py", "zz_one.py", "_zz.so", "zz.libs/libz.so"]
    )
    assert mounted("zz-several") == {"zz_pack", "zz_one.py", "_zz.so", "zz.libs"}


def test_of_a_shared_folder_only_the_files_of_the_distribution_are_mounted(install):
    install("zz-one", ["zzspace/one/__init__.py", "zzspace/alone.py", "zzspace/deep/a/__init__.py"])
    install("zz-two", ["zzspace/two/__init__.py", "zzspace/deep/b/__init__.py"])
    assert mounted("zz-one") == {"zzspace/one", "zzspace/alone.py", "zzspace/deep/a"}
    assert mounted("zz-two") == {"zzspace/two", "zzspace/deep/b"}


def test_files_outside_of_the_folder_of_packages_are_never_mounted(install):
    install("zz-far", ["/etc/passwd", "../../../bin/zz", "zz_far/../../x.py", "zz_far.py", "zz.pth"])
    assert mounted("zz-far") == {"zz_far.py"}


def test_requirements_of_extras_are_not_mounted(install):
    install("zz-base", ["zz_base.py"])
    install("zz-extra", ["zz_extra.py"])
    lines = ["zz-base>=1", "zz-extra; extra=='all'", 'zz-extra ; (python_version > "3") and extra == "all"']
    install("zz-top", ["zz_top.py"], requires=lines)
    assert mounted("zz-top") == {"zz_top.py", "zz_base.py"}


@pytest.mark.parametrize(
    "how", [{"record": False}, {"origin": '{"url":"file:///x","dir_info":{"editable":true}}'}]
)
def test_a_package_without_a_list_of_its_files_is_refused_with_an_explanation(install, how):
    install("zz-here", ["zz_here.py"], **how)
    with pytest.raises(UserError, match="which files belong to the package `zz-here`; install it as a wheel"):
        mounted("zz-here")


def test_agentrl_with_its_tasks_and_rewards_is_never_mounted(install):
    install("zz-env", ["zz_env.py"], requires=["AgentRL>=0.1"])
    assert mounted("zz-env") == {"zz_env.py"}
    with pytest.raises(UserError, match="shows no model `agentrl` itself"):
        mounted("agentrl")
