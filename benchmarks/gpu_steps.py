"""The steps of `benchmarks/gpu.py`, each run as a process of its own: `gpu_steps.py NAME --out DIR ...`.

Owns what each does with ssdplan and its commands; what needs torch alone is in `gpu_probes.py`. Findings go to
`--figures`, a line of JSON each, as they are made.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from commands import end_on_sigterm, write_text

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {
    "click": "click",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "highspy": "highspy",
    "pulp": "pulp",
    "networkx": "networkx",
    "pandas": "pandas",
    "dateutil": "python-dateutil",
}
"""Module -> package: what ssdplan cannot be without, and an installation of PyTorch and transformers may lack."""
OLDEST_CLICK = (8, 5)
FOR_TESTS = {"gguf": "gguf"}
"""What only some tests need, which skip without."""
FOR_SPEED = {"execnet": "execnet", "xdist": "pytest-xdist"}
"""What lets several tests run at once; without, they run one after another."""
TO_BUILD = {"scikit_build_core": "scikit-build-core", "pybind11": "pybind11", "cmake": "cmake", "ninja": "ninja"}
"""What building ssdplan needs, where it is not installed; the last two may also be programs of the system."""
OTHERS = ("numpy", "torch", "transformers", "accelerate", "safetensors", "yaml", "rich", "matplotlib")
SHOWN = ("torch", "transformers", "accelerate", "numpy", "pytest", "hypothesis", *NEEDED.values(), *FOR_TESTS.values())


@dataclass(frozen=True)
class Given:
    """What a step is told."""

    out: Path
    device: str
    figures: Path
    target: Path
    volume: Path
    seconds: float
    wheels: Path | None

    @property
    def dry(self) -> bool:
        """Whether there is no GPU, so that all is tiny."""
        return self.device == "cpu"

    def note(self, **found: Any) -> None:
        """Write down findings at once."""
        with self.figures.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(json.dumps(found), flush=True)


def build(given: Given) -> None:
    """Take missing packages from the folder of wheels, build ssdplan where it is not installed, say what there is."""
    folder = given.wheels
    installed = _imports_ssdplan(PYTHONPATH="")  # what an earlier call built may be of an earlier checkout
    needed = NEEDED if installed else NEEDED | TO_BUILD
    for module, package in (needed | FOR_TESTS | FOR_SPEED).items():
        if folder and not _there(module):
            _pip("--find-links", str(folder), package, target=given.target, needed=False)
    missing = [package for module, package in needed.items() if not _there(module)]
    lacking = [package for module, package in FOR_TESTS.items() if not _there(module)]
    lacks = [module for module in OTHERS if not _there(module)]
    given.note(missing=missing + lacks, lacking_for_tests=lacking, python=sys.version.split()[0], versions=_versions())
    given.note(gpus=_gpus() if _there("torch") else [])
    if missing or lacks:
        raise SystemExit(_words_of_missing(missing + lacks, missing + lacking))
    if lacking:
        print(f"without {', '.join(lacking)} the tests that need them skip")
    if not installed:
        started = time.monotonic()
        _pip("--no-build-isolation", str(ROOT), target=given.target, needed=True)
        given.note(build_seconds=round(time.monotonic() - started, 1))
    if not _imports_ssdplan():
        raise SystemExit(f"ssdplan was built into {given.target}, but {sys.executable} does not import it")
    given.note(ssdplan=True)
    doctor = subprocess.run([*_ours("doctor", given.volume, "--json")], capture_output=True, text=True, check=False)
    (given.out / "doctor.json").write_text(doctor.stdout, encoding="utf-8")
    print(doctor.stderr)
    given.note(doctor_exit=doctor.returncode, doctor=json.loads(doctor.stdout))


def _there(module: str) -> bool:
    importlib.invalidate_caches()
    program = module in ("cmake", "ninja") and shutil.which(module) is not None
    if module == "click" and importlib.util.find_spec(module) is not None:
        return tuple(map(int, importlib.metadata.version("click").split(".")[:2])) >= OLDEST_CLICK
    return program or importlib.util.find_spec(module) is not None


def _imports_ssdplan(**environment: str) -> bool:
    """From elsewhere than the checkout, whose folders are not yet the package."""
    call, there = [sys.executable, "-P", "-c", "import ssdplan.native"], tempfile.gettempdir()
    done = subprocess.run(call, cwd=there, env=os.environ | environment, capture_output=True, check=False)
    return done.returncode == 0


def _pip(*what: str, target: Path, needed: bool) -> None:
    call = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    done = subprocess.run([*call, "--target", str(target), *what], check=False)
    if done.returncode and needed:
        raise SystemExit(f"pip could not install {what[-1]}")
    if str(target) not in sys.path:
        sys.path.insert(0, str(target))


def _words_of_missing(needed: list[str], wanted: list[str]) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"ssdplan needs {', '.join(needed)}, which this Python lacks. In a checkout on a machine with a package index: "
        f"pip download --no-deps --only-binary=:all: --python-version {version} --platform manylinux_2_28_x86_64 "
        "--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c constraints.txt -d wheels "
        f"{' '.join(wanted)}; then here: make gpu PYTHON={sys.executable} WHEELS=wheels"
    )


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def probes(given: Given) -> None:
    """What torch alone tells of the GPU."""
    from gpu_probes import probe

    probe(given.device, given.note, tiny=given.dry)


def layers(given: Given) -> None:
    """Seconds of a block, forward and backward: many ops begun one after the other, and each waited for, as runs do."""
    import torch

    from ssdplan.executor.device.device import open_device
    from ssdplan.executor.model.layers import Layers, MicroBatch
    from ssdplan.executor.model.model import open_model

    device = open_device(given.device)
    length, ops = (32, 3) if given.dry else (2048, 30)
    for hidden in (64,) if given.dry else (4096,):
        with tempfile.TemporaryDirectory(dir=given.volume) as folder:
            model = open_model(_model(Path(folder), hidden=hidden, layers=1, vocab=320), torch.bfloat16)
            runs = Layers(model, device.torch_device)
        for rows in (1,) if given.dry else (1, 4):
            ids = torch.randint(320, (rows, length))
            with device.lane("compute"):

                def made(elements: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
                    return torch.randn(elements, device=device.torch_device, dtype=dtype) * 0.02

                embedding, block = (made(model.states[model.layers[layer].states[0]].elements) for layer in (0, 1))
                sums = made(block.numel(), torch.float32)
                hidden_states, out, out_gradient, in_gradient = (made(rows * length * hidden) for _ in range(4))
                runs.begin_step(0, [MicroBatch(ids, ids)])
                runs.forward(0, 0, [embedding], None, hidden_states)
                forward = partial(runs.forward, 1, 0, [block], hidden_states, out)
                backward = partial(runs.backward, 1, 0, [block], hidden_states, out_gradient, in_gradient, [sums])
                for name, op in (("forward", forward), ("backward", backward)):
                    key = f"{name} of hidden {hidden}, {rows} x {length}"
                    given.note(**{key: _paces(op, ops, device)})
                    if not given.dry:
                        torch.use_deterministic_algorithms(False)
                        given.note(**{f"{key}, not deterministic": _paces(op, ops, device)})
                        torch.use_deterministic_algorithms(True)


def _paces(op: Callable[[], None], ops: int, device: Any) -> dict[str, float]:
    """Seconds of an op: pipelined, by the GPU's clock; by the host's until it has begun, and with a wait after each."""
    from gpu_probes import Clock

    clock = Clock(device.kind == "cuda")
    for _ in range(2):
        op()
    clock.synchronize()
    started = time.perf_counter()
    with clock.measured() as pipelined:
        for _ in range(ops):
            op()
        begun = time.perf_counter() - started
    started = time.perf_counter()
    for _ in range(ops):
        op()
        clock.synchronize()
    synchronised = time.perf_counter() - started
    return {"pipelined": pipelined.seconds / ops, "begun": begun / ops, "synchronised": synchronised / ops}


TESTS_AT_ONCE = 12
_OUTCOMES = "(PASSED|FAILED|ERROR|SKIPPED)"
_OUTCOME = re.compile(rf"(?:(tests/\S+::.*?) {_OUTCOMES}|\[gw\d+\].*? {_OUTCOMES} (tests/\S+::.*))")
"""A test's line as pytest writes it, and as it does where several processes run tests."""


