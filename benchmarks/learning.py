"""Learning without gradients: the demo's model is taught to tell questions from statements by its forwards alone.

Makes a task of classification as text from the demo's plays: a sentence without its last mark in quotes, then ", he",
and " asked." or " said.". The plays that it is judged by are others than it learns from. It profiles, solves with
`--optimizer mezo`, trains, and compares the accuracy of the trained model with that of the first one, both by plain
PyTorch. What is there is kept, so a call that was stopped goes on where it was: to the same bits, as every run does.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import command, end_on_sigterm

sys.path.append(str(Path(__file__).resolve().parent.parent))
import demo

ANSWERS = {"?": " asked.", ".": " said."}
"""What is learnt behind a sentence -> by the mark that the sentence had."""
SENTENCE = re.compile(r"(?<=[.?!] )([A-Z][^.?!\[\]]{24,159})([.?])(?= )")
"""What follows the end of another, within so many characters; and its mark."""
ROWS = 1000
"""To learn from, half of each answer."""
HELD_OUT_ROWS = 400
HELD_OUT_PLAYS = ("winters_tale", "coriolanus", "cymbeline", "richard_ii")
"""What the model is judged by."""
LENGTH = 48
"""Tokens of a row; longer examples are left out."""
AT_ONCE = 8
"""Examples of which plain PyTorch takes both answers at once."""


def main() -> int:
    options = _options()
    end_on_sigterm()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    demo.prepare_assets(work / "assets")
    model = work / "assets" / "model"
    make_task(work, model, options.seed)
    if not (work / "profile.json").exists():
        command(
            "profile", "--model", model, "--volume", work, "--sequence-length", LENGTH, "--precision", "fp32",
            "--micro-batch-sizes", options.rows, "-o", work / "profile.json",
        )  # fmt: skip
    if not (work / "plan.json").exists():
        command(
            "solve", work / "profile.json", "--optimizer", "mezo", "--directions", options.directions, "--host-memory",
            options.host_memory, "--global-batch", options.rows, "-o", work / "plan.json",
        )  # fmt: skip
    run, accuracies = work / "run", work / "accuracies.json"
    found = json.loads(accuracies.read_text()) if accuracies.exists() else {}
    if "0" not in found:
        found["0"] = accuracy(model, work / "held-out.jsonl")
        accuracies.write_text(json.dumps(found))
    print(f"zero-shot: {found['0']:.1%} of {HELD_OUT_ROWS} held-out examples", flush=True)
    _train(options, run)
    for step in sorted({options.steps, *range(options.every, options.steps + 1, options.every)}):
        if str(step) not in found:
            there = work / f"step-{step}"
            if not there.exists():
                command("replay", run, "--step", step, "--to", there)
            found[str(step)] = accuracy(there, work / "held-out.jsonl")
            accuracies.write_text(json.dumps(found))
        print(f"after {step} steps: {found[str(step)]:.1%}", flush=True)
    return 0


def make_task(work: Path, model: Path, seed: int) -> None:
    """Write train.jsonl and held-out.jsonl, unless they are there."""
    if (work / "held-out.jsonl").exists():
        return
    plays = sorted((work / "assets" / "train").glob("*.txt"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name, rows, held_out in (("train.jsonl", ROWS, False), ("held-out.jsonl", HELD_OUT_ROWS, True)):
        found: dict[str, list[str]] = {mark: [] for mark in ANSWERS}
        for play in plays:
            if (play.stem in HELD_OUT_PLAYS) == held_out:
                for sentence, mark in sentences(play.read_text(errors="replace")):
                    prompt = f'"{sentence}", he'
                    if len(tokenizer(prompt + ANSWERS[mark]).input_ids) < LENGTH:  # an end token comes behind it
                        found[mark].append(prompt)
        drawn = random.Random(seed + held_out)
        examples = [(prompt, mark) for mark in ANSWERS for prompt in drawn.sample(found[mark], rows // 2)]
        drawn.shuffle(examples)
        with (work / name).open("w", encoding="utf-8") as file:
            for prompt, mark in examples:
                file.write(json.dumps({"prompt": prompt, "completion": ANSWERS[mark]}) + "\n")


def sentences(text: str) -> list[tuple[str, str]]:
    """Questions and statements that others precede, each without its mark, and the mark: no headings, names of
    speakers or stage directions."""
    lines = [line.strip() for line in text.splitlines()]
    spoken = (line for line in lines if len(line.split()) > 3 and not line.isupper())
    kept = (line for line in spoken if not re.search(r"[\[\]]|Gutenberg|Project|[Ee]text", line))
    return SENTENCE.findall(re.sub(r"\s+", " ", " ".join(kept)))


@torch.no_grad()
def accuracy(model: Path, held_out: Path) -> float:
    """The share of examples whose answer the model finds likelier than the other, by plain PyTorch."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    right, answers = 0, list(ANSWERS.values())
    for begin in range(0, len(rows), AT_ONCE):
        part = rows[begin : begin + AT_ONCE]
        prompts = [len(tokenizer(row["prompt"]).input_ids) for row in part for _ in answers]
        ids = [tokenizer(row["prompt"] + answer).input_ids for row in part for answer in answers]
        longest = max(map(len, ids))
        padded = torch.tensor([each + [0] * (longest - len(each)) for each in ids])
        mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in ids])
        hidden = whole.base_model(input_ids=padded, attention_mask=mask).last_hidden_state
        scores = []
        for row, prompt, each in zip(hidden, prompts, ids, strict=True):
            logits = whole.get_output_embeddings()(row[prompt - 1 : len(each) - 1]).log_softmax(-1)
            scores.append(float(logits.gather(-1, torch.tensor(each[prompt:])[:, None]).sum()))
        for number, row in enumerate(part):
            of_row = scores[number * len(answers) : (number + 1) * len(answers)]
            right += answers[of_row.index(max(of_row))] == row["completion"]
    return right / len(rows)


def _train(options: argparse.Namespace, run: Path) -> None:
    """Up to so many steps, from wherever the run is."""
    work: Path = options.work
    if not (run / "run.json").exists():
        command(
            "run", work / "plan.json", "--data", work / "train.jsonl", "--model", work / "assets" / "model", "--steps",
            options.steps, "--lr", options.lr, "--eps", options.eps, "--lr-schedule", "linear", "--seed", options.seed,
            "--volume", work, "--out", run,
        )  # fmt: skip
        return
    metrics = run / "metrics.jsonl"  # not there where a kill came before the first step
    steps = sum('"loss"' in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0
    if steps < options.steps:
        command("run", "--resume", run, "--steps", options.steps)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".learning"), help="everything lies here [%(default)s]")
    parser.add_argument("--steps", type=int, default=2000, help="[%(default)s]")
    parser.add_argument("--every", type=int, default=400, help="steps between two looks at accuracy [%(default)s]")
    parser.add_argument("--rows", type=int, default=8, help="of a step [%(default)s]")
    parser.add_argument("--directions", type=int, default=1, help="of a step [%(default)s]")
    parser.add_argument("--lr", default="1e-5", help="[%(default)s]")
    parser.add_argument("--eps", default="1e-3", help="[%(default)s]")
    parser.add_argument("--host-memory", default="1GiB", help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="of examples, directions and order [%(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
