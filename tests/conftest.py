"""What all tests share: tokens that a command keeps for the next run go where nobody finds them, and an interruption
interrupts."""

import atexit
import gc
import os
import shutil
import signal
import tempfile

import pytest

_CACHE = tempfile.mkdtemp(prefix="ssdplan-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["SSDPLAN_CACHE"] = _CACHE

# A test run in the background of a script inherits an ignored SIGINT, which Python then leaves ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """Every run collects garbage at its beginning; what tests have imported is none, and took it half a second each."""
    gc.collect()
    gc.freeze()
