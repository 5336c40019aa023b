"""The vertical schedule: emits a step's operations, all micro-batches of a layer before the next layer.

Owns the order of operations (GreedySnake sections 4.2 to 4.4) and thereby how long every buffer lives. Stages are
numbered from 0: the forwards of embedding and blocks, then the backwards of head, blocks and embedding. The awkward
boundaries (the micro-batch that never leaves the device, tied states, the first step) hide inside the verbs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

from .homes import GRADIENT_BYTES, GRAIN, OPTIMIZER_BYTES, Buffers, Span, make_homes, parameter_spans
from .memory import assign
from .plan import Decision
from .profile import ELEMENT_BYTES, Model
from .schedule import PAGE, Backward, Forward, Graph, GraphName, Home, Op, Region, Resource, Schedule, Transfer, Update
from .waits import with_waits

READ_BYTES = 16 << 20
"""The most that one transfer of parameters moves, so that what needs its beginning need not wait for its end."""
NOWHERE = -1


class _When(Enum):
    """Which steps an operation belongs to."""

    ALWAYS = "always"
    PENDING = "pending"
    """Only after a step that left delayed updates."""
    NOT_PENDING = "not pending"
    """Only after a step that left none."""


@dataclass(frozen=True, slots=True)
class _Emitted:
    op: Op
    when: _When


def build_schedule(model: Model, decision: Decision) -> Schedule:
    """Expand a decision into buffers with places and graphs with waits. Depends on nothing else."""
    buffers = Buffers()
    homes = make_homes(model, decision, buffers)
    training = _Program(model, decision, homes, buffers)
    training.train()
    evaluation = _Program(model, decision, homes, buffers, prefix="evaluate/")
    evaluation.evaluate()
    steps = [[entry.op for entry in program.emitted] for program in (training, evaluation)]
    placed, arenas = assign(buffers.all, steps)

    def make_graph(name: GraphName) -> Graph:
        program, when = {
            "first": (training, (_When.ALWAYS, _When.NOT_PENDING)),
            "steady": (training, (_When.ALWAYS, _When.PENDING)),
            "flush": (training, (_When.PENDING,)),
            "evaluate": (evaluation, (_When.ALWAYS,)),
        }[name]
        chosen = [entry.op for entry in program.emitted if entry.when in when]
        return Graph(name, with_waits(chosen, placed), program.stages)

    return Schedule(placed, arenas, homes, make_graph)


class _Program:
    """Emits the operations of a step, in an order in which they could run one by one."""

    def __init__(
        self, model: Model, decision: Decision, homes: tuple[Home, ...], buffers: Buffers, *, prefix: str = ""
    ) -> None:
        self.model, self.decision, self.buffers, self.prefix = model, decision, buffers, prefix
        self.n = decision.micro_batches
        self.parameter_bytes = ELEMENT_BYTES[decision.precision]
        rows = decision.micro_batch_size * decision.sequence_length
        self.hidden_bytes = _pages(rows * model.hidden_size * self.parameter_bytes)
        self.checkpoint_host = min(round(decision.checkpoint_host * self.hidden_bytes / PAGE) * PAGE, self.hidden_bytes)
        self.homes: dict[int, list[Home]] = {}
        for home in homes:
            self.homes.setdefault(home.state, []).append(home)
        self.spans = parameter_spans(homes, buffers)
        self.head = len(model.layers) - 1
        self.stages = 0
        self.stage = 0
        self.emitted: list[_Emitted] = []
        self.out: dict[tuple[int, int], Region] = {}
        """(stage, micro-batch) -> a forward's output, on device."""
        self.passed: dict[tuple[int, int], Region] = {}
        """(stage, micro-batch) -> a backward's input gradient, on device."""
        self.inputs: dict[tuple[int, int], tuple[Region | None, Region | None]] = {}
        """(stage, micro-batch) -> hidden and output gradient, on device, of the compute op to come."""

    # The two programs.

    def train(self) -> None:
        """Forward of embedding and blocks, backward of head, blocks and embedding, updates behind them."""
        blocks = self.head - 1
        self.stages = 2 * blocks + 3
        layer_of = [*range(self.head), *range(self.head, -1, -1)]
        computes = [(stage, position) for stage in range(self.stages) for position in range(self.n)]

        self.stage = 0
        for stage in (0, 1):
            self._fetch(stage, layer_of[stage], first_use=True)
        for use in (0, 1):
            self._delayed_updates(use)
        self._upload(0, layer_of[0], range(self.n))
        updates: list[partial[None]] = []
        for number, (stage, position) in enumerate(computes):
            self.stage = stage
            layer, forward = layer_of[stage], stage < self.head
            micro_batch = self._order(stage)[position]
            if position == 0:
                if stage + 2 < self.stages:
                    self._fetch(stage + 2, layer_of[stage + 2], first_use=stage + 2 <= self.head)
                if stage + 2 <= self.head:
                    self._delayed_updates(stage + 2)
                if self.head <= stage + 1 < self.stages:
                    self._restore_checkpoints(stage + 1, layer_of[stage + 1])
            if stage + 1 < self.stages:
                self._upload(stage + 1, layer_of[stage + 1], range(position, position + 1))
            if number + 1 < len(computes):
                self._load_inputs(*computes[number + 1], layer_of)
            if forward:
                self._forward(stage, layer, micro_batch)
                self._keep_output(stage, position, micro_batch, checkpoint=stage + 1 < self.head)
            else:
                self._backward(stage, layer, position, micro_batch)
                self._keep_in_gradient(stage, position, micro_batch)
            for update in updates[len(updates) * position // self.n : len(updates) * (position + 1) // self.n]:
                update()
            if position == self.n - 1 and stage + 2 == self.stages:
                self._restore_partial_gradients(stage + 1)
            if position == self.n - 1 and not forward:
                updates = list(self._prompt_updates(stage, layer))
        for update in updates:
            update()

    def evaluate(self) -> None:
        """Forward of every layer, the head's included."""
        self.stages = self.head + 1
        layer_of = list(range(self.stages))
        computes = [(stage, position) for stage in range(self.stages) for position in range(self.n)]
        for stage in (0, 1):
            self._fetch(stage, stage, first_use=False)
        self._upload(0, 0, range(self.n))
        for number, (stage, position) in enumerate(computes):
            self.stage = stage
            micro_batch = self._order(stage)[position]
            if stage + 1 < self.stages:
                if position == 0 and stage + 2 < self.stages:
                    self._fetch(stage + 2, stage + 2, first_use=False)
                self._upload(stage + 1, stage + 1, range(position, position + 1))
            if number + 1 < len(computes):
                self._load_inputs(*computes[number + 1], layer_of)
            self._forward(stage, stage, micro_batch)
            if stage < self.head:
                self._keep_output(stage, position, micro_batch, checkpoint=False)

    # Parameters: ssd to host two stages ahead, host to device one stage ahead.

    def _fetch(self, stage: int, layer: int, *, first_use: bool) -> None:
        """Read what ssd holds of the layer's parameters into host buffers of the stage.

        At a state's first use in a step with pending updates, the delayed part is not read: the update makes it.
        """
        for state in self.model.layers[layer].states:
            made_by_update = first_use and self.model.uses(state)[0] == layer
            for span in self.spans[state]:
                if span.on_ssd:
                    when = _When.NOT_PENDING if made_by_update and span.delayed else _When.ALWAYS
                    target = self._staged(stage, state, span)
                    for part in _parts(span.region.nbytes, READ_BYTES):
                        self._move("read", _cut(span.region, part), _cut(target, part), self._name(state), when)

    def _staged(self, stage: int, state: int, span: Span) -> Region:
        """Where a span of a state that lives on ssd lies on host for one stage."""
        before = 0
        total = 0
        for other in self.spans[state]:
            if other.on_ssd:
                before += other.region.nbytes if other.start < span.start else 0
                total += other.region.nbytes
        staging = self._buffer(f"staging/{stage}/{state}", "host", total, "parameters in transit", f"staging/{total}")
        return Region(staging, before, before + span.region.nbytes)

    def _upload(self, stage: int, layer: int, pieces: range) -> None:
        """Move these pieces of n of the layer's parameters to the device."""
        for index, state in enumerate(self.model.layers[layer].states):
            target = self._weights(stage, layer)[index]
            elements = self.model.states[state].elements
            start = _grain(elements, pieces.start, self.n)
            stop = _grain(elements, pieces.stop, self.n)
            for span in self.spans[state]:
                first, last = max(start, span.start), min(stop, span.stop)
                if first < last:
                    source = self._staged(stage, state, span) if span.on_ssd else span.region
                    begin = (first - span.start) * self.parameter_bytes
                    end = (last - span.start) * self.parameter_bytes
                    self._move(
                        "h2d",
                        _cut(source, (begin, end)),
                        Region(target.buffer, first * self.parameter_bytes, last * self.parameter_bytes),
                        self._name(state),
                    )

    def _weights(self, stage: int, layer: int) -> tuple[Region, ...]:
        regions = []
        for state in self.model.layers[layer].states:
            nbytes = self.model.states[state].elements * self.parameter_bytes
            buffer = self._buffer(f"weights/{stage}/{state}", "device", nbytes, "parameters", f"weights/{nbytes}")
            regions.append(Region(buffer, 0, nbytes))
        return tuple(regions)

    # Compute, and the hidden states and gradients that pass between layers.

    def _order(self, stage: int) -> list[int]:
        """Opposite from stage to stage, so that the micro-batch at the boundary stays on the device."""
        order = list(range(self.n))
        return order if stage % 2 == 0 else order[::-1]

    def _load_inputs(self, stage: int, position: int, layer_of: list[int]) -> None:
        """Bring to the device what the compute op to come takes; at a boundary it is there already."""
        micro_batch = self._order(stage)[position]
        layer = layer_of[stage]
        hidden: Region | None = None
        out_gradient: Region | None = None
        if stage <= self.head:
            if stage > 0 and position > 0:
                hidden = self._upload_hidden(stage, micro_batch, self._passing(stage - 1, micro_batch), "hidden state")
            elif stage > 0:
                hidden = self.out.pop((stage - 1, micro_batch), None)
        else:
            if layer > 0:
                hidden = self._upload_hidden(stage, micro_batch, self._restored(layer, micro_batch), "checkpoint")
            if position > 0:
                source = [self._passing_gradient(stage - 1, micro_batch)]
                out_gradient = self._upload_hidden(stage, micro_batch, source, "inter-layer gradient")
            else:
                out_gradient = self.passed.pop((stage - 1, micro_batch), None)
        self.inputs[stage, micro_batch] = (hidden, out_gradient)

    def _inputs(self, stage: int, micro_batch: int) -> tuple[Region | None, Region | None]:
        """The inputs of a compute op. A boundary's may have been made by the very op before it."""
        hidden, out_gradient = self.inputs.pop((stage, micro_batch), (None, None))
        hidden = hidden or self.out.pop((stage - 1, micro_batch), None)
        out_gradient = out_gradient or self.passed.pop((stage - 1, micro_batch), None)
        return hidden, out_gradient

    def _forward(self, stage: int, layer: int, micro_batch: int) -> None:
        hidden, _ = self._inputs(stage, micro_batch)
        out = None if layer == self.head else self._hidden(f"out/{stage}/{micro_batch}")
        if out:
            self.out[stage, micro_batch] = out
        name = self.model.layers[layer].layer_class
        self._emit(Forward(NOWHERE, self.stage, (), layer, name, micro_batch, self._weights(stage, layer), hidden, out))

    def _backward(self, stage: int, layer: int, position: int, micro_batch: int) -> None:
        hidden, out_gradient = self._inputs(stage, micro_batch)
        in_gradient = None if layer == 0 else self._hidden(f"in_gradient/{stage}/{micro_batch}")
        if in_gradient:
            self.passed[stage, micro_batch] = in_gradient
        states = self.model.layers[layer].states
        gradients = tuple(self._gradient(stage, state) for state in states)
        fresh = tuple(position == 0 and self.model.uses(state)[-1] == layer for state in states)
        self._emit(
            Backward(
                NOWHERE,
                self.stage,
                (),
                layer,
                self.model.layers[layer].layer_class,
                micro_batch,
                self._weights(stage, layer),
                hidden,
                out_gradient,
                in_gradient,
                gradients,
                fresh,
            )
        )

    def _hidden(self, name: str) -> Region:
        buffer = self._buffer(name, "device", self.hidden_bytes, "hidden states", "hidden")
        return Region(buffer, 0, self.hidden_bytes)

    def _upload_hidden(self, stage: int, micro_batch: int, sources: list[Region], what: str) -> Region:
        target = self._hidden(f"{what}/{stage}/{micro_batch}")
        begin = 0
        for source in sources:
            self._move("h2d", source, Region(target.buffer, begin, begin + source.nbytes), what)
            begin += source.nbytes
        return target

    def _passing(self, stage: int, micro_batch: int) -> list[Region]:
        """Where on host a forward's output lies between two stages: the part to keep, then the rest."""
        regions = []
        keep = self.checkpoint_host if not self.prefix and stage + 1 < self.head else 0
        if keep:
            regions.append(self._checkpoint(stage + 1, micro_batch))
        if keep < self.hidden_bytes:
            rest = self.hidden_bytes - keep
            buffer = self._buffer(f"passing/{stage}/{micro_batch}", "host", rest, "hidden states", f"passing/{rest}")
            regions.append(Region(buffer, 0, rest))
        return regions

    def _checkpoint(self, layer: int, micro_batch: int) -> Region:
        nbytes = self.checkpoint_host
        buffer = self.buffers.get(f"checkpoint/{layer}/{micro_batch}", "host", nbytes, "checkpoints", turn=layer)
        return Region(buffer, 0, nbytes)

    def _checkpoint_on_ssd(self, layer: int, micro_batch: int) -> Region | None:
        rest = self.hidden_bytes - self.checkpoint_host
        if not rest:
            return None
        buffer = self.buffers.get(f"checkpoint/{layer}/{micro_batch}/ssd", "ssd", rest, "checkpoints")
        return Region(buffer, 0, rest)

    def _keep_output(self, stage: int, position: int, micro_batch: int, *, checkpoint: bool) -> None:
        """Move a forward's output to host: for the next stage unless it is the boundary's, and as a checkpoint."""
        if not checkpoint and position == self.n - 1:
            return
        source = self.out[stage, micro_batch]
        if position < self.n - 1:
            del self.out[stage, micro_batch]
        begin = 0
        for target in self._passing(stage, micro_batch):
            self._move("d2h", _cut(source, (begin, begin + target.nbytes)), target, "hidden state")
            begin += target.nbytes
        on_ssd = self._checkpoint_on_ssd(stage + 1, micro_batch) if checkpoint else None
        if on_ssd:
            self._move("write", self._passing(stage, micro_batch)[-1], on_ssd, "checkpoint")

    def _restore_checkpoints(self, stage: int, layer: int) -> None:
        """Read what ssd holds of the inputs of the layer whose backward is the stage to come."""
        if not 0 < layer < self.head:
            return
        for micro_batch in self._order(stage):
            on_ssd = self._checkpoint_on_ssd(layer, micro_batch)
            if on_ssd:
                self._move("read", on_ssd, self._restored(layer, micro_batch)[-1], "checkpoint")

    def _restored(self, layer: int, micro_batch: int) -> list[Region]:
        """Where on host a layer's input lies for its backward."""
        regions = [self._checkpoint(layer, micro_batch)] if self.checkpoint_host else []
        rest = self.hidden_bytes - self.checkpoint_host
        if rest:
            buffer = self._buffer(f"restored/{layer}/{micro_batch}", "host", rest, "hidden states", f"passing/{rest}")
            regions.append(Region(buffer, 0, rest))
        return regions

    def _passing_gradient(self, stage: int, micro_batch: int) -> Region:
        nbytes = self.hidden_bytes
        buffer = self._buffer(f"passed/{stage}/{micro_batch}", "host", nbytes, "hidden states", f"passing/{nbytes}")
        return Region(buffer, 0, nbytes)

    def _keep_in_gradient(self, stage: int, position: int, micro_batch: int) -> None:
        if stage + 1 < self.stages and position < self.n - 1:
            source = self.passed.pop((stage, micro_batch))
            self._move("d2h", source, self._passing_gradient(stage, micro_batch), "inter-layer gradient")

    # Gradients and updates.

    def _gradient(self, stage: int, state: int) -> Region:
        nbytes = self.model.states[state].elements * GRADIENT_BYTES
        buffer = self._buffer(f"gradient/{stage}/{state}", "device", nbytes, "gradients", f"gradient/{nbytes}")
        return Region(buffer, 0, nbytes)

    def _partial_gradient(self, state: int) -> Region:
        """Where the head's share of a tied state's gradient waits on host for the embedding's backward."""
        nbytes = self.model.states[state].elements * GRADIENT_BYTES
        return Region(self._buffer(f"partial/{state}", "host", nbytes, "gradients", f"partial/{nbytes}"), 0, nbytes)

    def _restore_partial_gradients(self, stage: int) -> None:
        """Bring back to the device what the head has left of tied gradients, for the embedding to add to."""
        for state in self.model.layers[0].states:
            if self.model.uses(state)[-1] != 0:
                source, target = self._partial_gradient(state), self._gradient(stage, state)
                for part in _parts(source.nbytes, READ_BYTES):
                    self._move("h2d", _cut(source, part), _cut(target, part), f"gradient of {self._name(state)}")

    def _prompt_updates(self, stage: int, layer: int) -> Iterator[partial[None]]:
        """What follows a layer's last backward, in pieces: gradients leave the device, the prompt part is updated."""
        for state in self.model.layers[layer].states:
            gradient = self._gradient(stage, state)
            if self.model.uses(state)[0] != layer:
                target = self._partial_gradient(state)
                for part in _parts(gradient.nbytes, READ_BYTES):
                    yield partial(
                        self._move,
                        "d2h",
                        _cut(gradient, part),
                        _cut(target, part),
                        f"gradient of {self._name(state)}",
                    )
                continue
            prompt = [home for home in self.homes[state] if not home.delayed]
            loaded: dict[int, tuple[Region, Region]] = {}
            for number in range(len(prompt)):
                yield partial(self._update_prompt, gradient, prompt, number, loaded)
            for home in self.homes[state]:
                if home.delayed:
                    yield partial(self._leave_delayed_gradient, gradient, home)

    def _update_prompt(
        self, gradient: Region, homes: list[Home], number: int, loaded: dict[int, tuple[Region, Region]]
    ) -> None:
        for ahead in range(number, min(number + 1 + self.decision.update_lookahead, len(homes))):
            if ahead not in loaded:
                home = homes[ahead]
                optimizer = self._load_optimizer(home, _When.ALWAYS)
                target = self._gradient_chunk(home)
                what = f"gradient of {self._name(home.state)}"
                self._move("d2h", _cut(gradient, _bytes(home, GRADIENT_BYTES)), target, what, final_gradient=True)
                loaded[ahead] = (optimizer, target)
        home = homes[number]
        optimizer, host_gradient = loaded[number]
        parameters = home.parameters
        if self._on_ssd(parameters):
            parameters = self._chunk("updated", home, self.parameter_bytes, "parameters in transit")
        self._update(home, optimizer, host_gradient, parameters, _When.ALWAYS)

    def _leave_delayed_gradient(self, gradient: Region, home: Home) -> None:
        """A delayed gradient goes to where it waits for the next step's forward."""
        assert home.gradient is not None
        what = f"gradient of {self._name(home.state)}"
        source = _cut(gradient, _bytes(home, GRADIENT_BYTES))
        if self._on_ssd(home.gradient):
            target = self._gradient_chunk(home)
            self._move("d2h", source, target, what, final_gradient=True)
            self._move("write", target, home.gradient, what)
        else:
            self._move("d2h", source, home.gradient, what, final_gradient=True)

    def _delayed_updates(self, use: int) -> None:
        """Finish the previous step's updates of the states whose first use is stage `use` of this step."""
        delayed = [
            home
            for state in self.model.layers[use].states
            if self.model.uses(state)[0] == use
            for home in self.homes[state]
            if home.delayed
        ]
        loaded: dict[int, tuple[Region, Region]] = {}
        for number, home in enumerate(delayed):
            for ahead in range(number, min(number + 1 + self.decision.update_lookahead, len(delayed))):
                if ahead not in loaded:
                    waiting = delayed[ahead].gradient
                    assert waiting is not None
                    optimizer = self._load_optimizer(delayed[ahead], _When.PENDING)
                    if self._on_ssd(waiting):
                        target = self._gradient_chunk(delayed[ahead], "again/")
                        what = f"gradient of {self._name(delayed[ahead].state)}"
                        self._move("read", waiting, target, what, _When.PENDING)
                        waiting = target
                    loaded[ahead] = (optimizer, waiting)
            parameters = home.parameters
            if self._on_ssd(parameters):
                span = next(
                    span for span in self.spans[home.state] if span.start <= home.start and home.stop <= span.stop
                )
                begin = (home.start - span.start) * self.parameter_bytes
                end = (home.stop - span.start) * self.parameter_bytes
                parameters = _cut(self._staged(use, home.state, span), (begin, end))
            self._update(home, *loaded[number], parameters, _When.PENDING)

    def _load_optimizer(self, home: Home, when: _When) -> Region:
        if not self._on_ssd(home.optimizer):
            return home.optimizer
        chunk = self._chunk("optimizer", home, OPTIMIZER_BYTES[self.decision.optimizer_states], "optimizer in transit")
        self._move("read", home.optimizer, chunk, f"optimizer states of {self._name(home.state)}", when)
        return chunk

    def _update(self, home: Home, optimizer: Region, gradient: Region, parameters: Region, when: _When) -> None:
        """Update a home and write back what lives on ssd."""
        self._emit(
            Update(
                NOWHERE,
                self.stage,
                (),
                home.state,
                home.start,
                home.stop,
                home.delayed,
                optimizer,
                gradient,
                parameters,
                self.decision.optimizer_states,
            ),
            when,
        )
        if self._on_ssd(home.optimizer):
            self._move("write", optimizer, home.optimizer, f"optimizer states of {self._name(home.state)}", when)
        if self._on_ssd(home.parameters):
            self._move("write", parameters, home.parameters, self._name(home.state), when)

    def _gradient_chunk(self, home: Home, use: str = "") -> Region:
        return self._chunk("gradient", home, GRADIENT_BYTES, "gradients", use)

    def _chunk(self, kind: str, home: Home, each: int, role: str, use: str = "") -> Region:
        """A host buffer for one home's optimizer states, gradient or updated parameters. What a step uses twice, with
        nothing of worth in between, is a buffer for each `use`."""
        nbytes = (home.stop - home.start) * each
        name = f"{kind} chunk/{use}{home.state}/{home.start}"
        return Region(self._buffer(name, "host", nbytes, role, f"{kind} chunk"), 0, nbytes)

    # Helpers of all verbs.

    def _buffer(self, name: str, tier: str, nbytes: int, role: str, pool: str) -> int:
        assert tier in ("host", "device")
        return self.buffers.get(self.prefix + name, "host" if tier == "host" else "device", nbytes, role, pool)

    def _on_ssd(self, region: Region) -> bool:
        return self.buffers.all[region.buffer].tier == "ssd"

    def _name(self, state: int) -> str:
        return self.model.states[state].name

    def _move(
        self,
        kind: Resource,
        source: Region,
        target: Region,
        what: str,
        when: _When = _When.ALWAYS,
        *,
        final_gradient: bool = False,
    ) -> None:
        assert source.nbytes == target.nbytes > 0
        self._emit(Transfer(NOWHERE, self.stage, (), kind, source, target, what, final_gradient), when)

    def _emit(self, op: Op, when: _When = _When.ALWAYS) -> None:
        self.emitted.append(_Emitted(op, when))


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _grain(elements: int, part: int, parts: int) -> int:
    """The element at which piece `part` of `parts` begins, a multiple of the grain."""
    return elements // GRAIN * part // parts * GRAIN


def _parts(nbytes: int, most: int) -> list[tuple[int, int]]:
    return [(start, min(start + most, nbytes)) for start in range(0, nbytes, most)]


def _cut(region: Region, part: tuple[int, int]) -> Region:
    assert 0 <= part[0] < part[1] <= region.nbytes
    return Region(region.buffer, region.start + part[0], region.start + part[1])


def _bytes(home: Home, each: int) -> tuple[int, int]:
    return home.start * each, home.stop * each
