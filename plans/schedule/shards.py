"""Shards: which elements of a state each rank owns, and how all ranks' shares lie side by side on every rank.

Owns that geometry (docs/architecture.md, "Several ranks"). A share is a whole number of grains, equal on all ranks, so
that one collective takes them all; the last ranks' may be padding in part, or wholly where a state is small.
"""

from dataclasses import dataclass

from ..documents.profile import Model
from ..documents.state_layout import GRAIN


@dataclass(frozen=True, slots=True)
class Shards:
    """The view of one rank of so many."""

    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks, "a rank outside its world"

    @property
    def alone(self) -> bool:
        return self.ranks == 1

    def owned(self, model: Model) -> Model:
        """`model` with a rank's share of each state; of one rank as it is."""
        if self.alone:
            return model
        states = (state.model_copy(update={"elements": self.share(state.elements)}) for state in model.states)
        return model.model_copy(update={"states": tuple(states)})

    def share(self, elements: int) -> int:
        """Elements of every rank's share of a state, with padding."""
        return elements if self.alone else -(-elements // (self.ranks * GRAIN)) * GRAIN

    def whole(self, elements: int) -> int:
        """Elements of all shares side by side: the state's, and padding behind them."""
        return self.share(elements) * self.ranks

    def own(self, elements: int) -> tuple[int, int]:
        """[start, stop) of the state's elements that this rank owns; nothing where its share is padding alone."""
        share = self.share(elements)
        return min(self.rank * share, elements), min((self.rank + 1) * share, elements)
