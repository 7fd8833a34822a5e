"""transformers without its progress bars and reports: what went wrong comes as an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence inside, as before afterwards."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
