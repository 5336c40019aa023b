"""Ranks over an emulated Ethernet: steps as predicted and as measured, and bytes on the wire.

It makes a network namespace for each rank, joined by a bridge, with a rate on each rank's own interface; it needs root
for that, and removes them again. Each rank has a core of its own. For each rate it profiles all ranks together, solves,
trains a few steps, and counts the bytes that the first rank's interface has sent. With --rival PyTorch's FSDP2 trains
the same batch beside it (`rivals/fsdp_arm.py`), resharding after each micro-batch and not.

    python benchmarks/network.py --work DIR --model DIR --data FILE [--ranks 2] [--rates 1gbit,250mbit]
        [--micro-batches 4] [--steps 4] [--sequence-length 256] [--host-memory 2GiB] [--precision bf16]
        [--rival]
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from commands import MOST_SECONDS, end_on_sigterm
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.graph.collectives import Collective
from ssdplan.plans.schedule.build import build_schedule

PORT = 29500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="where everything is written")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a model directory")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="a text")
    parser.add_argument("--ranks", type=int, default=2, metavar="R", help="how many [2]")
    parser.add_argument("--rates", default="1gbit,250mbit", metavar="RATE,...", help="as tc says them [1gbit,250mbit]")
    parser.add_argument("--micro-batches", default="4", metavar="N,...", help="of a rank [4]")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="of each run [4]")
    parser.add_argument("--sequence-length", type=int, default=256, metavar="S", help="tokens a row [256]")
    parser.add_argument("--host-memory", default="2GiB", metavar="SIZE", help="of a rank [2GiB]")
    parser.add_argument("--precision", default="bf16", metavar="P", help="as ssdplan profile [bf16]")
    parser.add_argument("--rival", action="store_true", help="FSDP2 too")
    given = parser.parse_args()
    end_on_sigterm()
    work = given.work.absolute()
    print("rate      micro-batches  predicted  measured      error  network  sent a step  planned")
    for rate in given.rates.split(","):
        with hosts(given.ranks, rate) as names:
            profile = work / f"profile-{rate}.json"
            on_all(names, work, "ssdplan", "profile", "--model", given.model.absolute(), "--sequence-length",
                   given.sequence_length, "--micro-batch-sizes", 1, "--precision", given.precision, "--volume", work,
                   "-o", profile)  # fmt: skip
            for micro_batches in given.micro_batches.split(","):
                plan = work / f"plan-{rate}-{micro_batches}.json"
                run([sys.executable, "-m", "ssdplan", "solve", str(profile), "--host-memory", given.host_memory,
                     "--micro-batches", micro_batches, "--micro-batch-size", "1", "-o", str(plan)])  # fmt: skip
                out = work / f"run-{rate}-{micro_batches}"
                shutil.rmtree(out, ignore_errors=True)
                before = sent(names[0])
                on_all(
                    names,
                    work,
                    "ssdplan",
                    "run",
                    plan,
                    "--data",
                    given.data.absolute(),
                    "--steps",
                    given.steps,
                    "--out",
                    out,
                )
                print(row(rate, Plan.load(plan), out, sent(names[0]) - before, given.steps), flush=True)
                for reshards in (True, False) if given.rival else ():
                    before = sent(names[0])
                    on_all(names, work, "ssdplan.rivals.fsdp_arm", given.model.absolute(), "--micro-batches",
                           micro_batches, "--steps", given.steps, "--sequence-length", given.sequence_length,
                           "--precision", given.precision, *(["--reshard"] if reshards else []))  # fmt: skip
                    lines = (work / "rank-0.log").read_text().splitlines()
                    took = [json.loads(line)["step_seconds"] for line in lines if line.startswith("{")][1:]
                    name = "FSDP2, resharding" if reshards else "FSDP2, keeping"
                    moved = (sent(names[0]) - before) / given.steps / 1e6
                    print(f"{rate:9} {name:25}  {statistics.median(took):6.2f} s {moved:28.1f} MB", flush=True)


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[list[str]]:
    """So many namespaces on one bridge, 10.77.0.1 and on, each of which sends at most at `rate`."""
    own = f"ssdplan-{os.getpid()}"
    names = [f"{own}-{number}" for number in range(count)]
    bridge = f"{own}-bridge"
    try:
        for name in (bridge, *names):
            run(["ip", "netns", "add", name])
        within(bridge, "ip link add bridge type bridge")
        within(bridge, "ip link set bridge up")
        for number, name in enumerate(names):
            within(bridge, f"ip link add port{number} type veth peer name eth0 netns {name}")
            within(bridge, f"ip link set port{number} master bridge up")
            within(name, f"ip address add 10.77.0.{number + 1}/24 dev eth0")
            within(name, "ip link set eth0 up")
            within(name, "ip link set lo up")
            within(name, f"tc qdisc add dev eth0 root tbf rate {rate} burst 1mb latency 100ms")
        yield names
    finally:
        for name in (bridge, *names):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def within(name: str, command: str) -> str:
    return run(["ip", "netns", "exec", name, *command.split()])


def run(call: list[str]) -> str:
    done = subprocess.run(call, capture_output=True, text=True, timeout=MOST_SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(call)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def sent(name: str) -> int:
    """Bytes that the interface of a host has sent."""
    return int(within(name, "cat /sys/class/net/eth0/statistics/tx_bytes"))


def on_all(names: list[str], work: Path, module: str, *arguments: object) -> None:
    """A module as one rank on each host, with a core each, as far as there are."""
    cores = sorted(os.sched_getaffinity(0))
    processes = []
    try:
        for rank, name in enumerate(names):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(len(names)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
            call = ["ip", "netns", "exec", name, "taskset", "-c", str(cores[rank % len(cores)]), sys.executable, "-m",
                    module, *map(str, arguments)]  # fmt: skip
            log = (work / f"rank-{rank}.log").open("w")
            processes.append(subprocess.Popen(call, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=work))
        codes = [process.wait(timeout=MOST_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        said = "\n".join((work / f"rank-{rank}.log").read_text()[-2000:] for rank in range(len(names)))
        raise SystemExit(f"{arguments[0]} ended with {codes}:\n{said}")


def row(rate: str, plan: Plan, out: Path, sent_bytes: int, steps: int) -> str:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median([line["step_seconds"] for line in lines if "loss" in line][1:])
    predicted, network = plan.prediction.step_seconds, plan.prediction.busy["network"]
    times = f"{predicted:7.2f} s  {seconds:6.2f} s  {seconds / predicted - 1:+9.1%}"
    return (
        f"{rate:9} {plan.decision.micro_batches:13}  {times}"
        f"  {network:7.0%}  {sent_bytes / steps / 1e6:8.1f} MB  {planned(plan) / 1e6:7.1f} MB"
    )


def planned(plan: Plan) -> int:
    """Bytes that a rank sends in a steady step."""
    ops = build_schedule(plan.model, plan.decision).emitted("steady")
    return sum(op.nbytes for op in ops if isinstance(op, Collective))


if __name__ == "__main__":
    main()
