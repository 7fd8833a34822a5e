"""A run on the terminal: a progress bar for each stage, a table, episodes.

Without a terminal the same is printed as plain lines at intervals, without control codes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from agentrl.types import Episode, Verdict
from agentrl.view.scores import Figure, ScoreRow, figure_text, lines_of, score_text, stages_of, time_text
from agentrl.view.transcript import MODEL, WORLD, TranscriptEntry, summary_of, transcript_entries, visible

_STYLES = {MODEL: "bold green", WORLD: "cyan"}
_MARGIN = max(map(len, _STYLES)) + 1
_MIN_WIDTH = 20
_FIRST, _LAST = 8, 4
_MAX_ROWS = _MAX_MESSAGES = _FIRST + _LAST
"""Rows of a message, and messages of an episode: of more only the first and the last are printed (counts)."""
_SCORE_WIDTH = 6
_MARGINS = 7
"""Characters around a table and its first column."""


@dataclass(slots=True)
class StageBar:
    """A running stage: its progress and its latest figures.

    notes: figures of this moment, which are left out when the stage has ended. is_live: a terminal shows it.
    """

    title: str
    total: int
    show: Callable[[StageBar], None]
    done: int = 0
    fields: dict[str, Figure] = field(default_factory=dict)
    notes: dict[str, Figure] = field(default_factory=dict)
    is_live: bool = False

    def advance(self, n: int = 1, **fields: Figure) -> None:
        """Record `n` more steps as done; `fields` are figures to show until they are replaced."""
        self.done += n
        self.fields.update(fields)
        self.show(self)

    def note(self, **notes: Figure) -> None:
        """Show these figures, too, in place of the last notes; without a terminal only with the next step."""
        self.notes = notes
        if self.is_live:
            self.show(self)

    @property
    def figures(self) -> str:
        """The latest figures as one line."""
        figures = self.fields | self.notes
        return " · ".join(f"{name} {figure_text(value)}" for name, value in figures.items())


class _StandardOutput(Console):
    """Standard output, whose reader may end before the run does: what is printed then is lost."""

    def on_broken_pipe(self) -> None:
        """Discard this and all later output, also what others write to the same file."""
        self.quiet = True
        with suppress(OSError):  # a file without a descriptor
            descriptor = self.file.fileno()
            with open(os.devnull, "wb") as discarding:
                os.dup2(discarding.fileno(), descriptor)


class RunConsole:
    """The terminal output of a run. A closed pipe or terminal ends the output, and not the run.

    quiet: prints nothing. console: the destination, by default standard output.
    interval_s: without a terminal, the least time between two lines about one stage.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or _StandardOutput(highlight=False)
        self._quiet = quiet
        self._interval_s = interval_s
        self._clock = clock
        self._bars: _Bars | None = None

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[StageBar]:
        """Show a stage of `total` steps while the block runs, and afterwards one line that sums it up."""
        started = self._clock()
        live = self._console.is_terminal and not self._quiet
        show, hide = self._open_bar(title, total) if live else self._open_lines(title, started)
        bar = StageBar(title, total, show, is_live=live)
        succeeded = False
        try:
            yield bar
            succeeded = True
        finally:
            hide()
            bar.notes = {}
            self._sum_up(bar, succeeded, self._clock() - started)

    def table(self, rows: Sequence[ScoreRow], *, title: str = "") -> None:
        """Print one line per score and one column per stage. Nothing is cut off: long names are wrapped."""
        heading = Text(visible(title), style="bold") if title else None
        table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
        lines, stages = tuple(lines_of(rows)), stages_of(rows)
        longest = max((2 * line.level + len(visible(line.name)) for line in lines), default=0)
        # Names get the room that scores leave; headings of stages are wrapped first.
        room = self._console.width - _MARGINS - (_SCORE_WIDTH + 2) * len(stages)
        table.add_column("", overflow="fold", width=min(longest, max(room, _SCORE_WIDTH)))
        for stage in stages:
            table.add_column(Text(visible(stage)), justify="right", overflow="fold", min_width=_SCORE_WIDTH)
        for line in lines:
            name = Text(visible(line.name), style="" if line.values else "dim")
            table.add_row(Padding(name, (0, 0, 0, 2 * line.level)), *map(score_text, line.values))
        self._show(table)

    def line(self, text: str) -> None:
        """Print a line as it is: brackets are no markup, and nothing is wrapped."""
        self._print(Text(visible(text)))

    def episode(self, episode: Episode, verdict: Verdict | None, *, title: str = "") -> None:
        """Print an episode as a transcript."""
        if not self._quiet:
            with self._writing():
                print_episode(self._console, episode, verdict, title=title)

    def _print(self, text: Text) -> None:
        self._show(text, soft_wrap=True)

    def _show(self, renderable: RenderableType, *, soft_wrap: bool = False) -> None:
        if not self._quiet:
            with self._writing():
                self._console.print(renderable, soft_wrap=soft_wrap)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # the terminal is gone, or the disk of a redirected output is full
            self._quiet = True

    def _open_bar(self, title: str, total: int) -> tuple[Callable[[StageBar], None], Callable[[], None]]:
        # Nested stages share one live display: a terminal can have only one.
        bars = self._bars = self._bars or _Bars.started(self._console)
        task = bars.add_task(visible(title), total=total, figures="")

        def show(bar: StageBar) -> None:
            bars.update(task, completed=bar.done, figures=bar.figures)

        def hide() -> None:
            bars.remove_task(task)
            if not bars.tasks:
                bars.stop()
                self._bars = None

        return show, hide

    def _open_lines(
        self, title: str, started: float
    ) -> tuple[Callable[[StageBar], None], Callable[[], None]]:
        last = started
        self._print(Text(f"{visible(title)} ..."))

        def show(bar: StageBar) -> None:
            nonlocal last
            now = self._clock()
            if now - last < self._interval_s or bar.done >= bar.total:
                return
            last = now
            parts = [f"{bar.title} {bar.done}/{bar.total}", bar.figures]
            if bar.done:
                remaining_s = (now - started) / bar.done * (bar.total - bar.done)
                parts.append(f"{time_text(remaining_s)} left")
            self._print(Text("  " + visible(" · ".join(part for part in parts if part))))

        return show, lambda: None

    def _sum_up(self, bar: StageBar, succeeded: bool, seconds: float) -> None:
        mark = ("✓ ", "green") if succeeded else ("✗ ", "red")
        count = f" {bar.done}/{bar.total}" if bar.total > 1 else ""
        verb = "done in" if succeeded else "stopped after"
        figures = f" · {bar.figures}" if bar.figures else ""
        summary = f"{bar.title}{count} {verb} {time_text(seconds)}{figures}"
        self._print(Text.assemble(mark, visible(summary)))


