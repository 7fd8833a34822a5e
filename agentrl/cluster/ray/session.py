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
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.cluster.config import ClusterConfig
from agentrl.errors import ConfigError
from agentrl.extras import require

LOOPBACK = "127.0.0.1"
_OF_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for the process of `ray job submit`, and RAY_ADDRESS with it."""
_ADDRESS = "RAY_ADDRESS"
_LOGS = "ray"


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connected process. node, host: Ray's id and the address of this process's machine.

    is_own: the cluster was started for this run, and can get no further machines. environment: the variables
    that the run's processes get beyond those of their machine.
    """

    node: str
    host: str
    namespace: str
    is_own: bool
    environment: Mapping[str, str] = field(repr=False)

    def nodes(self) -> list[Mapping[str, float]]:
        """The resources of each machine that is alive."""
        import ray

        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]

    @property
    def has_gpus(self) -> bool:
        """Whether any machine has a GPU."""
        return any(node.get("GPU", 0) > 0 for node in self.nodes())


@contextmanager
def connected(config: ClusterConfig, folder: Path, environment: Mapping[str, str]) -> Iterator[RaySession]:
    """A connection for the block; a Ray of the run's own is started before and ended after it.

    folder: of the run; the logs of a Ray of its own are below it. environment: of this process.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: nothing answers at the address; or a Ray of its own did not start.
    """
    require("cluster = ray", "ray")
    address = address_of(config, environment)
    passed = passed_on(config.ray_env_vars, environment)
    namespace = f"agentrl-{secrets.token_hex(8)}"
    start = _own(folder, namespace) if address is None else _attached(address, namespace)
    with start:
        import ray

        context = ray.get_runtime_context()
        host: str = ray.util.get_node_ip_address()
        yield RaySession(context.get_node_id(), host, namespace, address is None, passed)


def address_of(config: ClusterConfig, environment: Mapping[str, str]) -> str | None:
    """The cluster to attach to; None = the run starts a Ray of its own.

    RAY_ADDRESS counts only where `ray job submit` has set it: elsewhere it may be of another user's cluster.
    """
    if config.ray_address is not None:
        return config.ray_address
    return environment.get(_ADDRESS, "auto") if is_job(environment) else None


def is_job(environment: Mapping[str, str]) -> bool:
    """Whether this process was started by `ray job submit`."""
    try:
        job = json.loads(environment.get(_OF_JOB, "{}"))
    except ValueError:
        return False
    return isinstance(job, dict) and "job_submission_id" in job.get("metadata", {})


def passed_on(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environment` that are named, or match a pattern such as `NCCL_*`.

    Raises:
        ConfigError: a variable that is named is not set.
    """
    for name in names:
        if "*" not in name and name not in environment:
            raise ConfigError(f"ray_env_vars names {name}, which is not set; set it, or leave it out.")
    return {
        key: value
        for key, value in environment.items()
        if any(fnmatch.fnmatchcase(key, name) for name in names)
    }


@contextmanager
def _own(folder: Path, namespace: str) -> Iterator[None]:
    """A Ray on this machine alone, for the block; its logs are in `folder`/ray afterwards."""
    # Ray's sockets need a short path.
    session = Path(tempfile.mkdtemp(prefix="agentrl-ray-"))
    logs = folder / _LOGS
    settings = {
        # Read when Ray is imported: bind to the loopback address, not to that of the network.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        with _environment(settings):
            import ray

            if ray.is_initialized():
                raise ConfigError(
                    "this process is connected to a Ray cluster already, and a run with cluster = ray starts "
                    "one of its own; give ray_address, or call ray.shutdown() first."
                )
            try:
                ray.init(
                    "local",
                    namespace=namespace,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=LOOPBACK,
                    _temp_dir=str(session),
                )
                _check_loopback()
                _link(logs, session)
                yield
            finally:
                ray.shutdown()
    finally:
        _keep_logs(logs)
        shutil.rmtree(session, ignore_errors=True)


@contextmanager
def _attached(address: str, namespace: str) -> Iterator[None]:
    """A connection to a cluster that runs already, for the block; one of this process is used as it is."""
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"no Ray cluster answers at ray_address = {address} ({first}); start one there, or leave "
            "ray_address out."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_loopback() -> None:
    """Raise where Ray was imported before this module could have it bind to the loopback address."""
    import ray

    if ray.util.get_node_ip_address() != LOOPBACK:
        raise ConfigError(
            "Ray was imported before the run, and would listen on the network; do not import ray in this "
            "process, or start a cluster and give ray_address."
        )


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


def _link(logs: Path, session: Path) -> None:
    """Have `logs` lead to those of the running session."""
    folder = next(session.glob("session_*/logs"), None)
    _remove(logs)
    if folder is not None:
        logs.parent.mkdir(parents=True, exist_ok=True)
        logs.symlink_to(folder)


def _keep_logs(logs: Path) -> None:
    """Replace the link by what it led to."""
    if not logs.is_symlink():
        return
    target = logs.resolve()
    _remove(logs)
    if target.is_dir():
        shutil.copytree(target, logs, symlinks=True, ignore_dangling_symlinks=True)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
