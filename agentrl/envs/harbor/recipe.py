"""How the environment of a task is made without an image; and what in its Dockerfile cannot be.

A base image is taken for what this machine has. Files are copied and commands are run in the shell's folder,
into which /app and the like lead. What installs something is not run: the programs and packages are here, or
the task is refused.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.utils import canonicalize_name

from agentrl.envs.harbor.dockerfile import Instruction, commands, instructions
from agentrl.envs.harbor.folder import Files, TaskFile, TaskFolder
from agentrl.envs.harbor.packages import Found, Sources, programs_of, requirement
from agentrl.tools.python.installation import interpreter, program_path
from agentrl.tools.shell import PROGRAMS

ROOT = "/tmp/work"
"""The folder of a shell: in it are the folders of the task, such as app, tests and logs."""
OWN_PLACES = ("/app", "/tests", "/logs", "/solution")
_STAGE = ".build"
_BASE = re.compile(
    r"(?:docker\.io/)?(?:library/)?(?:ubuntu|debian|bash|python|ghcr\.io/laude-institute/t-bench/[\w.-]+)"
    r"(?::[\w.-]+)?(?:@sha256:\w+)?"
)
_PYTHON = re.compile(r"python[:-](\d+)[.-](\d+)")
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "packages", "proc", "sbin"}
_SYSTEM |= {"sys", "usr", "wheels"}
"""Folders that a task cannot write: programs read some of them before anything of their own runs."""
_PYTHON_TOP = interpreter().split("/")[1]
"""The folder of this machine's Python, which the sandbox shows in its own place."""
_HARMLESS = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL")
"""CMD as well: Harbor starts a container with a command that waits."""
_BUILTINS = {
    *(".", ":", "[", "[[", "}", ")", "alias", "break", "case", "cd", "continue", "declare", "done"),
    *("echo", "elif", "else", "esac", "eval", "exit", "export", "false", "fi", "for", "function", "hash"),
    *("in", "let", "local", "popd", "printf", "pushd", "pwd", "read", "return", "select", "set", "shift"),
    *("source", "test", "time", "trap", "true", "type", "ulimit", "umask", "unset", "until", "wait", "while"),
}
_PATH = re.compile(r"(?<![\w.$}~/:*)])/[A-Za-z0-9_][\w./-]*")
_SHOWN = ("/bin/bash", "/bin/sh", "/usr/bin/bash", "/usr/bin/env", "/usr/bin/python3", "/bin/true")
"""Files of the system that a command may name, since the sandbox has them."""
_INSTALLERS = ("apt", "apt-get", "pip", "pip3", "uv")
_TESTERS = ("pytest", "pytest-json-ctrf")
"""What the test script of Harbor's template brings along. Its report is not needed."""
_ABSENT = {
    "apk",
    "brew",
    "cargo",
    "cmake",
    "conda",
    "curl",
    "docker",
    "dotnet",
    "dpkg",
    "g++",
    "gcc",
    "go",
    "java",
}
_ABSENT |= {"javac", "make", "mvn", "node", "npm", "npx", "nginx", "psql", "ruby", "rustc", "service", "ssh"}
_ABSENT |= {"systemctl", "wget", "yarn", "yum"}
"""Programs that a script may start and no sandbox has: scripts are read by sight, and hold all words."""


@dataclass
class Recipe:
    """What the environment of a task is made of. refused: what cannot be done, in a few words each.

    variables: of every command. files: below the shell's folder. steps: commands that make the rest.
    places: top folders, such as /app. programs: besides those of every shell.
    """

    workdir: str = "/app"
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    places: set[str] = field(default_factory=lambda: set(OWN_PLACES))
    programs: set[str] = field(default_factory=set)
    found: Found = field(default_factory=Found)
    refused: list[str] = field(default_factory=list)

    @property
    def prepare(self) -> str:
        """The command that makes it of the files."""
        # As few processes as can be: this is what an episode waits for first.
        places = [f"{ROOT}{place}" for place in sorted(self.places)]
        stubs = [f"{name}() {{ :; }}" for name in _INSTALLERS if name != "apt-get"]
        functions = ["shopt -s expand_aliases 2> /dev/null", "alias apt-get=:", *stubs]
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        begin = ["set -e", f"mkdir -p {' '.join(places)}", *functions, *exports, f"cd {ROOT}/app"]
        return "\n".join([*begin, *self.steps, *([f"rm -rf {ROOT}/{_STAGE}"] if self.files else [])])

    def refuse(self, what: str) -> None:
        """Note what cannot be done, once."""
        if what not in self.refused:
            self.refused.append(what)

    def placed(self, path: str, what: str) -> str:
        """An absolute path in the task that can be written; else it is refused."""
        whole = posixpath.normpath(posixpath.join(self.workdir, path))
        top = whole.split("/")[1]
        if not top or top in _SYSTEM or "$" in path or top == _PYTHON_TOP:
            self.refuse(f"{what} (a task cannot write there)")
        elif top != "tmp":
            self.places.add(f"/{top}")
        return whole

    def add(self, found: Found) -> None:
        """Packages that it needs."""
        self.found = Found(self.found.installed | found.installed, self.found.wheels | found.wheels)


