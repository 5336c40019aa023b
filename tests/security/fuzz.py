"""A longer fuzzing of every reader: valid inputs, changed at random, are read in bounded time and memory, or refused.

    python -m tests.security.fuzz --cases 1000 [--seed 0] [--only models]
    python -m tests.security.fuzz --only models --seed 0 --case 17      one case again, with its traceback

Each case is a process of its own, forked from one that has what readers need. It ends well when the reader takes the
input or raises one of our errors, in one line. It fails when another exception leaves the reader, when it takes more
than `SECONDS` or grows by more than `GROWTH_BYTES`, or when it dies. A case's changes follow from the seed, the reader
and the number of the case alone. `test_fuzz.py` is a short slice of this.
"""

import argparse
import copy
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import ipc, parquet

from ssdplan import cli
from ssdplan.commands import run as run_command
from ssdplan.commands.configuration import read_configuration
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import end_tokens, load_tokenizer, vocabulary_of
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.directory.weight_files import left_weights
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.store import Store, inspect
from ssdplan.executor.train import train
from ssdplan.native.process import read_fields
from ssdplan.plans.analysis.curves import read_curves
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.run import Run
from ssdplan.plans.errors import MemoryBudgetError, SsdplanError
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.report_text import describe_report
from ssdplan.plans.views.trace import read_trace
from tests.executor.runs import LENGTH, prepare
from tests.executor.store.test_store import MIB, get, one, put
from tests.made.models import make_tokenizer
from tests.made.plans import make_plan
from tests.made.profiles import made_profile

SECONDS = 60
GROWTH_BYTES = 1 << 30
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 0.5, 1e308, -1e308, float("nan"), float("inf"), 1 << 31, 1 << 63, 10**12, 10**30),
    *("", "x", "\x1b[31m\u202e", "9" * 400, "../../x", "/dev/zero", "\0", "\ud800", [], {}, [[]], {"": None}),
)
_SPLICED = (b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"9" * 5000, b"\xff\xfe", b"\0" * 64, b'"', b"\n", b"\\u")


@dataclass(frozen=True)
class Reader:
    """`read` what lies in a directory, of which one of `files` (patterns) was changed."""

    files: tuple[str, ...]
    read: Callable[[Path, str], object]


def _read_document(home: Path, name: str) -> object:
    if name == "profile.json":
        return Profile.load(home / name)
    if name == "run.yaml":
        return read_configuration(home / name, run_command.command())
    return Plan.load(home / name)


def _read_run(home: Path, name: str) -> object:
    if name == "trace.json":
        return read_trace(home / name, build_schedule(*_parts(home / "plan.json")))
    if name == "report.json":
        return describe_report(home / name)
    if name == "metrics.jsonl":
        read_curves(home / name)
    if name == "run.json":
        Run.load(home / name)
    with reopened(home, adopt=True) as kept:
        return kept.step


def _parts(plan: Path) -> tuple[Any, Any]:
    document = Plan.load(plan)
    return document.model, document.decision


def _show(home: Path, name: str) -> object:
    code = cli.main(["show", str(home)])
    assert code in range(9) and code != MemoryBudgetError.exit_code, code
    if code:
        raise SsdplanError("shown as an error")
    return code


def _read_store(home: Path, name: str) -> object:
    inspect([home])
    store = Store.open([home], one(MIB))
    try:
        return get(store, 0, MIB)
    finally:
        store.close()


def _read_data(home: Path, name: str) -> object:
    data = TextData(home / name, load_tokenizer(home / "tokenizer"), sequence_length=8)
    return data.samples


def _read_model(home: Path, name: str) -> object:
    tokenizer = load_tokenizer(home)
    end_tokens(tokenizer)
    vocabulary_of(home)
    left_weights(home)
    weights = Weights(open_model(home, torch.float32))
    weights.close()
    return weights


