"""What all tests share: tokens that a command keeps for the next run go where nobody finds them, and an interruption
interrupts."""

import atexit
import os
import shutil
import signal
import tempfile

_CACHE = tempfile.mkdtemp(prefix="ssdplan-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["SSDPLAN_CACHE"] = _CACHE

# A test run in the background of a script inherits an ignored SIGINT, which Python then leaves ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
