"""Both runners obey the waits; the overlapped one really overlaps, and stops cleanly on an error."""

import random
import signal
import statistics
import threading
import time
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ssdplan.executor.device.tensors import DTYPES
from ssdplan.executor.runtime.runner import IN_FLIGHT, OverlappedRunner, SerialRunner
from ssdplan.plans.graph.ops import RESOURCES, Graph, Region
from ssdplan.plans.schedule.build import build_schedule
from tests.bounds import HANG_SECONDS
from tests.executor.runtime.devices import in_place
from tests.made.decisions import decide
from tests.made.profiles import made_model
from tests.plans.hand_made import made_transfer
from tests.processor import PRECISION


def chain(*ops: tuple[str, tuple[int, ...]]) -> Graph:
    region = Region(0, 0, 4096)
    return Graph(
        "made",
        tuple(
            made_transfer(i, kind, region, region, waits=waits, state_name=f"{i}")
            for i, (kind, waits) in enumerate(ops)
        ),
        1,
    )


@pytest.fixture(params=["serial", "overlapped"])
def runner(request):
    made = SerialRunner(in_place) if request.param == "serial" else OverlappedRunner(in_place)
    yield made
    made.close()


def test_waits_are_obeyed_and_times_recorded(runner):
    graph = chain(("read", ()), ("h2d", (0,)), ("read", ()), ("write", (1, 2)), ("d2h", ()))
    done: list[int] = []
    actions = [lambda i=i: (time.sleep(0.01), done.append(i)) for i in range(5)]
    for _ in range(20):
        done.clear()
        timeline = runner.run(graph, actions)
        assert sorted(done) == list(range(5))
        for op in graph.ops:
            for wait in op.waits:
                assert done.index(wait) < done.index(op.index)
                assert timeline.ends[wait] <= timeline.starts[op.index]
        assert timeline.seconds >= 0.03


def test_independent_lanes_overlap_and_one_lane_does_not():
    runner = OverlappedRunner(in_place)
    graph = chain(("read", ()), ("write", ()), ("read", ()))
    meeting = threading.Barrier(2, timeout=HANG_SECONDS)
    timeline = runner.run(graph, [meeting.wait, meeting.wait, lambda: None])
    assert timeline.starts[2] >= timeline.ends[0]
    runner.close()


def test_of_ready_ops_the_first_in_the_graph_starts_first():
    runner = OverlappedRunner(in_place)
    graph = chain(("read", ()), *(("h2d", (0,)) for _ in range(6)))
    started: list[int] = []
    runner.run(graph, [lambda i=i: started.append(i) for i in range(7)])
    assert started == list(range(7))
    runner.close()


def test_an_error_stops_the_graph_and_reaches_the_caller(runner):
    graph = chain(("read", ()), ("h2d", (0,)), ("write", (1,)))
    ran = []

    def fail():
        raise ValueError("broken op")

    with pytest.raises(ValueError, match="broken op"):
        runner.run(graph, [lambda: ran.append(0), fail, lambda: ran.append(2)])
    assert ran == [0]
    assert runner.run(graph, [lambda: None] * 3).seconds >= 0, "the runner can be used again"


def test_what_runs_is_finished_before_an_error_is_raised():
    runner = OverlappedRunner(in_place)
    finished = threading.Event()
    started = threading.Event()

    def slow():
        started.set()
        time.sleep(0.2)
        finished.set()

    def fail():
        assert started.wait(HANG_SECONDS)
        raise ValueError("broken op")

    with pytest.raises(ValueError):
        runner.run(chain(("read", ()), ("write", ())), [slow, fail])
    assert finished.is_set()
    runner.close()


def test_so_many_reads_are_under_way_at_once_and_start_in_order():
    runner = OverlappedRunner(in_place, IN_FLIGHT)
    count = IN_FLIGHT["read"]
    # None ends before so many have begun: with fewer at once it would hang, and with more these would be others.
    meeting = threading.Barrier(count, timeout=HANG_SECONDS)
    graph = chain(*[("read", ())] * 10 * count, *[("h2d", ())] * 10)
    started, running, most = [], [], []

    def action(index):
        started.append(index)
        running.append(index)
        most.append(len(running))
        meeting.wait()
        running.remove(index)
        meeting.wait()

    runner.run(graph, [lambda i=i: action(i) if i < 10 * count else None for i in range(len(graph.ops))])
    assert max(most) == count, "never more"
    # Threads of one lane may pass each other between taking an op and beginning it, and no further.
    for first in range(0, len(started), count):
        assert sorted(started[first : first + count]) == list(range(first, first + count))
    runner.close()


def test_an_update_waits_for_no_layer():
    """A lane of its own: what the drive waits for is done while a layer computes."""
    ended = threading.Event()
    graph = chain(("compute", ()), ("cpu", ()))
    runner = OverlappedRunner(in_place)
    seen = []
    runner.run(graph, [lambda: seen.append(ended.wait(HANG_SECONDS)), ended.set])
    runner.close()
    assert seen == [True]


@pytest.mark.parametrize("seed", range(8))
def test_any_graph_runs_each_op_once_after_its_waits(seed):
    """Random graphs, run again and again by the same threads: what a handover that went astray would break."""
    rng = random.Random(seed)
    runner = OverlappedRunner(in_place, IN_FLIGHT)
    for _ in range(5):
        count = rng.randrange(1, 120)
        graph = chain(
            *(
                (rng.choice(RESOURCES), tuple(sorted(rng.sample(range(i), min(i, rng.randrange(4))))))
                for i in range(count)
            )
        )
        naps = [rng.choice([0.0, 0.0, 1e-4]) for _ in range(count)]
        for _ in range(10):
            ran: list[int] = []
            actions = [lambda i=i, ran=ran, nap=naps[i]: (ran.append(i), time.sleep(nap)) for i in range(count)]
            timeline = runner.run(graph, actions)
            assert sorted(ran) == list(range(count))
            for op in graph.ops:
                assert all(timeline.ends[wait] <= timeline.starts[op.index] for wait in op.waits)
            for resource in RESOURCES:
                mine = [op.index for op in graph.ops if op.resource == resource]
                spans = [(timeline.starts[index], timeline.ends[index]) for index in mine]
                at_once = [sum(start <= moment < end for start, end in spans) for moment, _ in spans]
                assert max(at_once, default=0) <= IN_FLIGHT.get(resource, 1)
    runner.close()


