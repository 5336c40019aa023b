"""Rows: the verbs that bring of a table of token embeddings the rows that a step's tokens name.

Owns where these rows lie on host and on the device, and that the table itself is updated where it lives. How many rows
there are is known when a step begins; their places are for as many as there can be. Which tokens name them, the
executor knows.
"""

from typing import Literal

from ..documents.profile import Model
from ..graph.contents import Content, Role
from ..graph.ops import Perturb, Region, TakeRows
from .emission import NOWHERE, Emission
from .homes import parameter_spans


class Rows:
    """The way of a table by rows; of a plan that has none, nothing."""

    def __init__(self, emission: Emission) -> None:
        decision = emission.decision
        self._emission = emission
        self.state: int | None = None
        """The table, if it comes by rows."""
        if decision.zeroth_order and decision.zeroth_order.by_rows:
            self.state = emission.model.table
            assert self.state is not None and not emission.unified

    def has(self, state: int) -> bool:
        return state == self.state

    @property
    def elements(self) -> int:
        """Of the rows of a rank's tokens in a step, at most."""
        return rows_elements(self._emission.model, self._emission.decision.rank_tokens)

    @property
    def there(self) -> Region:
        """Where compute finds the rows."""
        return self._place("device")

    def bring(self) -> None:
        """Pack the rows and copy them to the device."""
        if self.state is None:
            return
        emission, on_host = self._emission, self._place("host")
        emission.emit(
            TakeRows(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                state=self.state,
                state_name=emission.name(self.state),
                table=self._home,
                rows=on_host,
            )
        )
        emission.move_state("h2d", on_host, self.there, Content.PARAMETERS, self.state)

    def update_home(self) -> None:
        """Make the updates that are pending of the whole table, where it lives, so that none waits for longer than a
        step; unless it is frozen."""
        emission, zeroth_order = self._emission, self._emission.decision.zeroth_order
        if self.state is None or emission.model.states[self.state].frozen:
            return
        assert zeroth_order is not None
        emission.emit(
            Perturb(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                state=self.state,
                state_name=emission.name(self.state),
                direction=0,
                updates=True,
                lags=False,
                waiting=zeroth_order.waiting(lags=False),
                start=0,
                stop=emission.model.states[self.state].elements,
                parameters=self._home,
                plus=None,
                minus=None,
                masters=zeroth_order.masters,
                on_host=True,
            )
        )

    @property
    def _home(self) -> Region:
        assert self.state is not None
        (span,) = parameter_spans(self._emission.homes, self._emission.buffers)[self.state]
        assert span.tier == "host", "a table comes by rows from host"
        return span.region

    def _place(self, tier: Literal["device", "host"]) -> Region:
        assert self.state is not None
        emission = self._emission
        nbytes = self.elements * emission.parameter_bytes[self.state]
        role = Role.PARAMETERS if tier == "device" else Role.PARAMETERS_IN_TRANSIT
        buffer = emission.passing(f"rows/{self.state}/{tier}", tier, nbytes, role, f"rows/{nbytes}")
        return Region(buffer, 0, nbytes)


def rows_elements(model: Model, tokens: int) -> int:
    """Of the rows that so many tokens of a step name at most. The model has a table."""
    assert model.table is not None
    table = model.states[model.table].table
    assert table is not None
    return table.most_elements(tokens)
