"""What becomes of a command when what it writes to is full, closed or gone; and signals that ask for its end."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ssdplan import cli
from ssdplan.commands import doctor
from ssdplan.executor.ranks import place
from ssdplan.native.engines import ENGINES
from ssdplan.plans.errors import StoppedWithSnapshot
from ssdplan.plans.room import no_room
from tests.bounds import HANG_SECONDS

SAYS = """
import sys
import threading
from ssdplan import cli
from ssdplan.commands import doctor
from ssdplan.executor.ranks import place
from ssdplan.plans.views.progress_line import ProgressLine

def call(options):
    line = ProgressLine("doctor")
    for number in range(20):
        line.note("a line " * 50)
    print("more", file=sys.stderr)
    print({results})
    return 0

doctor.call = call
sys.exit(cli.main(["doctor"]))
"""


def command(results: str = "'all of it'", **streams: object) -> subprocess.CompletedProcess[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    code = SAYS.format(results=results)
    return subprocess.run([sys.executable, "-c", code], text=True, timeout=HANG_SECONDS, check=False, **given)  # type: ignore[call-overload,no-any-return]


def test_progress_that_cannot_be_written_ends_nothing() -> None:
    with open("/dev/full", "w") as full:
        done = command(stderr=full)
    assert (done.returncode, done.stdout) == (0, "all of it\n")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command(stderr=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stdout) == (0, "all of it\n")
    done = command(preexec_fn=lambda: os.close(2), stderr=None)
    assert (done.returncode, done.stdout) == (0, "all of it\n")


def test_results_that_cannot_be_written_are_an_error() -> None:
    for results in ("'all of it'", "'all of it' * 100_000"):
        with open("/dev/full", "w") as full:
            done = command(results, stdout=full)
        assert done.returncode == 5
        assert done.stderr.splitlines()[-1] == "ssdplan: error: standard output: no space left"


@pytest.mark.parametrize("results", ["'all of it'", "'all of it' * 100_000"])
def test_a_reader_of_results_may_have_enough(results: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command(results, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 0 and "error" not in done.stderr and "Traceback" not in done.stderr


def test_a_pipe_that_is_not_standard_output_is_no_good_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "call", raising(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    said = invoked("doctor")
    assert said.exit_code == 6 and "Broken pipe" in said.stderr


def test_a_file_opened_later_is_no_standard_stream(tmp_path: Path) -> None:
    """With standard error closed the next file that is opened would get its number, and a library's words."""
    code = (
        "import os, sys\nfrom ssdplan import cli\nfrom ssdplan.commands import doctor\n"
        f"def call(options):\n    file = open({str(tmp_path / 'store')!r}, 'wb')\n    os.write(2, b'a warning')\n"
        "    file.write(b'states')\n    return 0\n"
        "doctor.call = call\nsys.exit(cli.main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=lambda: os.close(2), timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0 and (tmp_path / "store").read_bytes() == b"states"


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(cli.make_command_line(), arguments, catch_exceptions=False)


def raising(error: BaseException) -> Callable[[doctor.Options], int]:
    def call(options: doctor.Options) -> int:
        raise error

    return call


def test_a_run_that_stopped_as_asked_has_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "call", raising(StoppedWithSnapshot()))
    said = invoked("doctor")
    assert said.exit_code == 130 and said.stderr == ""
    monkeypatch.setattr(doctor, "call", raising(KeyboardInterrupt()))
    said = invoked("doctor")
    assert said.exit_code == 130 and said.stderr == "ssdplan: error: interrupted\n"


def test_of_a_rank_that_is_interrupted_the_launcher_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the rank's command had not begun, for another rank failed at once."""
    monkeypatch.setenv(place.LAUNCHED, str(tmp_path))
    monkeypatch.setattr(doctor, "call", raising(KeyboardInterrupt()))
    said = invoked("doctor")
    assert said.exit_code == 130 and said.stderr == ""
    monkeypatch.setattr(place, "_gone", gone := threading.Event())
    gone.set()
    assert invoked("doctor").stderr == "ssdplan: error: interrupted\n", "its launcher was killed"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_request_to_end_is_an_interruption_unless_it_was_ignored(name: str, ignored: bool) -> None:
    if name == "SIGTERM" and ignored:
        pytest.skip("nohup ignores SIGHUP alone")
    code = (
        "import os, signal, sys\nfrom ssdplan import cli\nfrom ssdplan.commands import doctor\n"
        f"def call(options):\n    os.kill(os.getpid(), signal.{name})\n    return 0\n"
        "doctor.call = call\nsys.exit(cli.main(['doctor']))"
    )
    how = signal.SIG_IGN if ignored else signal.SIG_DFL
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: signal.signal(signal.Signals[name], how),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == ((0, "") if ignored else (130, "ssdplan: error: interrupted\n"))


@pytest.mark.parametrize(
    "arguments",
    [
        "run plan.json --data d --steps 1 --out o",
        "run --resume r",
        "profile --model m",
        "export r --to d",
        "volume info .",
        "volume init . --size 32MiB",
        "bench",
        "compare --shape small",
    ],
)
def test_an_engine_that_is_none_is_wrong_usage(arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSDPLAN_IO_ENGINE", "libaio")
    said = invoked(*arguments.split())
    assert said.exit_code == 2
    (line,) = said.stderr.splitlines()
    assert "SSDPLAN_IO_ENGINE=libaio" in line and all(engine in line for engine in ENGINES)
    assert not list(tmp_path.iterdir())


def test_the_engines_are_those_that_the_core_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from ssdplan import native

    with pytest.raises(ValueError, match=" ".join(f".*'{engine}'" for engine in ENGINES).replace(" ", "")):
        native.Engine("libaio")


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(OSError) as caught, (tmp_path / "file").open("wb", buffering=0) as file:
            file.write(bytes(1 << 20))
            file.write(b"1")
        assert "limited to 1 MiB (ulimit -f)" in no_room(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert no_room(OSError(errno.ENOSPC, "")) == "no space left" and no_room(OSError(errno.EIO, "")) == ""
    assert "quota" in no_room(OSError(errno.EDQUOT, ""))
    if limit[0] == resource.RLIM_INFINITY:
        assert "file system" in no_room(OSError(errno.EFBIG, ""))
