"""A checkpoint is whole or not there; what is kept is the newest ones, and the best."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.records.history import record_sizes, roll_back
from agentrl.run.checkpoints import Checkpoints, RunState


class Saver:
    """The part of a trainer that a checkpoint needs. error: of the disk, while the copy is written."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.release = asyncio.Event()
        self.release.set()

    async def save_state(self, directory: str) -> asyncio.Task[None]:
        async def write() -> None:
            await self.release.wait()
            if self.error is not None:
                raise self.error
            Path(directory).mkdir()
            (Path(directory) / "weights").write_bytes(b"w" * 100)

        return asyncio.create_task(write())


def state(step: int, **metrics: float) -> RunState:
    latest = {name.replace("_", "/"): value for name, value in metrics.items()}
    return RunState(
        attempt=1,
        step=step,
        version=step,
        source="x",
        next_ordinal=2 * step,
        elapsed_s=1.0,
        records={},
        latest=latest,
    )


async def saved(folder: Path, *steps: int, **options: object) -> Checkpoints:
    checkpoints = Checkpoints(folder, **{"keep": 10, **options})
    for step in steps:
        await checkpoints.save(Saver(), state(step))
    await checkpoints.written()
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_the_newest_is_what_was_saved_last(tmp_path):
    newest = (await saved(tmp_path, 1, 2, 10)).newest()
    assert newest is not None
    assert newest.state == state(10)
    assert (Path(newest.trainer) / "weights").read_bytes() == b"w" * 100


async def test_the_run_goes_on_while_a_checkpoint_is_written(tmp_path):
    checkpoints, saver = Checkpoints(tmp_path, keep=2), Saver()
    saver.release.clear()
    await checkpoints.save(saver, state(1))
    assert names(tmp_path) == [".step_000001.coming"]
    assert checkpoints.newest() is None
    saver.release.set()
    await checkpoints.written()
    assert names(tmp_path) == ["step_000001"]


async def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, best="eval/greedy")
    for step, score in enumerate([0.1, 0.9, 0.3, 0.9, 0.2, 0.4], start=1):
        await checkpoints.save(Saver(), state(step, eval_greedy=score))
    await checkpoints.written()
    assert names(tmp_path) == ["step_000002", "step_000005", "step_000006"]


async def test_the_best_is_what_was_evaluated_also_where_its_result_came_later(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, best="eval/greedy")
    # The weights of step 2 score best. Their evaluation ends after step 4, that of step 5 never.
    scores, after = {0: 0.1}, {0: 0.1, 2: 0.9}
    for step, known, evaluating in [(1, scores, None), (2, scores, 2), (3, scores, 2), (4, after, None)]:
        updated = {"scores": known, "evaluating": evaluating}
        await checkpoints.save(Saver(), state(step, eval_greedy=0.5).model_copy(update=updated))
    await checkpoints.written()
    assert names(tmp_path) == ["step_000002", "step_000004"]
    for step in (5, 6, 7):
        updated = {"scores": after, "evaluating": 5}
        await checkpoints.save(Saver(), state(step, eval_greedy=0.5).model_copy(update=updated))
    await checkpoints.written()
    assert names(tmp_path) == ["step_000002", "step_000005", "step_000007"]
    assert checkpoints.newest().state.scores == after
    assert set(checkpoints.removable()) == set()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda path: (path / "trainer" / "weights").write_bytes(b"v" * 100),
            "trainer/weights is not as it was",
        ),
        (
            lambda path: (path / "trainer" / "weights").write_bytes(b"w" * 99),
            "trainer/weights is not as it was",
        ),
        (lambda path: (path / "trainer" / "weights").unlink(), "trainer/weights is missing"),
        (lambda path: (path / "state.json").write_text("{}"), "state.json is not as it was"),
        (lambda path: (path / "checksums.json").write_text("{"), "checksums.json is missing or torn"),
        (lambda path: (path / "checksums.json").unlink(), "checksums.json is missing or torn"),
    ],
)
async def test_a_damaged_one_is_reported_and_the_one_before_it_is_used(tmp_path, damage, sentence):
    events: list[str] = []
    checkpoints = await saved(tmp_path, 1, 2, on_event=events.append)
    damage(tmp_path / "step_000002")
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.state.step == 1
    (event,) = events
    assert sentence in event
    # The step is played again, and its checkpoint takes the place of the damaged one.
    await checkpoints.save(Saver(), state(2))
    await checkpoints.written()
    assert checkpoints.newest().state.step == 2


async def test_a_disk_that_is_full_costs_no_checkpoint_and_no_run(tmp_path):
    events: list[str] = []
    checkpoints = await saved(tmp_path, 1, on_event=events.append)
    await checkpoints.save(Saver(OSError(28, "No space left on device")), state(2))
    await checkpoints.written()
    (event,) = events
    assert (
        "the checkpoint of step 2 could not be written (No space left on device); step_000001 is still"
        in event
    )
    assert names(tmp_path) == ["step_000001"]
    await checkpoints.save(Saver(), state(3))
    await checkpoints.written()
    assert names(tmp_path) == ["step_000001", "step_000003"]


async def test_one_of_another_version_is_named(tmp_path):
    checkpoints = await saved(tmp_path, 1)
    path = tmp_path / "step_000001" / "state.json"
    text = path.read_text().replace('"format": 1', '"format": 7')
    path.write_text(text)
    sums = json.loads((tmp_path / "step_000001" / "checksums.json").read_text())
    del sums["state.json"]
    (tmp_path / "step_000001" / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(ConfigError, match=r"is of another version of agentrl \(format: Input should be 1\)"):
        checkpoints.newest()


def recorded(folder: Path, **files: bytes) -> Path:
    (folder / "trajectories").mkdir(exist_ok=True)
    for name, data in files.items():
        path = folder / ("metrics.jsonl" if name == "metrics" else f"trajectories/{name}.jsonl.gz")
        path.write_bytes(data)
    return folder


def test_what_is_beyond_the_sizes_is_moved(tmp_path):
    kept = record_sizes(recorded(tmp_path, metrics=b"12", step_1=b"abc"))
    recorded(tmp_path, metrics=b"1234", step_1=b"abcd", step_2=b"xyz")
    roll_back(tmp_path, kept, attempt=3)
    assert record_sizes(tmp_path) == kept
    undone = tmp_path / "rolled_back" / "attempt_3"
    assert (undone / "metrics.jsonl").read_bytes() == b"34"
    assert (undone / "trajectories" / "step_1.jsonl.gz").read_bytes() == b"d"
    assert (undone / "trajectories" / "step_2.jsonl.gz").read_bytes() == b"xyz"
    roll_back(tmp_path, kept, attempt=3)
    assert (undone / "metrics.jsonl").read_bytes() == b"34"


async def test_a_run_that_is_cancelled_while_it_waits_for_a_checkpoint_still_gets_it(tmp_path):
    checkpoints, saver = Checkpoints(tmp_path, keep=5), Saver()
    saver.release.clear()
    await checkpoints.save(saver, state(1))
    waiting = asyncio.create_task(checkpoints.save(Saver(), state(2)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    saver.release.set()
    await checkpoints.written()
    assert names(tmp_path) == ["step_000001"]
