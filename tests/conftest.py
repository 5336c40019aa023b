"""What all tests share: tokens that a command keeps for the next run go where nobody finds them."""

import atexit
import os
import shutil
import tempfile

_CACHE = tempfile.mkdtemp(prefix="ssdplan-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["SSDPLAN_CACHE"] = _CACHE
