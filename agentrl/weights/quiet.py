"""transformers without progress bars and log messages; failures still raise exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn progress bars and logging off for the block, and restore both settings afterwards."""
    progress_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if progress_bars:
            logging.enable_progress_bar()
