"""What a comparison makes of a model runs no code that the model brings along."""

import json

import pytest

from ssdplan.plans.errors import UsageError
from tests.made.models import make_model, make_tokenizer
from tests.rivals.test_parts import made


def test_a_tokenizer_that_needs_code_of_its_own_is_refused_and_the_code_not_run(tmp_path, monkeypatch):
    source = make_tokenizer(make_model("llama", tmp_path / "source", vocab=320, hidden=32))
    (source / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("the quick brown fox " * 20)
    (tmp_path / "made").mkdir()
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(UsageError, match="--data needs the model's tokenizer") as refused:
        made(tmp_path / "made", shape="", model=str(source), data=str(tmp_path / "text.txt"), vocab=320, rows=1)
    assert "\n" not in str(refused.value) and not (tmp_path / "ran").exists()