def test_it_tells_where_a_graph_stands(runner):
    graph = chain(("read", ()), ("h2d", (0,)), ("write", (1,)))
    assert runner.standing() is None
    seen = []
    runner.run(graph, [lambda: None, lambda: seen.append((runner.standing(), time.perf_counter())), lambda: None])
    ((standing, now),) = seen
    assert standing.graph is graph and standing.ended == 1
    ((index, began),) = standing.running
    assert index == 1 and standing.last_end <= began <= now
    assert runner.standing() is None


def until_noted(runner: OverlappedRunner) -> None:
    """Wait, in an op, until the runner knows of an interruption."""
    deadline = time.monotonic() + HANG_SECONDS
    while runner._run.error is None and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)  # long enough for a caller that does not wait


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_an_interruption_waits_for_what_runs(delay):
    """Also one that comes while the caller is on its way to sleep, which it notices a moment later."""
    runner = OverlappedRunner(in_place)
    finished = []

    def slow():
        time.sleep(delay)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        until_noted(runner)
        finished.append(True)

    for _ in range(2):
        finished.clear()
        with pytest.raises(KeyboardInterrupt):
            runner.run(chain(("read", ()), ("write", (0,))), [slow, lambda: finished.append(False)])
        assert finished == [True]
    assert runner.run(chain(("read", ())), [lambda: None]).seconds >= 0
    runner.close()


def test_an_interruption_in_the_callers_own_op_waits_for_it_and_for_the_others():
    """SIGTERM, by a handler that raises, while compute runs in the caller's thread and a read in another."""
    runner = OverlappedRunner(in_place)
    finished = []

    def interrupted():
        signal.raise_signal(signal.SIGTERM)
        finished.append("compute")

    def raises(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, raises)
    try:
        ops = chain(("compute", ()), ("read", ()), ("write", (0, 1)))
        actions = [
            interrupted,
            lambda: (until_noted(runner), finished.append("read")),
            lambda: finished.append("write"),
        ]
        with pytest.raises(KeyboardInterrupt):
            runner.run(ops, actions)
        assert finished == ["compute", "read"] and signal.getsignal(signal.SIGTERM) is raises
    finally:
        signal.signal(signal.SIGTERM, before)
    runner.close()


def test_what_runs_ends_before_an_error_between_two_steps_is_raised(monkeypatch):
    """Whatever raises in the caller's own bookkeeping, memory that others write may not go away."""
    runner = OverlappedRunner(in_place)
    finished = []
    real = runner._ended

    def ended(run, worker, index, end, error):
        if worker is runner._own:
            raise MemoryError("between two steps")
        return real(run, worker, index, end, error)

    monkeypatch.setattr(runner, "_ended", ended)
    ops = chain(("compute", ()), ("read", ()))
    with pytest.raises(MemoryError, match="between two steps"):
        runner.run(ops, [lambda: None, lambda: (time.sleep(0.3), finished.append("read"))])
    assert finished == ["read"]
    runner.close()


def test_dispatch_takes_little_processor_time():
    """Of a step of 30 layers and 16 micro-batches, on actions that do nothing: at most 3% of what layers and head of
    such a step of a model of 135 million parameters take on two cores of this machine; medians, measured in turns."""
    blocks, n, length, cores = 30, 16, 128, 2
    model = made_model(blocks=blocks, tied=True, hidden=576, vocab=49152, sequence=length, micro_batch_sizes=(1,))
    decision = decide(
        model, alpha=0.3, optimizer=0.3, parameters=0.5, checkpoints=0.5, gradient=0.5, micro_batches=n, chunk=221184
    )
    graph = build_schedule(model, decision).steady
    assert len(graph.ops) > 8000
    runner = OverlappedRunner(in_place, IN_FLIGHT)
    nothing = [lambda: None] * len(graph.ops)
    layer, head = layer_and_head(length)
    shares = []
    for _ in range(5):
        dispatch = processor_seconds(lambda: runner.run(graph, nothing))
        step = n * (blocks * processor_seconds(layer) + processor_seconds(head)) / cores
        shares.append(dispatch / step)
    runner.close()
    assert statistics.median(shares[1:]) < 0.03, shares


def processor_seconds(work: Callable[[], None]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def layer_and_head(length: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """What a layer of SmolLM2-135M computes for a row of so many tokens, forward and again with backward, and its
    head; in bf16 where the processor has it."""
    dtype = DTYPES[PRECISION]
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(**shape, attn_implementation="sdpa")
    block = LlamaDecoderLayer(config, 0).to(dtype)
    logits = torch.nn.Linear(576, 49152, bias=False, dtype=dtype)
    hidden = torch.randn(1, length, 576, dtype=dtype, requires_grad=True)
    places = LlamaRotaryEmbedding(config)(hidden, torch.arange(length)[None])

    def layer() -> None:
        with torch.no_grad():
            block(hidden, position_embeddings=places)
        block(hidden, position_embeddings=places).sum().backward()

    def head() -> None:
        logits(hidden).sum().backward()

    return layer, head