def recipe_of(task: TaskFolder, sources: Sources) -> Recipe:
    """How the environment of a task is made here.

    Raises:
        DataError: the mirror cannot be read.
    """
    recipe = Recipe()
    _check_settings(task, recipe)
    dockerfile = task.environment.get("Dockerfile")
    if dockerfile is not None:
        _Builder(task.environment, recipe, sources).build(instructions(dockerfile.text))
    recipe.variables |= task.settings.environment.env
    if task.settings.environment.workdir not in (None, recipe.workdir):
        recipe.refuse("environment.workdir, another one than the Dockerfile's")
    _check_scripts(task, recipe, sources)
    return recipe


def _check_settings(task: TaskFolder, recipe: Recipe) -> None:
    settings = task.settings
    environment = settings.environment
    checks: Mapping[str, bool] = {
        "environment.gpus": environment.gpus > 0,
        "environment.mcp_servers": bool(environment.mcp_servers),
        "environment.healthcheck": environment.healthcheck is not None,
        "environment.os": environment.os != "linux",
        "environment.tpu": environment.tpu is not None,
        "steps": bool(settings.steps),
        "verifier.environment_mode": settings.verifier.environment_mode != "shared",
        "verifier.environment": settings.verifier.environment is not None,
        "verifier.collect": bool(settings.verifier.collect),
        "environment/docker-compose.yaml": any(n.startswith("docker-compose") for n in task.environment),
        "environment/.dockerignore": ".dockerignore" in task.environment,
        # With a Dockerfile it is what was built of that.
        f"environment.docker_image = {environment.docker_image}, without a Dockerfile": (
            environment.docker_image is not None and "Dockerfile" not in task.environment
        ),
        "no environment/Dockerfile": "Dockerfile" not in task.environment,
        "no tests/test.sh": "test.sh" not in task.tests,
    }
    for what, is_there in checks.items():
        if is_there:
            recipe.refuse(what)
    for phase in ("agent", "verifier"):
        user = (settings.agent if phase == "agent" else settings.verifier).user
        if user not in (None, "root", 0, "0"):
            recipe.refuse(f"{phase}.user = {user}")
    sections = (environment.env, settings.verifier.env, settings.solution.env)
    if any("${" in value for variables in sections for value in variables.values()):
        recipe.refuse("env with ${...}, a variable of this machine")


