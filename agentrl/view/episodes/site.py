"""The pages of `agentrl view`: a list of all episodes, each token by token, and the curves that lead to them.

    VIEW/index.html                the list, its filters and an episode; it needs no server
    VIEW/curves.html               a point of a curve is a link to its episodes
    VIEW/data/manifest-000000.js   what the other scripts hold; see `shards` for their form
    VIEW/data/index-000000.js      the columns of 20,000 rows each
    VIEW/data/episodes-000000.js   the journal's entries, about a mebibyte of JSON in each
    VIEW/data/texts-000000.js      the text of each entry in lower case, for the search
    VIEW/data/signatures-000000.js which of these have the three-byte sequences of a query
    VIEW/data/tokens-000000.js     the text of each token id of one run

Memory does not grow with the number of episodes, but for about 30 bytes of each in the index's bookkeeping.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from markupsafe import Markup

from agentrl.errors import ConfigError, RunExistsError
from agentrl.records import members, read_metrics
from agentrl.records.history import METRICS
from agentrl.records.lines import to_line
from agentrl.records.writer import file_name
from agentrl.runtime.files import write_text
from agentrl.types import JSON
from agentrl.view.chart import draw, legend
from agentrl.view.episodes.index import Index
from agentrl.view.episodes.journals import INDEX, JournalFile, find_journals, link_to
from agentrl.view.episodes.line import JournalLine, ids_of, read_line, row_of, shown_lines, text_of
from agentrl.view.episodes.shards import Shards, batches, signature, write_script
from agentrl.view.panels import Panel, Series, panels_of
from agentrl.view.report import render_page

Decoder: TypeAlias = Callable[[int], str]
"""The text of one token id."""

_MANIFEST = "manifest-000000.js"


class Site(NamedTuple):
    """The written pages. page: the one to open. num_bytes: of all files on disk."""

    page: Path
    num_episodes: int
    num_files: int
    num_bytes: int


def write_site(
    folder: Path,
    out: Path,
    *,
    title: str,
    decoder_of: Callable[[Path], Decoder | None] = lambda _: None,
    progress: Callable[[JournalFile], None] = lambda _: None,
) -> Site:
    """Write the pages of all journals of a folder, or of one journal file, and replace older ones.

    Args:
        decoder_of: the tokenizer of a run's folder; without one, tokens are shown by their ids.
        progress: called after each journal file.

    Raises:
        ConfigError: there is no journal, one cannot be read, or the pages cannot be written.
        RunExistsError: `out` holds something else.
    """
    journals = find_journals(folder)
    if out.exists() and not (out / "data" / _MANIFEST).exists():
        raise RunExistsError(f"{out} exists and holds no pages of `agentrl view`; name another --out.")
    unfinished = out.with_name(f".{out.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        (unfinished / "data").mkdir(parents=True)
        data = _Data(unfinished / "data")
        for journal in journals:
            data.read(journal)
            progress(journal)
        data.finish(title, journals, decoder_of)
        _write_pages(unfinished, out, title, journals)
        num_bytes = sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
        if out.exists():
            shutil.rmtree(out)
        os.replace(unfinished, out)
    except OSError as error:
        raise ConfigError(
            f"the pages cannot be written ({error.strerror}: {error.filename}); name another --out."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Site(out / INDEX, data.index.num_rows, len(journals), num_bytes)


@dataclass(slots=True)
class _Data:
    """Writes the scripts of a page while journals are read."""

    folder: Path
    index: Index = field(init=False)
    episodes: Shards = field(init=False)
    texts: Shards = field(init=False)
    signatures: list[bytes] = field(default_factory=list)
    used_ids: dict[Path, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = Index(self.folder)
        self.episodes = Shards(self.folder, "episodes", b"\n")
        self.texts = Shards(self.folder, "texts", b"\0", lambda text: self.signatures.append(signature(text)))

    def read(self, journal: JournalFile) -> None:
        """Add the entries of one journal file.

        Raises:
            ConfigError: it is damaged, or holds something else.
        """
        self.index.begin_file()
        used = self.used_ids.setdefault(journal.home, set())
        try:
            for lines in batches(members.read_lines(journal.path)):
                self._add([read_line(line) for line in lines], used)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{journal.path} holds no entries of a journal ({type(error).__name__}: {error}); restore "
                "that file, or move it away."
            ) from None

    def _add(self, lines: Sequence[JournalLine], used: set[int]) -> None:
        for _, entry, _ in lines:
            used.update(*ids_of(entry))
            self.index.add(row_of(entry))
            text = text_of(entry).lower().replace("\0", " ")
            self.texts.add(text.encode("utf-8", "replace"))
        for line in shown_lines(lines):
            self.episodes.add(line)

    def finish(
        self, title: str, journals: Sequence[JournalFile], decoder_of: Callable[[Path], Decoder | None]
    ) -> None:
        """Write what is left: the last parts, the texts of tokens, the manifest."""
        for part in (self.index, self.episodes, self.texts):
            part.flush()
        write_script(self.folder, "signatures", 0, b"".join(self.signatures))
        vocabularies = self._write_vocabularies(decoder_of)
        files: list[JSON] = [
            {
                "key": journal.key,
                "set": journal.set,
                "step": journal.step,
                "tokens": vocabularies.get(journal.home),
                "episodes": rows.num_rows,
                "reward": rows.mean,
            }
            for journal, rows in zip(journals, self.index.files, strict=True)
        ]
        manifest = {
            "title": title,
            "episodes": self.index.num_rows,
            "files": files,
            "coded": self.index.coded(),
            "facts": self.index.facts.choices(),
            "starts": {
                "index": self.index.starts,
                "episodes": self.episodes.starts,
                "texts": self.texts.starts,
            },
        }
        write_script(self.folder, "manifest", 0, to_line(manifest))

    def _write_vocabularies(self, decoder_of: Callable[[Path], Decoder | None]) -> dict[Path, int]:
        """One script for each run that has tokens and a tokenizer; its number by the run's folder."""
        numbers: dict[Path, int] = {}
        for home, used in self.used_ids.items():
            decode = decoder_of(home) if used else None
            if decode is None:
                continue
            texts = {str(id): decode(id) for id in sorted(used)}
            write_script(self.folder, "tokens", len(numbers), to_line(texts))
            numbers[home] = len(numbers)
        return numbers


