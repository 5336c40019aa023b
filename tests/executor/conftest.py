"""What all tests of the executor share."""

from collections.abc import Iterator

import pytest
import torch

from ssdplan.executor import train
from ssdplan.executor.data import previewing
from ssdplan.executor.data.reader import Here
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.model import model as opening
from tests.inspected import inspect_once

INSPECTING = ("test_architectures.py", "test_model.py", "test_weight_files.py")
"""Files that are about what an inspection finds, or about opening a model."""


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


@pytest.fixture(autouse=True, scope="module")
def inspected_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of runs open alike models again and again."""
    with pytest.MonkeyPatch.context() as patches:
        if request.path.name not in INSPECTING:
            patches.setattr(opening, "inspect", inspect_once)
        yield
