"""What becomes of an error: one line, and an exit code of its own; what nobody foresaw stays a traceback."""

import argparse

import pytest

from ssdplan import cli
from ssdplan.commands import doctor

SAYS = [
    "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    "could not create a primitive",
    "std::bad_alloc",
    "can't start new thread",
]


@pytest.mark.parametrize("words", SAYS)
def test_a_process_that_gets_no_more_memory_says_so(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(options: argparse.Namespace) -> int:
        raise RuntimeError(words)

    monkeypatch.setattr(doctor, "call", call)
    assert cli.main(["doctor"]) == 4
    assert capsys.readouterr().err == f"ssdplan: error: the process may take no more memory: {words}\n"


def test_what_nobody_foresaw_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(options: argparse.Namespace) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr(doctor, "call", call)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["doctor"])


def test_a_doctor_that_cannot_measure_does_not_blame_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ssdplan.profiler import products

    def broken() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(products, "product_costs", broken)
    monkeypatch.setattr("ssdplan.executor.device.visible_gpus", tuple)
    assert cli.main(["doctor"]) == 6
    said = capsys.readouterr()
    assert "Input/output error" in said.err and "reinstall" not in said.out
