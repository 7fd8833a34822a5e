"""The connection of this process to a Ray cluster: one of its own, or one that runs already.

A Ray of its own listens on the loopback address and admits only who has its token, which is in the
environment of its processes. It ends with the run; the kernel ends it where this process is killed.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import secrets
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.processes.config import ClusterConfig
from agentrl.processes.ray.draining import Draining
from agentrl.processes.ray.folder import FOLDERS
from agentrl.processes.ray.head import LOOPBACK, own_head
from agentrl.processes.ray.listening import clusters_of, processes_of_this_user
from agentrl.runtime.extras import require

_OF_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for the process of `ray job submit`, and RAY_ADDRESS with it."""
_ADDRESS = "RAY_ADDRESS"
_AUTO = "auto"
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connected process. node, host: Ray's id and the address of this process's machine.

    title: with which the names of its actors begin in the lists of Ray. dashboard: the address of that of
    Ray; None = it has none. is_own: the cluster was started for this run, and can get no further machines.
    environment: the variables that the run's processes get beyond those of their machine. draining: the
    machines that are going away.
    """

    node: str
    host: str
    namespace: str
    is_own: bool
    environment: Mapping[str, str] = field(repr=False)
    title: str = "agentrl"
    dashboard: str | None = None
    draining: Draining = field(default_factory=Draining, repr=False)
    _named: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def notice(self) -> str | None:
        """A line that says where the run is shown; None = nowhere."""
        if self.dashboard is None:
            return None
        return f"Dashboard of Ray: {self.dashboard}, where all is named `{self.title}`"

    def new_name(self, part: str) -> str:
        """The name of a part of the run in the lists of Ray; a part that starts again has another one."""
        self._named[part] += 1
        name, number = f"{self.title} {part}", self._named[part]
        return name if number == 1 else f"{name}, start {number}"

    def nodes(self) -> list[Mapping[str, float]]:
        """The resources of each machine that is alive."""
        import ray

        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]

    @property
    def has_gpus(self) -> bool:
        """Whether any machine has a GPU."""
        return any(node.get("GPU", 0) > 0 for node in self.nodes())


@contextmanager
def connected(
    config: ClusterConfig, folder: Path, environment: Mapping[str, str], metadata: Mapping[str, str] = {}
) -> Iterator[RaySession]:
    """A connection for the block; a Ray of the run's own is started before and ended after it.

    folder: of the run; the logs of a Ray of its own are below it. environment: of this process. metadata: of
    the job that Ray lists.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: nothing answers at the address; a Ray of its own did not start; see `passed_variables`.
    """
    address = cluster_address(config, environment)
    passed = passed_variables(config, environment)
    namespace, title = f"agentrl-{secrets.token_hex(8)}", f"agentrl {folder.absolute().name}"
    start = _own(folder, namespace, metadata) if address is None else _attached(address, namespace, metadata)
    with start as dashboard:
        import ray

        context = ray.get_runtime_context()
        host: str = ray.util.get_node_ip_address()
        node, is_own = context.get_node_id(), address is None
        session = RaySession(node, host, namespace, is_own, passed, title, dashboard)
        with nullcontext() if session.is_own else session.draining.followed():
            yield session


def cluster_address(config: ClusterConfig, environment: Mapping[str, str]) -> str | None:
    """The cluster to attach to; None = the run starts a Ray of its own.

    RAY_ADDRESS counts only where `ray job submit` has set it: elsewhere it may be of another user's cluster.
    """
    if config.ray_address is not None:
        return config.ray_address
    return environment.get(_ADDRESS, _AUTO) if is_job(environment) else None


def is_job(environment: Mapping[str, str]) -> bool:
    """Whether this process was started by `ray job submit`."""
    try:
        job = json.loads(environment.get(_OF_JOB, "{}"))
    except ValueError:
        return False
    metadata = job.get("metadata") if isinstance(job, dict) else None
    return isinstance(metadata, dict) and "job_submission_id" in metadata


def passed_variables(config: ClusterConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the run's processes get, once what can be known without a cluster is checked.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: a variable that is named is not set.
    """
    require("cluster = ray", "ray")
    names = config.ray_env_vars
    for name in names:
        if "*" not in name and name not in environment:
            raise ConfigError(f"ray_env_vars names {name}, which is not set; set it, or leave it out.")
    return {
        key: value
        for key, value in environment.items()
        if any(fnmatch.fnmatchcase(key, name) for name in names)
    }


