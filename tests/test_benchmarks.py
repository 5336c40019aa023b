"""The benchmark scripts leave nothing behind when they are told to end."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bounds import HANG_SECONDS

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "prediction.py"


def test_a_script_that_is_told_to_end_takes_its_process_and_its_folder_along(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 24 << 30:
        pytest.skip("the script wants 24 GiB free before it begins")
    command = [sys.executable, str(SCRIPT), "--work", str(tmp_path), "--only", "tiny"]
    script = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{script.pid}/task/{script.pid}/children")
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while not (found := children.read_text().split()):
            assert time.monotonic() < deadline and script.poll() is None
            time.sleep(0.05)
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=HANG_SECONDS) != 0
    finally:
        script.kill()
        script.wait()
    assert not list(tmp_path.iterdir())
    assert not [child for child in found if Path("/proc", child).exists()]


def test_a_process_does_not_outlive_a_script_that_is_told_to_end_while_it_begins() -> None:
    code = (
        "import os, signal, subprocess, sys\n"
        "import commands\n"
        "class Begun(subprocess.Popen):\n"
        "    def __init__(self, *arguments, **options):\n"
        "        super().__init__(*arguments, **options)\n"
        "        print(self.pid, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "subprocess.Popen = Begun\n"
        "commands.end_on_sigterm()\n"
        "commands.output([sys.executable, '-c', 'import time; time.sleep(100000)'])\n"
    )
    script = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert "KeyboardInterrupt" in script.stderr
    child = int(script.stdout)
    if Path(f"/proc/{child}").exists():
        os.kill(child, signal.SIGKILL)
        pytest.fail("its process goes on")
