"""Compute: the two verbs that run a layer for one micro-batch on what the other verbs have brought to the device."""

from ..graph.ops import Backward, Forward, Region, Side
from .emission import NOWHERE, Emission
from .parameters import Parameters
from .updates import Updates


class Compute:
    """Forward and backward ops of a schedule."""

    def __init__(self, emission: Emission, parameters: Parameters, updates: Updates | None) -> None:
        """`updates`: of orders that run backward."""
        self._emission, self._parameters, self._updates = emission, parameters, updates

    def forward(
        self,
        stage: int,
        layer: int,
        micro_batch: int,
        hidden: Region | None,
        out: Region | None,
        rung: str = "",
        saved: Region | None = None,
        *,
        weights: tuple[Region, ...] | None = None,
        direction: int = 0,
        side: Side = "",
        by_rows: bool = False,
    ) -> None:
        """The head's, in evaluation, has no `out`; the embedding's has no `hidden`. What `rung` keeps is in `saved`.
        `weights`: where they are not those of the model itself, but on a `side` of a `direction`, or `by_rows`."""
        emission = self._emission
        emission.emit(
            Forward(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                layer=layer,
                layer_class=emission.model.layers[layer].layer_class,
                micro_batch=micro_batch,
                weights=self._parameters.weights(stage, layer) if weights is None else weights,
                hidden=hidden,
                out=out,
                rung=rung,
                saved=saved,
                direction=direction,
                side=side,
                by_rows=by_rows,
            )
        )

    def backward(
        self,
        stage: int,
        layer: int,
        micro_batch: int,
        hidden: Region | None,
        out_gradient: Region | None,
        in_gradient: Region | None,
        rung: str = "",
        saved: Region | None = None,
        *,
        first: bool,
    ) -> None:
        """The lowest layer has no `in_gradient`. `first`: the step's first backward of this layer, so of each state's
        gradient it begins the sum, unless a layer above, which shares the state, has begun it. What the forward kept
        by `rung` lies in `saved`."""
        emission = self._emission
        assert self._updates is not None
        states = emission.model.trained(layer)
        gradients = tuple(self._updates.gradient(stage, state) for state in states)
        emission.emit(
            Backward(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                layer=layer,
                layer_class=emission.model.layers[layer].layer_class,
                micro_batch=micro_batch,
                weights=self._parameters.weights(stage, layer),
                hidden=hidden,
                out_gradient=out_gradient,
                in_gradient=in_gradient,
                gradients=gradients,
                rung=rung,
                saved=saved,
                fresh=tuple(first and emission.model.uses(state)[-1] == layer for state in states),
            )
        )
