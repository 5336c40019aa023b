"""Updates: the verbs that take a layer's gradient off the device and run the optimizer on it.

Owns the chunks in which optimizer states, gradients and updated parameters pass through host memory, a few of them
ahead of the update that needs them; and what is prompt and what waits for the next step (GreedySnake 4.4). Of a state
whose optimizer states the device keeps, nothing leaves it, and the device runs the optimizer.
"""

from collections.abc import Callable, Iterator
from functools import partial

from ..documents.matrices import workspace_bytes
from ..documents.state_layout import GRADIENT_BYTES
from ..graph.collectives import AddShares, Exchange
from ..graph.contents import Content, Role
from ..graph.ops import Home, Region, SumSquares, Tier, Update
from .emission import NOWHERE, Emission, When, bytes_of, cut
from .homes import kept_on_device
from .parameters import Parameters

Piece = Callable[[], None]
"""A part of what a layer's update emits, to be called when the order comes to it."""


class Updates:
    """Gradients on the device, and the updates that they are for."""

    def __init__(self, emission: Emission, parameters: Parameters) -> None:
        self._emission, self._parameters = emission, parameters
        self._homes: dict[int, list[Home]] = {}
        for home in emission.homes:
            self._homes.setdefault(home.state, []).append(home)
        self._on_device = kept_on_device(emission.model, emission.decision).updated
        self._matrices_there = bool(emission.decision.matrices_on_device)
        self._left: dict[tuple[int, int, int], Region] = {}
        """(stage, state, first element of a home) -> where on host its gradient waits since it left the device."""

    def stays(self, state: int) -> bool:
        """Whether a state's gradient never leaves the device, which updates the state."""
        return state in self._on_device

    def _visits(self, home: Home) -> bool:
        """Whether the device updates a home whose optimizer states come there for it, and go back."""
        return self._matrices_there and bool(home.matrices) and not self.stays(home.state)

    def gradient(self, stage: int, state: int) -> Region:
        """Where a stage's backward adds to a state's gradient: on the device, or with unified memory on host. Where it
        is used there, that is one place for all stages until then: for a delayed update, its home."""
        emission = self._emission
        nbytes = emission.model.states[state].elements * GRADIENT_BYTES
        if emission.shards.alone and (waiting := self._waiting(state)):
            return waiting
        return Region(self._summed("gradient", stage, state).buffer, 0, nbytes)

    def _waiting(self, state: int) -> Region | None:
        """Where on the device the gradient of what this rank owns waits for the next step, if it does."""
        homes = self._homes.get(state, ())
        if not (self.stays(state) and homes and homes[0].gradient):
            return None
        elements = sum(home.elements for home in homes)
        return Region(homes[0].gradient.buffer, 0, elements * GRADIENT_BYTES)

    def _total(self, stage: int, state: int) -> Region:
        """Of several ranks: where the gradient of what this rank owns is once shares are added."""
        if waiting := self._waiting(state):
            return waiting
        received = self._summed("received", stage, state)
        start, stop = self._emission.shards.own(self._emission.model.states[state].elements)
        own = (stop - start) * GRADIENT_BYTES
        return Region(received.buffer, 0, own or received.nbytes // self._emission.shards.ranks)

    def _summed(self, kind: str, stage: int, state: int) -> Region:
        """A place for a state's gradient, of all ranks' shares of it."""
        emission = self._emission
        one_place = emission.unified or self.stays(state)
        name = f"{kind}/{state}" if one_place else f"{kind}/{stage}/{state}"
        every = emission.shards.whole(emission.model.states[state].elements) * GRADIENT_BYTES
        return Region(emission.passing(name, emission.device, every, Role.GRADIENTS, f"gradient/{every}"), 0, every)

    def finish(self, stage: int, state: int) -> Iterator[Piece]:
        """What follows the last backward that adds to a state's gradient: it leaves the device, its prompt part is
        updated, and its delayed part goes to where it waits."""
        alone = self._emission.shards.alone
        gradient = self.gradient(stage, state) if alone else self._total(stage, state)
        if self.stays(state) and state in self._homes:
            yield partial(self._sum_squares, gradient, state)
        prompt = [home for home in self._homes.get(state, ()) if not home.delayed]
        if prompt and self._visits(prompt[0]):
            start, stop = bytes_of(prompt[0], GRADIENT_BYTES)[0], bytes_of(prompt[-1], GRADIENT_BYTES)[1]
            yield partial(self._sum_squares, cut(gradient, (start, stop)), state)
        loaded: dict[int, tuple[Region, Region]] = {}
        for number in range(len(prompt)):
            yield partial(self._update_prompt, stage, gradient, prompt, number, loaded)
        for home in self._homes.get(state, ()):
            if home.delayed and not (self._emission.leaves_at_once and self._waits_on_host(home)):
                yield partial(self._leave_delayed_gradient, stage, gradient, home)

    def leave(self, stage: int, state: int) -> None:
        """Before `finish`, where the device has no room for a gradient beside the next layer's: all of it goes to host
        at once. What waits for the next step goes to where it waits; for the rest host has a place."""
        if self.stays(state):
            return
        emission, homes = self._emission, self._homes.get(state, ())
        gradient = self.gradient(stage, state) if emission.shards.alone else self._total(stage, state)
        staying = [home for home in homes if not self._waits_on_host(home)]
        if nbytes := sum(home.elements for home in staying) * GRADIENT_BYTES:
            buffer = emission.passing(f"left/{stage}/{state}", "host", nbytes, Role.GRADIENTS, f"left/{nbytes}")
        begin = 0
        for home in homes:
            if self._waits_on_host(home):
                self._leave_delayed_gradient(stage, gradient, home)
                continue
            end = begin + home.elements * GRADIENT_BYTES
            target = self._left[stage, state, home.start] = Region(buffer, begin, end)
            content = Content.DELAYED_GRADIENT if home.delayed else Content.GRADIENT
            emission.move_state("d2h", self._of(gradient, home), target, content, state, final_gradient=True)
            begin = end

    def _waits_on_host(self, home: Home) -> bool:
        return home.gradient is not None and self._emission.tier(home.gradient) != "ssd"

    def finish_delayed(self, use: int) -> None:
        """Finish the previous step's updates of the states whose first use is stage `use` of this step."""
        model = self._emission.model
        delayed = [
            home
            for state in model.layers[use].states
            if model.uses(state)[0] == use
            for home in self._homes.get(state, ())
            if home.delayed
        ]
        loaded: dict[int, tuple[Region, Region]] = {}
        for number, home in enumerate(delayed):
            for ahead in self._ahead(number, delayed):
                if ahead not in loaded:
                    loaded[ahead] = self._load_delayed(use, delayed[ahead])
            if self._emission.tier(home.parameters) == "ssd":
                parameters = self._parameters.in_transit(use, home)
            else:
                parameters = self._updated(home, use)
            self._update(home, *loaded[number], parameters, When.PENDING)

    def _ahead(self, number: int, homes: list[Home]) -> range:
        """The updates whose states are on their way, or there, while that of `number` runs."""
        return range(number, min(number + 1 + self._emission.decision.update_lookahead, len(homes)))

    def _update_prompt(
        self, stage: int, gradient: Region, homes: list[Home], number: int, loaded: dict[int, tuple[Region, Region]]
    ) -> None:
        for ahead in self._ahead(number, homes):
            if ahead not in loaded:
                home = homes[ahead]
                optimizer = self._load_optimizer(home, When.ALWAYS)
                loaded[ahead] = (optimizer, self._on_host(stage, gradient, home))
                self._bring_copy(home, When.ALWAYS)
        self._update(homes[number], *loaded[number], self._updated(homes[number], stage), When.ALWAYS)

    def _on_host(self, stage: int, gradient: Region, home: Home) -> Region:
        """Where an update finds a home's gradient: on host, where it goes unless it has; or where it was made."""
        emission, source = self._emission, self._of(gradient, home)
        if left := self._left.get((stage, home.state, home.start)):
            return left
        there = emission.unified or self.stays(home.state) or self._visits(home)
        target = source if there else self._gradient_chunk(home)
        emission.move_state("d2h", source, target, Content.GRADIENT, home.state, final_gradient=True)
        return target

    def _of(self, gradient: Region, home: Home) -> Region:
        """A home's elements of the gradient of what this rank owns of their state."""
        start, stop = bytes_of(home, GRADIENT_BYTES)
        first, _ = self._emission.shards.own(self._emission.model.states[home.state].elements)
        return cut(gradient, (start - first * GRADIENT_BYTES, stop - first * GRADIENT_BYTES))

    def exchange(self, stage: int, state: int) -> None:
        """Before `finish`, of several ranks: every rank's gradient of this rank's share comes, and they are added up
        where the first of them lies."""
        emission = self._emission
        if emission.shards.alone:
            return
        received, ranks = self._summed("received", stage, state), emission.shards.ranks
        emission.emit(
            Exchange(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                state=state,
                state_name=emission.name(state),
                gradient=self.gradient(stage, state),
                received=received,
                ranks=ranks,
            )
        )
        emission.emit(
            AddShares(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                state=state,
                state_name=emission.name(state),
                received=received,
                total=self._total(stage, state),
                ranks=ranks,
            )
        )

    def _sum_squares(self, gradient: Region, state: int) -> None:
        emission = self._emission
        emission.emit(
            SumSquares(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                state=state,
                state_name=emission.name(state),
                gradient=gradient,
            )
        )

    def _leave_delayed_gradient(self, stage: int, gradient: Region, home: Home) -> None:
        """A delayed gradient goes to where it waits for the next step's forward."""
        assert home.gradient is not None
        emission = self._emission
        on_ssd = emission.tier(home.gradient) == "ssd"
        target = self._left.get((stage, home.state, home.start))
        if target is None:
            source, target = self._of(gradient, home), self._gradient_chunk(home) if on_ssd else home.gradient
            emission.move_state("d2h", source, target, Content.DELAYED_GRADIENT, home.state, final_gradient=True)
        if on_ssd:
            emission.move_state("write", target, home.gradient, Content.DELAYED_GRADIENT, home.state)

    def _load_delayed(self, use: int, home: Home) -> tuple[Region, Region]:
        """Optimizer states and gradient of a delayed update, on host; and its parameters, where it takes them."""
        assert home.gradient is not None
        emission = self._emission
        waiting = home.gradient
        optimizer = self._load_optimizer(home, When.PENDING)
        if emission.tier(waiting) == "ssd":
            target = self._gradient_chunk(home, "again/")
            emission.move_state("read", waiting, target, Content.DELAYED_GRADIENT, home.state, When.PENDING)
            waiting = target
        if home.formats.takes_copy and emission.tier(home.parameters) == "ssd":
            target = self._parameters.in_transit(use, home)
            emission.move_state("read", home.parameters, target, Content.PARAMETERS, home.state, When.PENDING)
        self._bring_copy(home, When.PENDING)
        if self._visits(home):
            target = self._chunk("visiting gradient", home, waiting.nbytes, Role.GRADIENTS, "", emission.device)
            emission.move_state("h2d", waiting, target, Content.DELAYED_GRADIENT, home.state, When.PENDING)
            waiting = target
        return optimizer, waiting

    def _bring_copy(self, home: Home, when: When) -> None:
        """Where an update on host takes the parameters that the device keeps, they come down to where it leaves
        them."""
        emission = self._emission
        if home.formats.takes_copy and emission.tier(home.parameters) == "device" and not self.stays(home.state):
            emission.move_state("d2h", home.parameters, self._chunk_of(home), Content.PARAMETERS, home.state, when)

    def _load_optimizer(self, home: Home, when: When) -> Region:
        emission = self._emission
        assert home.optimizer is not None, "an update of a frozen state"
        if emission.tier(home.optimizer) != "ssd":
            return home.optimizer
        chunk = self._chunk("optimizer", home, home.optimizer.nbytes, Role.OPTIMIZER_IN_TRANSIT)
        content = Content.OPTIMIZER_STATES
        summed = not self._visits(home)
        emission.move_state("read", home.optimizer, chunk, content, home.state, when, summed_by_update=summed)
        return chunk

    def _update(self, home: Home, optimizer: Region, gradient: Region, parameters: Region, when: When) -> None:
        """Update a home, and send on what lives on ssd or on the device."""
        assert home.optimizer is not None
        emission = self._emission
        stored = home.optimizer if emission.tier(home.optimizer) == "ssd" else None
        visits, on_host, copies = self._visits(home), optimizer, parameters
        if visits:
            optimizer = self._chunk("visiting", home, on_host.nbytes, Role.OPTIMIZER_IN_TRANSIT, "", emission.device)
            emission.move_state("h2d", on_host, optimizer, Content.OPTIMIZER_STATES, home.state, when)
            parameters = home.parameters
            if emission.tier(home.parameters) != "device":
                nbytes, role = home.parameters.nbytes, Role.PARAMETERS_IN_TRANSIT
                parameters = self._chunk("visiting copy", home, nbytes, role, "", emission.device)
        emission.emit(
            Update(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                state=home.state,
                start=home.start,
                stop=home.stop,
                delayed=home.delayed,
                optimizer=optimizer,
                gradient=gradient,
                parameters=parameters,
                formats=home.formats,
                final_gradient=emission.unified and not home.delayed,
                stored=None if visits else stored,
                on_device=self.stays(home.state) or visits,
                matrices=home.matrices,
                workspace=self._workspace(home),
            ),
            when,
        )
        if visits:
            emission.move_state("d2h", optimizer, on_host, Content.OPTIMIZER_STATES, home.state, when)
            if parameters != home.parameters:
                emission.move_state("d2h", parameters, copies, Content.PARAMETERS, home.state, when)
        if stored:
            content = Content.OPTIMIZER_STATES
            emission.move_state("write", on_host, stored, content, home.state, when, summed_by_update=not visits)
        if emission.tier(home.parameters) == "ssd":
            emission.move_state("write", copies, home.parameters, Content.PARAMETERS, home.state, when)
        elif emission.tier(home.parameters) == "device":
            emission.move_state("h2d", parameters, home.parameters, Content.PARAMETERS, home.state, when)

    def _workspace(self, home: Home) -> Region | None:
        """What the update of a home's matrices works in, where it runs."""
        if not home.matrices:
            return None
        emission, nbytes = self._emission, workspace_bytes(home.matrices)
        tier = emission.device if self.stays(home.state) or self._visits(home) else "host"
        name = f"orthogonalisation/{home.state}/{home.start}"
        return Region(emission.passing(name, tier, nbytes, Role.ORTHOGONALISATION, "orthogonalisation"), 0, nbytes)

    def _gradient_chunk(self, home: Home, use: str = "") -> Region:
        return self._chunk("gradient", home, home.elements * GRADIENT_BYTES, Role.GRADIENTS, use)

    def _updated(self, home: Home, stage: int) -> Region:
        """Where an update leaves a home's parameters: where they live, or on host on their way there. One that takes
        those before finds them where they came for the stage's backward."""
        tier = self._emission.tier(home.parameters)
        if tier == "host" or self.stays(home.state) or (tier == "device" and self._visits(home)):
            return home.parameters
        if home.formats.takes_copy and tier == "ssd":
            return self._parameters.copy_in_transit(stage, home)
        return self._chunk_of(home)

    def _chunk_of(self, home: Home) -> Region:
        return self._chunk("updated", home, home.parameters.nbytes, Role.PARAMETERS_IN_TRANSIT)

    def _chunk(self, kind: str, home: Home, nbytes: int, role: Role, use: str = "", tier: Tier = "host") -> Region:
        """A host buffer for one home's optimizer states, gradient or updated parameters. What a step uses twice, with
        nothing of worth in between, is a buffer for each `use`."""
        name = f"{kind} chunk/{use}{home.state}/{home.start}"
        return Region(self._emission.passing(name, tier, nbytes, role, f"{kind} chunk"), 0, nbytes)