@contextmanager
def _own(folder: Path, namespace: str, metadata: Mapping[str, str]) -> Iterator[None]:
    """A Ray on this machine alone, for the block; its logs are in `folder`/ray."""
    with own_head(folder / "ray") as head, _environment(head.variables):
        import ray

        if ray.is_initialized():
            raise ConfigError(
                "this process is connected to a Ray cluster already, and a run with cluster = ray starts one "
                "of its own; give ray_address, or call ray.shutdown() first."
            )
        if ray.util.get_node_ip_address() != LOOPBACK:
            raise ConfigError(
                "Ray was imported before the run, so it cannot stay on the loopback address; do not import "
                "ray in this process, or start a cluster and give ray_address."
            )
        try:
            with _same_handler():
                ray.init(
                    head.address,
                    namespace=namespace,
                    job_config=ray.job_config.JobConfig(metadata={**metadata}),
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=LOOPBACK,
                )
            _print_nothing()
            yield
        finally:
            ray.shutdown()


@contextmanager
def _attached(address: str, namespace: str, metadata: Mapping[str, str]) -> Iterator[str | None]:
    """A connection to a cluster that runs already, for the block; one of this process is used as it is.

    Yields the address of its dashboard; None = it has none, or this process was connected before.
    """
    _check_listening(address)
    import ray
    from ray.exceptions import AuthenticationError, RayError

    if ray.is_initialized():
        yield None
        return
    if address == _AUTO:
        _check_listening(address := _of_this_user())
    try:
        _check_admitted(address)
        with _same_handler():
            context = ray.init(
                address,
                namespace=namespace,
                job_config=ray.job_config.JobConfig(metadata={**metadata}),
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except AuthenticationError as error:
        # Its text goes on with a long advice of Ray's own.
        raise ConfigError(
            f"the Ray cluster asks for a token that is not set here, at ray_address = {address} "
            f"({str(error).partition('. ')[0]}); set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN, or leave "
            "ray_address out."
        ) from error
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise _no_answer(address, error) from error
    dashboard = context.dashboard_url
    _print_nothing()
    try:
        yield None if not dashboard else dashboard if "://" in dashboard else f"http://{dashboard}"
    finally:
        ray.shutdown()


def _of_this_user() -> str:
    """The address of the cluster of which this user runs a part on this machine.

    Ray's own search would find those of other users, too, and takes an address from a file that anyone can
    write.

    Raises:
        ConfigError: there is none, or there are several.
    """
    found = sorted(clusters_of(processes_of_this_user(), besides=FOLDERS))
    if not found:
        raise _no_answer(_AUTO, ConnectionError("this user runs none on this machine"))
    if len(found) > 1:
        raise ConfigError(
            f"this user runs parts of {len(found)} Ray clusters on this machine ({', '.join(found)}); give "
            "the address of one as ray_address."
        )
    return found[0]


def _check_listening(address: str) -> None:
    """Connect once: Ray itself waits for minutes, without a word, where nothing answers.

    Raises:
        ConfigError: the machine does not answer, or refuses.
    """
    if (endpoint := _endpoint_of(address)) is not None:
        try:
            socket.create_connection(endpoint, _CONNECT_S).close()
        except OSError as error:
            raise _no_answer(address, error) from error


def _check_admitted(address: str) -> None:
    """Ask once: for a token that is missing or wrong, too, Ray waits for minutes.

    Raises:
        AuthenticationError: the cluster asks for a token, which is missing here or is another one.
    """
    import ray
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled

    if _endpoint_of(address) is not None:
        # Without a token that it is to send, the client ends the process.
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        vars(ray._raylet)["GcsClient"](address=address)


def _endpoint_of(address: str) -> tuple[str, int] | None:
    """The host and the port; None = `auto`, or an address of Ray's client."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and "/" not in host and port.isdigit() else None


def _no_answer(address: str, error: Exception) -> ConfigError:
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return ConfigError(
        f"no Ray cluster answers at ray_address = {address} ({first}); start one there, or leave "
        "ray_address out."
    )


def _print_nothing() -> None:
    """Keep what Ray reports of its cluster, such as the log of a node that has died, off standard output.

    It prints that whatever `log_to_driver` is, and offers no way to leave it out. Its own logs have it, too.
    """
    from ray._private import worker

    def discard(data: object, ignore_prefix: bool) -> None:
        del data, ignore_prefix

    worker.print_to_stdstream = discard


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """These variables in the environment, for the block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _same_handler() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which Ray replaces: a run ends in good order on that signal."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
