"""Turns: which of a lane's ready operations goes first.

Owns the one policy that the simulator predicts by and the executor runs by: the graph's order. Where updates share a
lane with compute they go before it: they are short, and what they leave is what the drive waits for.
"""

from collections.abc import Sequence

from .schedule import Op


class Turns:
    """The order in which ops of one lane start when they are ready at once."""

    def __init__(self, ops: Sequence[Op], *, shared: bool) -> None:
        """`shared`: compute and updates are one lane."""
        self.ops = list(range(len(ops)))
        """Turn -> op."""
        if shared:
            self.ops.sort(key=lambda index: ops[index].resource != "cpu")  # stable: within each, the graph's order
        self.of = [0] * len(ops)
        """Op -> its turn; the least goes first."""
        for turn, index in enumerate(self.ops):
            self.of[index] = turn