class _Builder:
    """Follows a Dockerfile."""

    def __init__(self, context: Files, recipe: Recipe, sources: Sources) -> None:
        self._context, self._recipe, self._sources = context, recipe, sources
        self._has_base = False
        self._known: dict[str, Callable[[Instruction], None]] = {
            "FROM": self._from,
            "WORKDIR": self._workdir,
            "COPY": self._copy,
            "ADD": self._copy,
            "ENV": self._env,
            "RUN": self._run,
            "USER": self._user,
        }

    def build(self, all_of_it: Sequence[Instruction]) -> None:
        """Each instruction in turn; those that cannot be followed are refused by name."""
        for instruction in all_of_it:
            shown = f"{instruction.name} {instruction.text}".strip()[:80]
            if instruction.name in _HARMLESS:
                continue
            if instruction.is_document or instruction.name not in self._known:
                self._recipe.refuse(shown)
                continue
            try:
                self._known[instruction.name](instruction)
            except ValueError:
                self._recipe.refuse(shown)

    def _from(self, instruction: Instruction) -> None:
        image = instruction.flags()[1].split()[0] if instruction.text else ""
        if self._has_base:
            self._recipe.refuse(f"FROM {image} (a second stage)")
        elif not _BASE.fullmatch(image):
            self._recipe.refuse(f"FROM {image}")
        elif (python := _PYTHON.search(image)) and (int(python[1]), int(python[2])) > sys.version_info[:2]:
            ours = ".".join(map(str, sys.version_info[:2]))
            self._recipe.refuse(f"FROM {image} (Python here is {ours})")
        self._has_base = True

    def _workdir(self, instruction: Instruction) -> None:
        path = self._recipe.placed(instruction.text.strip("\"'"), f"WORKDIR {instruction.text}")
        self._recipe.workdir = path
        is_made = path in self._recipe.places
        self._recipe.steps += [
            *([] if is_made else [f"mkdir -p {shlex.quote(path)}"]),
            f"cd {shlex.quote(path)}",
        ]

    def _user(self, instruction: Instruction) -> None:
        if instruction.text not in ("root", "0", "0:0", "root:root"):
            self._recipe.refuse(f"USER {instruction.text}")

    def _env(self, instruction: Instruction) -> None:
        for name, value in instruction.assignments().items():
            if "$" in value or name in ("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "HOME"):
                self._recipe.refuse(f"ENV {name}={value}")
                continue
            self._recipe.variables[name] = value
            self._recipe.steps.append(f"export {name}={shlex.quote(value)}")

    def _copy(self, instruction: Instruction) -> None:
        shown = f"{instruction.name} {instruction.text}"
        flags = instruction.flags()[0]
        *sources, target = instruction.words()
        is_root = flags.pop("chown", "root").split(":")[0] in ("root", "0")
        mode = flags.pop("chmod", "")
        if flags or not sources or not is_root or any("://" in source for source in sources):
            self._recipe.refuse(shown)
            return
        if instruction.name == "ADD" and any(
            re.search(r"\.(tar|tgz|tar\.\w+)$", source) for source in sources
        ):
            self._recipe.refuse(f"{shown} (an archive)")
            return
        place = self._recipe.placed(target, shown)
        into = target.endswith("/") or place == self._recipe.workdir or len(sources) > 1
        files = self._sources_of(sources, "" if into else posixpath.basename(place))
        if not files:
            self._recipe.refuse(f"{shown} (environment/ has no such file)")
            return
        is_folder = into or any(path != posixpath.basename(place) for path in files)
        self._stage(files, place if is_folder else posixpath.dirname(place), mode)

    def _sources_of(self, sources: Sequence[str], name: str) -> dict[str, TaskFile]:
        """Files by their paths below the target. name: that of a single file in the target's own place."""
        chosen: dict[str, TaskFile] = {}
        for source in sources:
            wanted = posixpath.normpath(source.lstrip("/") or ".")
            for path, contents in self._context.items():
                if wanted == "." or path.startswith(f"{wanted}/"):
                    chosen[path if wanted == "." else path[len(wanted) + 1 :]] = contents
                elif path == wanted or ("/" not in path and fnmatch.fnmatchcase(path, wanted)):
                    chosen[name if name and path == wanted else posixpath.basename(path)] = contents
        return chosen

    def _stage(self, files: Mapping[str, TaskFile], target: str, mode: str) -> None:
        """Put files aside, and copy them when it is their turn."""
        stage = f"{_STAGE}/{len(self._recipe.steps)}"
        self._recipe.files |= {f"{stage}/{path}": contents.data for path, contents in files.items()}
        runnable = [path for path, contents in files.items() if contents.is_executable]
        steps = [] if target == self._recipe.workdir else [f"mkdir -p {shlex.quote(target)}"]
        if runnable:
            steps.append(f"chmod +x {shlex.join(f'{ROOT}/{stage}/{path}' for path in runnable)}")
        if mode:
            steps.append(f"chmod -R {shlex.quote(mode)} {ROOT}/{stage}/*")
        self._recipe.steps += [*steps, f"cp -R {ROOT}/{stage}/. {shlex.quote(target)}/"]

    def _run(self, instruction: Instruction) -> None:
        command = instruction.command()
        if instruction.flags()[0]:
            self._recipe.refuse(f"RUN {instruction.text[:60]} (with a mount)")
        installs = _Installs(self._recipe, self._sources, "RUN")
        for words in commands(command):
            if words[0] in _INSTALLERS:
                installs.check(words)
            elif not _is_there(words[0], self._recipe.programs):
                self._recipe.refuse(f"RUN {words[0]}")
            elif words[0].startswith("python") and words[1:3] in (["-m", "pip"], ["-m", "venv"]):
                self._recipe.refuse(f"RUN {' '.join(words[:3])}")
        for path in _PATH.findall(command):
            if path not in _SHOWN and not path.startswith(("/dev/", "/var/lib/apt", "/var/cache/apt")):
                self._recipe.placed(path, f"RUN with {path}")
        self._recipe.steps.append(command)


def _is_there(word: str, programs: set[str]) -> bool:
    known = word in _BUILTINS or word in programs or word in ("python", "python3") or "/" in word
    return known or (word in PROGRAMS and program_path(word) is not None)


class _Installs:
    """Checks that what a command would install is here. where: it stands, for the sentence."""

    def __init__(self, recipe: Recipe, sources: Sources, where: str) -> None:
        self._recipe, self._sources, self._where = recipe, sources, where

    def check(self, words: Sequence[str]) -> None:
        """A command of a package manager."""
        rest = [word for word in words if word]
        if rest[0] in ("apt", "apt-get"):
            self._system(rest)
        elif rest[:2] == ["uv", "pip"]:
            self._python(rest[1:])
        elif rest[0] in ("pip", "pip3"):
            self._python(rest)
        elif rest[:2] not in (["uv", "venv"], ["uv", "--version"]):
            self._recipe.refuse(f"{self._where} {' '.join(rest[:3])}")

    def _system(self, words: Sequence[str]) -> None:
        names = [word for word in words[1:] if not word.startswith("-")]
        if not names or names[0] != "install":
            return
        for name in names[1:]:
            programs = programs_of(name)
            if programs is None:
                self._recipe.refuse(f"{self._where} {words[0]} install {name}")
            else:
                self._recipe.programs |= set(programs)

    def _python(self, words: Sequence[str]) -> None:
        arguments = [word for word in words[1:] if not word.startswith("-")]
        if not arguments or arguments[0] != "install":
            return
        if any(word in ("-r", "--requirement", "-e", "--editable", "-c") for word in words):
            self._recipe.refuse(f"{self._where} {' '.join(words[:4])}")
            return
        for text in arguments[1:]:
            self.needs(text)

    def needs(self, text: str) -> None:
        """A package of Python, by its requirement."""
        wanted = requirement(text)
        found = None if wanted is None else self._sources.find(wanted)
        if isinstance(found, Found):
            self._recipe.add(found)
            return
        needs = "" if found in (None, wanted) else f"which needs {found}, "
        self._recipe.refuse(f"{self._where} installs {text}, {needs}which is neither here nor in the mirror")


def _check_scripts(task: TaskFolder, recipe: Recipe, sources: Sources) -> None:
    """Refuse what the scripts of a task need, and nobody has."""
    for part, files, name in (("tests", task.tests, "test.sh"), ("solution", task.solution, "solve.sh")):
        script = files.get(name)
        if script is None:
            continue
        where = f"{part}/{name}:"
        installs = _Installs(recipe, sources, where)
        for words in commands(script.text):
            if words[0] in ("uvx", "pytest") or words[:2] == ["uv", "run"] or words[1:3] == ["-m", "pytest"]:
                _needs_of_tester(words, installs)
            elif words[0] in _INSTALLERS:
                installs.check(words)
            elif words[0] in _ABSENT - recipe.programs and "astral.sh/uv" not in " ".join(words):
                recipe.refuse(f"{where} {words[0]}")


def _needs_of_tester(words: Sequence[str], installs: _Installs) -> None:
    """The packages that `uvx -w A -w B pytest` brings. pytest may have another version, and no report."""
    given = [words[place + 1] for place, word in enumerate(words[:-1]) if word in ("-w", "--with", "--from")]
    names = [name for text in given for name in text.strip("\"'").split(",")]
    for text in ("pytest", *names):
        wanted = requirement(text)
        package = canonicalize_name("" if wanted is None else wanted.name)
        name = package if package in _TESTERS else text
        if name != "pytest-json-ctrf":
            installs.needs(name)