def tests(given: Given) -> None:
    """Those marked gpu; of files that have none, nothing is imported. With pytest-xdist, several at once."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    beside = ["-n", str(TESTS_AT_ONCE)] if _there("xdist") and not given.dry else []
    call = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", *beside, *map(str, files)]
    counts: dict[str, int] = {}
    bad: list[str] = []
    with subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := _OUTCOME.match(line):
                name, outcome = found[1] or found[4], found[2] or found[3]
                counts[outcome.lower()] = counts.get(outcome.lower(), 0) + 1
                if outcome in ("FAILED", "ERROR"):
                    bad.append(name)
                given.note(counts=counts, failed_tests=bad)
    if process.returncode < 0 and bad:  # it died before it said what was wrong with them
        subprocess.run([*call[:6], *bad], cwd=ROOT, check=False)
    if process.returncode:
        raise SystemExit(f"pytest ended with {process.returncode}")


def train(given: Given) -> None:
    """Hidden 2048, 6 layers, 2048 tokens, 4 micro-batches of 4 rows: with 12 GiB of host memory, with and without
    recomputation, then with 4 GiB, so that the SSD works."""
    shape = {"hidden": 64, "layers": 2, "vocab": 320} if given.dry else {"hidden": 2048, "layers": 6, "vocab": 32000}
    length, rows = (32, 1) if given.dry else (2048, 4)
    with tempfile.TemporaryDirectory(prefix="ssdplan-gpu-", dir=given.volume) as name:
        folder = Path(name)
        started = time.monotonic()
        model = _model(folder, **shape)
        given.note(model_seconds=round(time.monotonic() - started, 1))
        profile, plan, text = given.out / "profile.json", given.out / "plan.json", folder / "text.txt"
        write_text(text, 400)
        _command("profile", "--model", model, "--device", given.device, "--sequence-length", length,
                 "--micro-batch-sizes", rows, "--precision", "fp32" if given.dry else "bf16",
                 "--seconds", 3 if given.dry else 10, "--volume", folder, "-o", profile)  # fmt: skip
        measured = json.loads(profile.read_text("utf-8"))
        given.note(machine=measured["machine"], profile_notes=measured["notes"])
        sizes = ("--micro-batch-size", rows, "--micro-batches", 4)
        first = []
        for recompute in ("all", "auto"):  # states in host memory, so that compute bounds the step
            memory = "16MiB" if given.dry else "12GiB"
            other, run = given.out / f"plan-recompute-{recompute}.json", folder / f"recompute-{recompute}"
            _command("solve", profile, "--host-memory", memory, *sizes, "--recompute", recompute, "-o", other)
            _command("run", other, "--data", text, "--steps", 4, "--volume", folder, "--out", run)
            first.append(_losses(run))
            shutil.copy(run / "trace.json", given.out / f"trace-recompute-{recompute}.json")
            given.note(
                **{
                    f"recompute_{recompute}_decision": json.loads(other.read_text("utf-8"))["decision"],
                    f"recompute_{recompute}_report": json.loads((run / "report.json").read_text("utf-8")),
                }
            )
            shutil.rmtree(run)
        given.note(losses_with_and_without_recomputation=first)
        assert first[0] == first[1], "saved activations changed a loss"
        memory = ("16MiB", "--residency", "optimizer=0") if given.dry else ("4GiB",)  # else a tiny model fits whole
        _command("solve", profile, "--host-memory", *memory, *sizes, "-o", plan)
        given.note(decision=json.loads(plan.read_text("utf-8"))["decision"])
        run = folder / "run"
        try:
            _command("run", plan, "--data", text, "--steps", 3 if given.dry else 4, "--volume", folder, "--out", run)
        finally:
            for left in ("metrics.jsonl", "report.json", "trace.json"):
                if (run / left).exists():
                    shutil.copy(run / left, given.out / left)
        given.note(report=json.loads((run / "report.json").read_text("utf-8")))
        shown = _command("show", run, "--json")
        (given.out / "overlay.json").write_text(shown, encoding="utf-8")
        given.note(overlay=json.loads(shown).get("overlay"))


def _losses(run: Path) -> list[float]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line and "step" in line]


def sanitizer(given: Given) -> None:
    """Two steps of a tiny model, serial and overlapped, under torch's sanitizer: no race between streams, one loss."""
    with tempfile.TemporaryDirectory(prefix="ssdplan-gpu-", dir=given.volume) as name:
        folder = Path(name)
        model = _model(folder, hidden=64, layers=2, vocab=320)
        write_text(text := folder / "text.txt", 50)
        _command("profile", "--model", model, "--device", given.device, "--sequence-length", 32,
                 "--micro-batch-sizes", 1, "--precision", "fp32", "--seconds", 1, "--volume", folder,
                 "-o", folder / "profile.json")  # fmt: skip
        _command("solve", folder / "profile.json", "--host-memory", "16MiB", "--micro-batches", 3, "-o",
                 folder / "plan.json")  # fmt: skip
        losses = {}
        watched = {} if given.dry else {"TORCH_CUDA_SANITIZER": "1"}  # a torch without CUDA ends at the mere name
        for mode, options in (("serial", ["--serial"]), ("overlapped", [])):
            _command("run", folder / "plan.json", "--data", text, "--steps", 2, "--volume", folder,
                     "--out", folder / mode, *options, **watched)  # fmt: skip
            losses[mode] = json.loads((folder / mode / "report.json").read_text("utf-8"))["losses"]
            given.note(losses=losses)
        if losses["serial"] != losses["overlapped"]:
            raise SystemExit(f"the losses differ: {losses}")


def _model(folder: Path, **shape: int) -> Path:
    path = folder / "model"
    options = [word for name, value in shape.items() for word in (f"--{name}", value)]
    _call([sys.executable, "-m", "ssdplan.executor.model.directory.random_model", *options, "--out", path])
    return path


def _ours(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ssdplan.cli", *map(str, arguments)]


def _command(*arguments: object, **environment: str) -> str:
    return _call(_ours(*arguments), **environment)


def _call(call: list[Any], **environment: str) -> str:
    """A process's standard output. SystemExit with all that it said where it fails."""
    done = subprocess.run(
        list(map(str, call)), env=os.environ | environment, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr, sep="\n", flush=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, call[1:4]))} ended with {done.returncode}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=[step.__name__ for step in _STEPS])
    for name in ("out", "figures", "target", "volume"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--wheels", type=Path)
    options = vars(parser.parse_args())
    end_on_sigterm()
    step = options.pop("step")
    next(each for each in _STEPS if each.__name__ == step)(Given(**options))


_STEPS = (build, probes, layers, tests, train, sanitizer)

if __name__ == "__main__":
    main()
