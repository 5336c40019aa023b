"""Random models for benchmarks: what their help promises of them."""

import sys

import pytest
from transformers import AutoTokenizer

from ssdplan.executor.model.directory import random_model


def test_the_help_says_that_there_is_no_chat_template(tmp_path, monkeypatch, capsys):
    shape = random_model.Shape(hidden=64, layers=1, vocab=320)
    random_model.write_random_model(shape, tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template is None
    monkeypatch.setattr(sys, "argv", ["random_model", "--help"])
    with pytest.raises(SystemExit):
        random_model.main()
    said = " ".join(capsys.readouterr().out.split())
    assert "The tokenizer has no chat template, so train it on texts" in said
