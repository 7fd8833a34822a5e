"""The far one of two machines is going away: run in namespaces of its own, as `on_two_machines`.

    unshare -Urnm python -m tests.processes.draining_scenarios SCENARIO FOLDER

It prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from agentrl.records import reconcile
from agentrl.records.history import attempts
from tests.flow.runs import HEARING, options_of
from tests.flow.worlds import Recalling
from tests.processes.guide_scripts import script, write_program
from tests.processes.machines import FAR, NEAR, kill_far, two_machines
from tests.processes.runs_on_two_machines import places_in
from tests.rollout import noting_process as noting

LEFT_S = 60


def node_of(host):
    (node,) = [node["NodeID"] for node in nodes_at(host)]
    return node


def nodes_at(host):
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == host]


def far_processes():
    """The processes of the far machine, each with its command line."""
    pids = subprocess.run(["ip", "netns", "pids", "far"], capture_output=True, text=True, check=True).stdout
    found = {}
    for pid in pids.split():
        with suppress(OSError):
            found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


async def drain(address, host=FAR, left_s=LEFT_S):
    """As a handler of a cloud's notice does."""
    options = {
        "address": address,
        "node-id": node_of(host),
        "reason": "DRAIN_NODE_REASON_PREEMPTION",
        "reason-message": "spot",
        "deadline-remaining-seconds": left_s,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await process.communicate()
    assert process.returncode == 0


async def until(condition, seconds=120.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


async def terminate(address):
    """As a scheduler does: SIGTERM to `ray start --block` of the far machine."""
    del address
    os.kill(ray_of_far(), signal.SIGTERM)


def ray_of_far() -> int:
    """The process of `ray start` on the far machine."""
    (pid,) = [pid for pid, words in far_processes().items() if b"ray.scripts.scripts" in words]
    return pid


async def handle_notice(address):
    """As the guide's handler of a cloud's notice does, on the far machine itself."""
    with tempfile.TemporaryDirectory() as folder:
        write_program(Path(folder) / "notice", "#!/bin/bash\n")
        path = os.pathsep.join([folder, str(Path(sys.executable).parent), os.environ["PATH"]])
        there = ["nsenter", f"--target={ray_of_far()}", "--mount", "--net"]
        command = [*there, "bash", "-c", script("until notice")]
        variables = {**os.environ, "PATH": path, "RAY_ADDRESS": address}
        process = await asyncio.create_subprocess_exec(*command, env=variables)
        assert await process.wait() == 0


async def players(folder: Path, address: str, leave=drain) -> dict[str, object]:
    """Groups that are in play on the far machine go on at the near one, token for token."""
    from agentrl.processes.config import ClusterConfig
    from agentrl.processes.placement import PlayerNeeds, layout_of
    from agentrl.processes.ray.placement import placed
    from agentrl.processes.ray.session import connected
    from agentrl.rollout.players.ray_players import RayPlayers
    from tests.rollout.test_leaving_players import players_of, records_of, undisturbed

    numbers, path = range(4), folder / "notes"
    os.environ[noting.FILE] = str(folder / "expected")
    expected = await undisturbed(numbers)
    os.environ |= {noting.FILE: str(path), noting.CALL: "3"}
    config = ClusterConfig(cluster="ray", ray_address=address, ray_env_vars=[noting.FILE, noting.CALL])
    with connected(config, folder, os.environ) as session:
        layout = layout_of(None, (), [PlayerNeeds(1.0, 0)] * 2, colocate=False)
        placement = placed(session, layout, 300.0)
        assert [allocation.host for allocation in placement.players] == [NEAR, FAR]
        of_players, lines = players_of(folder, RayPlayers(session, placement.group, placement.players))
        async with of_players:
            pid = str(await of_players.processes[1].pid())
            playing = [asyncio.create_task(of_players.play(noting.prompt(number), 0)) for number in numbers]
            await until(lambda: sum(note[0] == pid for note in noting.notes(path)) >= 2)
            await leave(address)
            outcomes = await asyncio.gather(*playing)
            before = len(noting.notes(path))
            await until(lambda: not Path(f"/proc/{pid}").exists())
            late = [await of_players.play(noting.prompt(9), 0)]
            # Ray starts nothing there any more.
            is_empty = not any(b"noting_process" in words for words in far_processes().values())
            kill_far()
            late += [await of_players.play(noting.prompt(10), 0)]
    noted = noting.notes(path)
    calls = Counter(note[2:] for note in noting.notes(folder / "expected"))
    moved = {note[2] for note in noted if note[0] == pid} & {note[2] for note in noted if note[0] != pid}
    return {
        "same": records_of(outcomes) == expected,
        "each_call_once": Counter(note[2:] for note in noted[:before]) == calls,
        "moved": sorted(moved),
        "machines": len({note[1] for note in noted}),
        "lines": lines,
        "late": [outcome.group.id for outcome in late],
        "far_was_empty": is_empty,
    }


class Slow(Recalling):
    """A step takes long enough for the machine to be drained in the middle of it."""

    async def step(self, action):
        await asyncio.sleep(2.0)
        return await super().step(action)


def command_of(folder: Path, address: str) -> list[str]:
    """A run with one rank and one player; only the far machine has room for both."""
    settings = {
        **{
            "max_staleness": 1,
            "correction": "tis",
            "num_rollout": 12,
            "save_interval": 1000,
            "max_restarts": 1,
        },
        **{"cluster": "ray", "ray_address": address, "num_cpus_per_rank": 0.75, "num_threads": 1},
        **{"num_rollout_workers": 1, "num_cpus_per_rollout_worker": 0.25, "rollout_batch_size": 4},
        **{"env": f"{__package__}.draining_scenarios:Slow", "eval_episodes": 4},
    }
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in options_of("", folder, "x", **settings).items()
        if not isinstance(value, bool)
    ]
    return [sys.executable, "-c", HEARING, "train", *flags]


def num_trained(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count('"train/loss"') if metrics.exists() else 0


async def whole_run(folder: Path, address: str) -> dict[str, object]:
    """The far machine has the rank and the player of a run, which goes on at the near one."""
    import ray

    from agentrl.processes.ray.actor import on_node

    ray.init(address, log_to_driver=False)
    place, path = ray.remote(Placeholder), folder / "x"
    # Until it is gone.
    holder = place.options(num_cpus=0.5, scheduling_strategy=on_node(node_of(NEAR))).remote()
    ray.get(holder.is_there.remote())
    with (folder / "out").open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command_of(folder, address), stdout=out, stderr=out)
        await until(lambda: num_trained(path) >= 2 or process.returncode is not None, 300)
        before = places_in(path)
        num_before = num_trained(path)
        ray.kill(holder)
        await drain(address)
        await asyncio.wait_for(process.wait(), 300)
    # This process would end with a Ray that takes longer than a minute to end.
    ray.shutdown()
    return {
        "code": process.returncode,
        "out": (folder / "out").read_text(),
        "num_before": num_before,
        "attempts": [[attempt.ended, attempt.resumed_from] for attempt in attempts(path)],
        "before": before,
        "after": places_in(path),
        "problems": reconcile(path).problems,
    }


async def placeholders():
    """An actor on each machine, of a quarter of a CPU."""
    import ray

    from agentrl.processes.ray.actor import on_node

    await until(lambda: nodes_at(FAR))
    place = ray.remote(Placeholder)
    nodes = [node_of(host) for host in (NEAR, FAR)]
    holders = [place.options(num_cpus=0.25, scheduling_strategy=on_node(node)).remote() for node in nodes]
    ray.get([holder.is_there.remote() for holder in holders])
    return holders


async def requests_while(condition, fleet):
    """Six requests at any time; some are in flight when this ends."""
    from tests.engine.test_fleet import start_request

    requests = []
    while condition():
        if len(fleet.policy._pending) < 6:
            requests.append(start_request(fleet, len(requests) % 40))
        await asyncio.sleep(0.02)
    assert any(not task.done() for _, task in requests), "it strikes in flight"
    return requests


async def servers(folder: Path, address: str) -> dict[str, object]:
    """Two real servers. What the far one samples goes on at the near one; it comes back there, too."""
    import ray

    from agentrl.engine.sglang.launch import ServerReplicas, Servers
    from agentrl.engine.sglang.launch.ray_servers import RayLauncher
    from agentrl.processes.config import ClusterConfig
    from agentrl.processes.placement import ServerNeeds, layout_of
    from agentrl.processes.ray.placement import placed
    from agentrl.processes.ray.session import connected
    from tests.engine.test_fleet import expect_exact, publish, start_request
    from tests.processes.test_servers_on_ray import real

    events: list[str] = []
    with connected(ClusterConfig(cluster="ray", ray_address=address), folder, os.environ) as session:
        # Each machine has room for one server, until they are gone.
        holders = await placeholders()
        placement = placed(session, layout_of(None, [ServerNeeds(0.5, 0)] * 2, colocate=False), 300.0)
        assert [allocation.host for allocation in placement.servers] == [NEAR, FAR]
        launcher = RayLauncher(session, placement.group, placement.servers)
        async with (
            Servers(ServerReplicas(real(folder), count=2), launcher=launcher) as launched,
            fleet_of(launched, launcher, events) as fleet,
        ):
            await publish(fleet, 1)
            far, draining = fleet._membership.members[1], asyncio.create_task(drain(address))
            urls = [far.process.url]
            requests = await requests_while(lambda: far.serves, fleet)
            await draining
            versions = await expect_exact(requests)
            counts = dict(fleet.policy.counts)
            # It misses this version, as it has no machine.
            await publish(fleet, 2)
            ray.kill(holders[0])
            kill_far()
            # Its address can be read while it moves, too.
            await until(lambda: far.process.url and far.routed, 400)
            urls.append(far.process.url)
            later = await expect_exact([start_request(fleet, number) for number in range(40, 48)])
            on_far = await far.control.weight_version()
    return {
        "events": events,
        "urls": urls,
        "versions": [sorted(each) for each in (set().union(*versions), set().union(*later))],
        "counts": counts,
        "version_there": on_far,
    }


@asynccontextmanager
async def fleet_of(launched, launcher, events):
    from agentrl.engine.sglang import SGLangPolicy
    from agentrl.engine.sglang.fleet import Fleet
    from agentrl.engine.sglang.transports.distributed import Distributed
    from tests.engine.fleets import PATIENT
    from tests.engine.subjects import VOCAB, text_of
    from tests.processes.test_servers_on_ray import no_op

    headers = {"Authorization": f"Bearer {launcher.key}"}
    policy = SGLangPolicy(
        launched.url, headers=headers, vocab_size=VOCAB, decode=text_of, resend_lost=True, attempts=10
    )
    transport = Distributed(host=launcher.host, check_loaded=False)
    fleet = Fleet(
        launched.servers, launched.router, policy, transport, no_op, PATIENT, events.append, headers
    )
    try:
        yield fleet.watch()
    finally:
        await fleet.close()


class Placeholder:
    """Takes room of a machine."""

    def is_there(self) -> bool:
        return True


SCENARIOS = {
    "players": players,
    "terminated": partial(players, leave=terminate),
    "notice": partial(players, leave=handle_notice),
    "whole_run": whole_run,
    "servers": servers,
}

if __name__ == "__main__":
    with two_machines() as where:
        print(json.dumps(asyncio.run(SCENARIOS[sys.argv[1]](Path(sys.argv[2]), where))), flush=True)