def print_episode(
    console: Console, episode: Episode, verdict: Verdict | None, *, title: str = "", width: int | None = None
) -> None:
    """Print an episode as a transcript, with the speaker in the margin, in colour where possible."""
    heading = f"{title} · {summary_of(episode, verdict)}" if title else summary_of(episode, verdict)
    console.print(Text(visible(heading), style="bold"), soft_wrap=True)
    text_width = max((width or console.width) - _MARGIN - 4, _MIN_WIDTH)
    entries = [*transcript_entries(episode)]
    first, last = (entries, []) if len(entries) <= _MAX_MESSAGES else (entries[:_FIRST], entries[-_LAST:])
    for entry in first:
        _print_entry(console, entry, text_width)
    if last:
        console.print(Text(f"  … {len(entries) - _MAX_MESSAGES:,} more messages …", style="dim"))
    for entry in last:
        _print_entry(console, entry, text_width)
    if episode.failure is not None:
        console.print(Text(visible(f"  failed: {episode.failure.detail}"), style="red"), soft_wrap=True)
    console.print()


def _print_entry(console: Console, entry: TranscriptEntry, text_width: int) -> None:
    style = _STYLES[entry.speaker]
    label = entry.label[: _MARGIN - 1]
    for line in _rows(console, visible(entry.text), style, text_width):
        console.print(Text.assemble((f" {label:>{_MARGIN - 1}} │ ", "dim"), line), soft_wrap=True)
        label = ""


def _rows(console: Console, text: str, style: str, width: int) -> Iterator[Text]:
    """The rows of a message; of a long one the first and the last, and how much is between them."""

    def wrapped(part: str) -> list[Text]:
        rows = Text(part, style=style).wrap(console, width, tab_size=4)
        for row in rows:
            row.rstrip()
        return [*rows]

    # A whole prompt of megabytes is not wrapped to show twelve rows of it.
    if len(text) <= _MAX_ROWS * width and len(rows := wrapped(text)) <= _MAX_ROWS:
        yield from rows
        return
    first, last = wrapped(text[: _FIRST * width])[:_FIRST], wrapped(text[-_LAST * width :])[-_LAST:]
    hidden = len(text) - sum(len(row) for row in (*first, *last))
    yield from first
    yield Text(f"… {hidden:,} more characters …", style="dim")
    yield from last


class _TimeLeft(ProgressColumn):
    def render(self, task: Task) -> Text:
        remaining_s = task.time_remaining
        return Text("" if remaining_s is None else f"{time_text(remaining_s)} left", style="dim")


class _Bars(Progress):
    """Progress bars, with the figures of each on a line of their own: the bar takes the full width."""

    @classmethod
    def started(cls, console: Console) -> _Bars:
        bars = cls(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _TimeLeft(),
            console=console,
            expand=True,
            transient=True,
            # A low rate keeps the cores free for the run.
            refresh_per_second=4,
            speed_estimate_period=120,
        )
        bars.start()
        return bars

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            yield self.make_tasks_table([task])
            if figures := task.fields["figures"]:
                yield Text(f"  {visible(figures)}", style="cyan", no_wrap=True, overflow="ellipsis")