READERS = {
    "documents": Reader(("plan.json", "profile.json", "run.yaml"), _read_document),
    "runs": Reader(("run.json", "metrics.jsonl", "report.json", "trace.json", "plan.json"), _read_run),
    "shown": Reader(("run.json", "metrics.jsonl", "report.json", "trace.json", "plan.json"), _show),
    "stores": Reader(("volume-0.ssdplan",), _read_store),
    "data": Reader(("a.jsonl", "a.parquet", "a.arrow", "a.txt", "chat.jsonl"), _read_data),
    "models": Reader(
        ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors*"),
        _read_model,
    ),
}


def make_inputs(home: Path) -> None:
    """A valid input for each reader, in a directory of its name."""
    prepare(home / "made", layers=2)
    model = open_model(home / "made" / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, alpha=0.3, optimizer=0.4, parameters=0.5)
    out = home / "runs"
    train(
        plan,
        model,
        EmulatedDevice(),
        data=home / "made" / "text.txt",
        out=out,
        recipe=Recipe(steps=2, optimizer=AdamW(lr=1e-3, decay_all=False), snapshot_every=1),
        options={"data": str(home / "made" / "text.txt"), "steps": "2", "model": str(home / "made" / "llama")},
    )
    shutil.rmtree(out / "model")
    shutil.copytree(out, home / "shown", ignore=shutil.ignore_patterns("*.ssdplan"))
    (home / "documents").mkdir()
    plan.save(home / "documents" / "plan.json")
    made_profile().save(home / "documents" / "profile.json")
    (home / "documents" / "run.yaml").write_text(
        "plan: plan.json\ndata: a.txt\nsteps: 3\nvolume:\n- a\n- b\npack: false\n"
    )
    store = Store.create([home / "stores"], one(MIB), "ab" * 32, durable=True)
    for step in (1, 2):
        put(store, 0, bytes([step]) * MIB)
        store.commit({"step": step})
    store.close()
    shutil.copytree(home / "made" / "llama", home / "models")
    data = home / "data"
    data.mkdir()
    make_tokenizer(data / "tokenizer")
    rows = [{"text": f"row {i}: the quick brown fox"} for i in range(12)]
    (data / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "a.txt").write_text("\n".join(row["text"] for row in rows))
    talk = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]}
    (data / "chat.jsonl").write_text("".join(json.dumps(talk) + "\n" for _ in rows))
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, data / "a.parquet", row_group_size=5)
    with pyarrow.OSFile(str(data / "a.arrow"), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def changed(data: bytes, rng: random.Random) -> bytes:
    """Other bytes, or another document where it is one of JSON."""
    if rng.random() < 0.6:
        lines = data.splitlines(keepends=True) if rng.random() < 0.5 else [data]
        at = rng.randrange(len(lines)) if lines else 0
        try:
            document = json.loads(lines[at])
        except (ValueError, IndexError):
            pass
        else:
            for _ in range(rng.randint(1, 3)):
                document = _edited(document, rng)
            lines[at] = json.dumps(document).encode() + (b"\n" if lines[at].endswith(b"\n") else b"")
            return b"".join(lines)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        how = rng.choice(("flip", "flip", "cut", "splice", "take out", "double", "fill", "number"))
        length = min(1 << rng.randrange(12), len(data))
        if how == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif how == "cut":
            data = data[:at]
        elif how == "splice":
            data = data[:at] + rng.choice(_SPLICED) + data[at:]
        elif how == "take out":
            data = data[:at] + data[at + length :]
        elif how == "double":
            data = data[: at + length] + data[at:]
        elif how == "fill":
            data = data[:at] + rng.choice((b"\0", b"\xff", b"\x7f", b"[")) * length + data[at + length :]
        elif how == "number":
            data = data[:at] + rng.choice((b"\xff" * 8, b"\0" * 7 + b"\x40", b"\x7f" * 4)) + data[at + 8 :]
    return data


def _edited(document: Any, rng: random.Random) -> Any:
    """A document with one value of it changed, taken away or renamed."""
    at, above = document, None
    key: Any = None
    while isinstance(at, dict | list) and at and (above is None or rng.random() < 0.75):
        above, key = at, rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = at[key]
    if above is None:
        return copy.deepcopy(rng.choice(HOSTILE))
    how = rng.choice(("put", "put", "put", "nest", "take away", "rename", "grow"))
    if how == "put":
        above[key] = copy.deepcopy(rng.choice(HOSTILE))
    elif how == "nest":
        for _ in range(rng.choice((3, 300))):
            at = [at] if rng.random() < 0.5 else {"a": at}
        above[key] = at
    elif how == "take away":
        del above[key]
    elif how == "rename" and isinstance(above, dict):
        above[f"{key}s"] = above.pop(key)
    elif how == "grow" and isinstance(at, int | float | str | list):
        above[key] = at * rng.choice((-1, 2, 1000))
    return document


def outcome(reader: str, home: Path, seed: int, case: int, *, told: bool = False) -> str:
    """How a case ended: `taken`, `refused`, or what is wrong. `told`: with the traceback of what is wrong."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        os.close(readable)
        os.set_blocking(writable, True)
        code = 1
        try:
            said = _case(reader, home, seed, case, told=told)
            os.write(writable, said.encode(errors="replace")[:4000])
            code = 0
        finally:
            os._exit(code)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    shutil.rmtree(home / f"{reader}-{case}", ignore_errors=True)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"longer than {SECONDS} seconds" if number == signal.SIGALRM else f"died by signal {number}"
    return said or "died without a word"


def _case(reader: str, home: Path, seed: int, case: int, *, told: bool) -> str:
    rng = random.Random(f"{seed}:{reader}:{case}")
    place = home / f"{reader}-{case}"
    shutil.copytree(home / reader, place)
    files = sorted({path.name for pattern in READERS[reader].files for path in place.glob(pattern)})
    name = rng.choice(files)
    if case >= 0:
        (place / name).write_bytes(changed((place / name).read_bytes(), rng))
    if not told:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
    size = int(dict(read_fields(Path("/proc/self/status")))["VmSize"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + GROWTH_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    try:
        READERS[reader].read(place, name)
    except SsdplanError as error:
        return "refused" if len(str(error).splitlines()) <= 1 else f"{name}: an error of several lines: {error}"
    except BaseException as error:
        if told:
            traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{name}: {type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:200]}"
    return "taken"


def fuzz(home: Path, readers: Sequence[str], cases: int, seed: int) -> tuple[dict[str, Counter[str]], list[str]]:
    """How many cases of each reader were taken and refused, and what is wrong with the others."""
    counts, wrong = {reader: Counter[str]() for reader in readers}, []
    gc.freeze()  # or every child copies what it collects
    for reader in readers:
        assert (said := outcome(reader, home, seed, -1)) == "taken", f"{reader}: what is not changed: {said}"
        for case in range(cases):
            said = outcome(reader, home, seed, case)
            counts[reader][said if said in ("taken", "refused") else "wrong"] += 1
            if said not in ("taken", "refused"):
                wrong.append(f"{reader} case {case} of seed {seed}: {said}")
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100, help="of each reader")
    parser.add_argument("--case", type=int, help="this one alone, with what it says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=READERS, action="append")
    options = parser.parse_args()
    readers = options.only or list(READERS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ssdplan-fuzz-") as folder:
        home = Path(folder)
        os.environ["SSDPLAN_CACHE"], os.environ["SSDPLAN_STATE"] = str(home / "cache"), str(home / "state")
        make_inputs(home)
        if options.case is not None:
            said = outcome(readers[0], home, options.seed, options.case, told=True)
            print(said)
            return said not in ("taken", "refused")
        counts, wrong = fuzz(home, readers, options.cases, options.seed)
    for reader, found in counts.items():
        print(f"{reader:10} {found.total():6} cases: {dict(sorted(found.items()))}")
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