def _write_pages(folder: Path, out: Path, title: str, journals: Sequence[JournalFile]) -> None:
    """The pages in `folder`, which will be renamed `out`."""
    homes: dict[Path, list[JournalFile]] = {}
    for journal in journals:
        homes.setdefault(journal.home, []).append(journal)
    runs = {home: panels_of(read_metrics(home / METRICS)) for home in homes if (home / METRICS).exists()}
    sections = [
        (
            homes[home][0].key.rpartition("/")[0] or title,
            [(panel, _linked(panel, homes[home]), legend(panel)) for panel in panels],
        )
        for home, panels in runs.items()
        if panels
    ]
    links = {"Curves": "curves.html"} if sections else {}
    for name, file in (("Report", "report.html"), ("Benchmark", "benchmark.html")):
        if (out.parent / file).exists():
            links[name] = f"../{file}"
    # A nonce that no recorded text can hold, since it is drawn after all of them.
    page = render_page("episodes.html", title=title, links=links, nonce=secrets.token_urlsafe(18))
    write_text(folder / INDEX, page, errors="replace")
    if sections:
        curves = render_page("curves.html", title=title, sections=sections)
        write_text(folder / "curves.html", curves, errors="replace")


def _linked(panel: Panel, journals: Sequence[JournalFile]) -> Markup:
    """The chart of a run, each point a link to the episodes that its value was computed from."""
    by_step: dict[float, list[JournalFile]] = {}
    for journal in journals:
        if journal.step is not None:
            by_step.setdefault(journal.step, []).append(journal)

    def link(series: Series, step: float) -> str | None:
        behind = _behind(series.key, by_step.get(step, []))
        return link_to(behind) if behind else None

    return draw(panel, link)


def _behind(metric: str, journals: Sequence[JournalFile]) -> Sequence[JournalFile]:
    """Of the files of a step, those of a metric's value: of its evaluation, or of the training step.

    `eval/greedy/hops=2` belongs to the evaluations whose names begin with `greedy`, `eval/aime/sampled` to
    those with `aime/sampled`. Where there is none, it belongs to all of that step.
    """
    kind, *parts = metric.split("/")
    if kind != "eval":
        return [journal for journal in journals if not journal.set]
    evaluations = [journal for journal in journals if journal.set]
    for length in range(len(parts), 0, -1):
        name = file_name("/".join(parts[:length]))
        if own := [journal for journal in evaluations if journal.set.startswith(name)]:
            return own
    return evaluations
