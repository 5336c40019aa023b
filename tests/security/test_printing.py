"""What ssdplan prints of texts that came from somebody else steers no terminal."""

import io
import json
import os

import pytest

from ssdplan.commands.streams import Plain
from ssdplan.plans.printable import printable
from ssdplan.plans.views.progress_line import ProgressLine
from tests import warm
from tests.made.models import make_model, make_tokenizer

EVIL = "a\x1b]0;owned\x07b\x9b2Jc\u202egnp\u2066d\re\x00f\u2028g\ud800h"
STEERING = [chr(code) for code in (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x202E, 0x2066, 0x2028, 0x200F)]


def harmless(text: str) -> bool:
    return not any(character in text for character in STEERING)


def test_what_steers_is_written_out_and_all_else_stays():
    assert printable(EVIL) == r"a\x1b]0;owned\x07b\u009b2Jc\u202egnp\u2066d\x0de\x00f\u2028g\ud800h"
    kept = "Zwölf Boxkämpfer\tjagen\nヴィクトル 🎉 ⟦ę⟧"
    assert printable(kept) == kept


def test_json_stays_json_of_the_same_content():
    text = json.dumps({"name": EVIL}, ensure_ascii=False)
    assert json.loads(printable(text)) == {"name": EVIL}


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_a_stream_writes_nothing_that_steers_but_what_the_line_itself_does():
    raw = Terminal()
    stream = Plain(raw, encoding="utf-8", errors="backslashreplace")
    line = ProgressLine("run", stream)
    print(EVIL, file=stream)
    line(0.5, EVIL)
    line.note(EVIL)
    stream.flush()
    written = raw.getvalue().decode()
    assert harmless(written.replace("\r", "")) and written.count("\r") == 3, "to rewrite the line, and to clear it"


def test_errors_name_hostile_files_and_keys_harmlessly(tmp_path):
    evil = "plan\x1b[31m\u202e.json"
    (tmp_path / evil).write_text(json.dumps({"schema": "ssdplan.plan/1", "\x1b]0;x\x07": 1}))
    for code, *arguments in (
        (2, "show", evil),
        (2, "run", evil),
        (2, "show", "missing\x1b[2J"),
        (2, "solve", evil),
        (0, "volume", "info", evil),
    ):
        done = warm.run(*arguments, cwd=tmp_path)
        assert done.returncode == code and harmless(done.stderr + done.stdout), (arguments, done.stderr)


@pytest.mark.parametrize("field", ["raise_exception('\x1b]0;owned\x07')", "undefined_\u202efunction()"])
def test_a_templates_error_is_printed_harmlessly(tmp_path, field):
    make_model("llama", tmp_path / "model", vocab=300)
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ " + field + " }}")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    done = warm.run("data", "preview", "--model", "model", "--data", "chat.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and harmless(done.stderr + done.stdout), done.stderr
    assert "chat.jsonl:1: the chat template refuses the conversation" in done.stderr


def test_a_sample_is_shown_harmlessly_in_colour_and_without(tmp_path):
    make_model("llama", tmp_path / "model", vocab=300)
    make_tokenizer(tmp_path / "model")
    name = "data\x1b[2J.jsonl"
    (tmp_path / name).write_text(json.dumps({"prompt": "Yes", "completion": " \x1b[8mhidden\u202e"}) + "\n")
    for colour in ("--color", "--no-color"):
        done = warm.run("data", "preview", "--model", "model", "--data", name, colour, cwd=tmp_path)
        shown = done.stdout
        for own in ("\x1b[32m", "\x1b[2m", "\x1b[0m"):
            shown = shown.replace(own, "")
        assert done.returncode == 0 and harmless(shown + done.stderr), (done.stdout, done.stderr)
        assert ("\x1b[32m" in done.stdout) == (colour == "--color") and os.linesep in shown
