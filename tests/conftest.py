"""What all tests share: tokens that a command keeps for the next run go where nobody finds them, an interruption
interrupts, the longest file is not the last, and what ssdplan cannot be without is named."""

import atexit
import contextlib
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests.extent import FULL, examples

_CACHE = tempfile.mkdtemp(prefix="ssdplan-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["SSDPLAN_CACHE"] = _CACHE
os.environ["SSDPLAN_STATE"] = os.path.join(_CACHE, "state")

_NEEDED = [
    name
    for name in ("click", "numpy", "pydantic", "highspy", "pulp", "yaml", "rich")
    if importlib.util.find_spec(name) is None
]


def pytest_configure() -> None:
    """Without these there is no ssdplan to test: one line, not an error for each file that imports it."""
    if _NEEDED:
        pytest.exit(
            f"ssdplan itself needs {', '.join(_NEEDED)}, which this Python lacks; without a package index: "
            "make gpu WHEELS=DIR (CONTRIBUTING.md, Tests on a GPU)",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


# A busy machine draws and tries examples slowly. Not every machine with a GPU has hypothesis, nor needs it.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any machine",
        deadline=None,
        max_examples=examples(100),
        derandomize=not FULL,  # the same examples in every short run, so what passed here passes there
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")

# A test run in the background of a script inherits an ignored SIGINT, which Python then leaves ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start process after process go first: a worker that began one as the last of all would end alone."""
    items.sort(
        key=lambda item: item.path.parent.name not in ("rivals", "e2e") and item.path.name != "test_gpu_script.py"
    )


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """Every run collects garbage at its beginning; what tests have imported is none, and took it half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _umask_as_it_was() -> Iterator[None]:
    """A command makes what its process writes private, and a test may call one in the process of the others."""
    umask = os.umask(0o022)
    os.umask(umask)
    yield
    os.umask(umask)
