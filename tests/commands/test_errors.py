"""What becomes of an error: one line, and an exit code of its own; what nobody foresaw stays a traceback."""

import os

import pytest
from click.testing import CliRunner

from ssdplan import cli
from ssdplan.commands import doctor

SAYS = [
    "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    "could not create a primitive",
    "std::bad_alloc",
    "can't start new thread",
]


@pytest.mark.parametrize("words", SAYS)
def test_a_process_that_gets_no_more_memory_says_so(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(options: doctor.Options) -> int:
        raise RuntimeError(words)

    monkeypatch.setattr(doctor, "call", call)
    said = CliRunner().invoke(cli.make_command_line(), ["doctor"])
    assert said.exit_code == 4
    assert said.stderr == f"ssdplan: error: the process may take no more memory: {words}\n"


@pytest.mark.parametrize(("number", "code", "words"), [(28, 5, "no space left"), (30, 6, "Read-only file system")])
def test_a_file_that_cannot_be_written_is_named(
    number: int, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(options: doctor.Options) -> int:
        raise OSError(number, os.strerror(number), "steps.csv")

    monkeypatch.setattr(doctor, "call", call)
    said = CliRunner().invoke(cli.make_command_line(), ["doctor"])
    assert (said.exit_code, said.stderr) == (code, f"ssdplan: error: steps.csv: {words}\n")


def test_what_nobody_foresaw_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(options: doctor.Options) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr(doctor, "call", call)
    with pytest.raises(RuntimeError, match="a defect"):
        CliRunner().invoke(cli.make_command_line(), ["doctor"], catch_exceptions=False)


def test_a_doctor_that_cannot_measure_does_not_blame_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ssdplan.profiler import products

    def broken() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(products, "product_costs", broken)
    monkeypatch.setattr("ssdplan.executor.device.device.visible_gpus", tuple)
    said = CliRunner().invoke(cli.make_command_line(), ["doctor"])
    assert said.exit_code == 6
    assert "Input/output error" in said.stdout and "reinstall" not in said.stdout
