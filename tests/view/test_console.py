import io
import os
import re
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
from rich.console import Console

from agentrl import say
from agentrl.types import Ending, Message, Trajectory, Turn
from agentrl.view.console import RunConsole, print_episode
from agentrl.view.scores import ScoreRow, figure_text, time_text
from tests.view.synthetic import PRODUCTIONS, ROWS, VERDICT, crowded, episode

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain(width=80, **options):
    stream = io.StringIO()
    return RunConsole(console=Console(file=stream, width=width, highlight=False), **options), stream


def terminal(width=80):
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=True, color_system="truecolor", highlight=False
    )
    return RunConsole(console=console), stream


def test_without_a_terminal_lines_are_printed_at_intervals():
    clock = Clock()
    console, stream = plain(clock=clock, interval_s=10)
    with console.stage("RL", 100) as bar:
        for step in range(100):
            clock.now += 1.0
            bar.advance(1, reward=step / 100, **{"tok/s": 9123.4})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "RL ..."
    assert lines[1] == "  RL 10/100 · reward 0.090 · tok/s 9,123 · 1 min 30 s left"
    assert len(lines) == 11
    assert lines[-1] == "✓ RL 100/100 done in 1 min 40 s · reward 0.990 · tok/s 9,123"
    assert not CONTROL.search(stream.getvalue())


def test_figures_stay_until_they_are_replaced():
    console, stream = plain()
    with console.stage("RL", 3) as bar:
        bar.advance(1, reward=0.5, greedy=0.25)
        bar.advance(2, reward=0.75)
    assert stream.getvalue().splitlines()[-1].endswith("3/3 done in 0 s · reward 0.750 · greedy 0.250")


def test_an_interrupted_stage_is_marked_as_stopped():
    console, stream = plain()

    def broken_off():
        with console.stage("RL", 5) as bar:
            bar.advance()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert stream.getvalue().splitlines()[-1] == "✗ RL 1/5 stopped after 0 s"


def test_a_stage_of_one_step_has_no_count():
    console, stream = plain()
    with console.stage("building the world", 1):
        pass
    assert stream.getvalue() == "building the world ...\n✓ building the world done in 0 s\n"


def test_on_a_terminal_a_bar_shows_the_figures_and_leaves_one_line():
    console, stream = terminal()
    with console.stage("RL", 4) as bar:
        bar.advance(3, reward=0.5)
        console.line("in between")
    text = stream.getvalue()
    assert "3/4" in text
    assert "━" in text
    assert "in between" in text
    assert "\x1b[" in text
    last = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text.splitlines()[-1])
    assert last.lstrip("\r") == "✓ RL 3/4 done in 0 s · reward 0.500"


def test_a_stage_inside_a_stage_shares_the_display():
    console, stream = terminal()
    with console.stage("RL", 2) as outer:
        with console.stage("evaluation", 2) as inner:
            inner.advance(2)
        outer.advance(2)
    with console.stage("after", 2) as bar:
        bar.advance(2)
    for summary in ("evaluation 2/2 done", "RL 2/2 done", "after 2/2 done"):
        assert summary in stream.getvalue()


def test_quiet_prints_nothing():
    console, stream = plain(quiet=True)
    with console.stage("RL", 2) as bar:
        bar.advance(2)
    console.line("x")
    console.table(ROWS, title="y")
    console.episode(episode(), VERDICT)
    assert stream.getvalue() == ""


def test_the_table_has_every_score_at_every_stage():
    console, stream = plain()
    console.table(ROWS, title="Success")
    rows = [line.split() for line in stream.getvalue().splitlines()]
    assert ["Success"] in rows
    assert ["after", "warm", "start", "after", "RL"] in rows
    assert ["sampled", "0.250", "0.900"] in rows
    assert ["greedy", "–", "0.975"] in rows
    assert rows[rows.index(["greedy,", "by", "hops"]) + 1] == ["2", "–", "1.000"]


@pytest.mark.parametrize("width", [80, 60, 44])
def test_many_parts_are_all_legible_at_any_width(width):
    console, stream = plain(width=width)
    console.table(crowded().rows, title="factory:Factory, held-out tasks")
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "…" not in stream.getvalue()
    words = stream.getvalue().split()
    assert all(words.count(name.split()[-1]) == 1 for name in PRODUCTIONS)
    assert sum(score in line.split() for line in lines for score in ("0.133", "0.467")) == 3


def test_named_sets_of_prompts_have_a_heading_each():
    console, stream = plain()
    rows = [
        ScoreRow("after RL", {"greedy": share}, set=name) for name, share in (("aime", 0.25), ("gpqa", 0.5))
    ]
    console.table(rows)
    lines = [line.split() for line in stream.getvalue().splitlines()]
    first = lines.index(["aime"])
    assert lines[first : first + 4] == [["aime"], ["greedy", "0.250"], ["gpqa"], ["greedy", "0.500"]]


