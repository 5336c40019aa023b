"""What all tests of the executor share."""

from collections.abc import Iterator

import pytest
import torch

from ssdplan.executor import train
from ssdplan.executor.data import previewing
from ssdplan.executor.data.reader import Here
from ssdplan.executor.data.tokens import load_tokenizer


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Sums that are compared bit by bit are made by one thread, and tests run beside each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="package")
def tokenised_here() -> Iterator[None]:
    """A process that reads takes seconds to begin; `data/test_apart.py` has what it does, and commands start it in all
    other tests."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(train, "Apart", lambda model: Here(load_tokenizer(model)))
        patches.setattr(previewing, "look_apart", previewing.look_here)
        yield
