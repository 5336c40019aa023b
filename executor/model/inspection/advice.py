"""Advice of the transformers library that is not for whoever has a model looked into.

Owns how long it is left out. Warnings of the library elsewhere are as they were.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def without_advice() -> Iterator[None]:
    """Leaves out what the library warns of when a model is built, runs and makes its loss, such as a `loss_type` that
    is not set (GPT-2): which loss a model has is found out."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