def test_a_line_is_printed_as_it_is():
    console, stream = plain(width=20)
    console.line("runs/[bold]x[/bold] is a very long path indeed")
    assert stream.getvalue() == "runs/[bold]x[/bold] is a very long path indeed\n"


def test_a_transcript_names_speakers_without_colour():
    console, stream = plain()
    console.episode(episode(), VERDICT, title="after RL")
    assert stream.getvalue().splitlines() == [
        "after RL · test/1 · completed · reward 1 · 2 turns",
        " world │ Where was Torba born?",
        " model │ <search>Torba</search>",
        " world │ in Kelmar",
        " model │ Kelmar",
        "",
    ]


def test_a_transcript_has_a_colour_for_each_speaker():
    console, stream = terminal()
    console.episode(episode(), VERDICT)
    world, model = (
        re.search(rf"\x1b\[([\d;]+)m{re.escape(text)}", stream.getvalue())[1]
        for text in ("in Kelmar", "Kelmar\x1b")
    )
    assert world != model


def test_long_text_is_wrapped_next_to_the_margin():
    console, stream = plain(width=40)
    console.episode(episode(question="a word " * 12), None)
    lines = stream.getvalue().splitlines()[1:4]
    assert lines[0].startswith(" world │ a word")
    assert all(line.startswith("       │ ") for line in lines[1:])
    assert all(len(line) <= 40 for line in lines)


@pytest.mark.parametrize("text", ["a" * 100_000, "line\n" * 100_000, "x " * 60_000 + "\n\n\n"])
def test_of_a_long_message_the_first_and_the_last_rows_are_printed(text):
    console, stream = plain(width=40)
    console.episode(episode(question=f"first {text} last"), None)
    lines = stream.getvalue().splitlines()
    assert len(lines) < 20
    assert lines[1].startswith(" world │ first")
    (cut,) = (number for number, line in enumerate(lines) if "more characters" in line)
    assert lines[cut].startswith("       │ … ")
    shown = sum(len(line[9:]) for line in lines[1:cut]) + sum(len(line[9:]) for line in lines[cut + 1 : -4])
    hidden = int(re.search(r"… ([\d,]+) more", lines[cut])[1].replace(",", ""))
    assert hidden + shown == len(f"first {text} last")
    assert "last" in lines[-5]


def test_of_a_long_episode_the_first_and_the_last_messages_are_printed():
    turns = tuple(Turn((Message("user", f"q{n}"),), say(f"a{n}"), None, n) for n in range(100))
    console, stream = plain()
    console.episode(replace(episode(), trajectories=(Trajectory(turns),)), None)
    lines = stream.getvalue().splitlines()
    assert [line.split()[-1] for line in lines[1:9]] == ["q0", "a0", "q1", "a1", "q2", "a2", "q3", "a3"]
    assert lines[9].strip() == "… 188 more messages …"
    assert [line.split()[-1] for line in lines[10:14]] == ["q98", "a98", "q99", "a99"]


def test_text_of_a_model_cannot_control_the_terminal():
    console, stream = plain()
    console.episode(episode(answer="\x1b[2J\x07[red]x[/red]\u202eabc"), VERDICT, title="\x1b]0;t\x07")
    text = stream.getvalue()
    assert not CONTROL.search(text)
    assert "‹U+001B›[2J‹U+0007›[red]x[/red]‹U+202E›abc" in text


def test_a_failed_episode_shows_the_cause():
    stream = io.StringIO()
    print_episode(Console(file=stream, width=80), episode(ending=Ending.FAILED), None)
    assert "failed · not scored · 2 turns" in stream.getvalue()
    assert "failed: took longer than 3 s" in stream.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.500"), (12.34, "12.3"), (9123.4, "9,123"), (3, "3"), (12345, "12,345"),
        (0.0, "0.000"), (3.2e-5, "3.2e-05"), (-0.25, "-0.250"), ("hops=2", "hops=2"),
    ],
)  # fmt: skip
def test_figures_are_short(value, text):
    assert figure_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (65, "1 min 05 s"), (7380, "2 h 03 min"), (-1, "0 s")]
)
def test_spans_of_time_are_short(seconds, text):
    assert time_text(seconds) == text


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


def full_disk():
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", encoding="utf-8")


@pytest.mark.parametrize("output", [closed_pipe, full_disk])
def test_an_output_that_breaks_ends_the_output_and_not_the_run(monkeypatch, output):
    stream = output()
    monkeypatch.setattr(sys, "stdout", stream)
    console = RunConsole()
    with console.stage("RL", 2) as bar:
        bar.advance()
    console.line("on")
    console.table(ROWS)
    console.episode(episode(), VERDICT)
    with suppress(OSError):  # the disk is still full
        stream.close()


def test_what_others_print_after_the_pipe_has_closed_is_lost_too(monkeypatch):
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        RunConsole().line("on")
        print("more", flush=True)
