"""Choices: what the linear program is given besides model and machine: the user's decisions, and the limits.

Owns these records. It states and solves nothing, so that whoever only makes a request loads no solver.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ssdplan.plans.documents.plan import Recompute, SavedTier, ScheduleName
from ssdplan.plans.documents.state_layout import USUAL, OptimizerFormats
from ssdplan.plans.documents.zeroth_order import ZerothOrder

WEAR_PRICE = 0.1
"""A percent of tokens/s for ten percent more bytes written a step."""


class KeptShares(NamedTuple):
    """What the device keeps of one class, as fractions of its states, each whole."""

    device: float = 0.0
    """Parameters, for the whole run."""
    turn: float = 0.0
    """Parameters, from forward to backward."""
    updated: float = 0.0
    """Of those for the whole run: their optimizer states too."""


KEPT_NOTHING = KeptShares()


class KeptWithin(NamedTuple):
    """What the device may keep of one class while the program chooses: between two shares of its parameters, and two of
    its optimizer states."""

    state_class: str
    device: tuple[float, float] = (0.0, 1.0)
    updated: tuple[float, float] = (0.0, 1.0)

    def split(self, below: float, above: float, *, updated: bool) -> tuple["KeptWithin", "KeptWithin"]:
        """The same with at most `below` of its optimizer states, or of its parameters, and with at least `above`."""
        least, most = self.updated if updated else self.device
        parts = (least, below), (above, most)
        if updated:
            down, up = (self._replace(updated=part) for part in parts)
        else:
            down, up = (self._replace(device=part) for part in parts)
        return down, up


@dataclass(frozen=True, slots=True)
class FixedChoices:
    """What the user has decided; None leaves it to the program. Residencies are fractions on host."""

    delay_ratio: float | None = None
    parameters: float | None = None
    optimizer: float | None = None
    checkpoints: float | None = None
    """Of the activation checkpoints that the device does not keep."""
    checkpoints_device: float | None = None
    """The fraction of blocks whose activation checkpoints the device keeps."""
    updates_there: bool = True
    """Whether the program may have the device keep optimizer states, where nobody has said otherwise."""
    formats: OptimizerFormats = USUAL
    """Of optimizer states. It changes numbers, so it is never the program's choice."""
    clip_grad_norm: float | None = None
    """Of no weight here: whoever sets it sets the delay ratio to 1 too."""
    kept: Mapping[str, KeptShares] | None = None
    """State class -> what of it stays on the device. None leaves that to the program, as fractions of elements; where
    `Limits.device_bytes` is None, it is nothing."""
    kept_within: tuple[KeptWithin, ...] = ()
    """Where `kept` is None: classes of which the device may only keep so much."""
    schedule: ScheduleName = "vertical"
    """Whose forms are taken; whoever sets horizontal sets the delay ratio to 0 too."""
    zeroth_order: ZerothOrder | None = None
    """Of the zeroth-order schedule, which has no gradients: whoever sets it sets the delay ratio to 0 and the fraction
    of activation checkpoints on host to 1."""
    matrices_on_device: bool = False
    """The device updates all matrices, whose optimizer states come there for it where they live elsewhere."""
    ranks: int = 1
    """That train together."""
    unified_memory: bool = False
    """Compute works on host memory: what "the device keeps" is kept there, by whole states, and no parameters are in
    any other form on host. `parameters` then speaks of those."""
    recompute: Recompute = "auto"
    wear_price: float = WEAR_PRICE
    """Of a step's seconds: what twice the bytes written to ssd would have to gain, in proportion, before activations go
    there."""

    @property
    def shares(self) -> int:
        """So many ranks each state is shared out among."""
        return 1 if self.zeroth_order else self.ranks

    @property
    def recompute_leanly(self) -> Recompute:
        """What backward recomputes where memory alone counts."""
        return self.recompute if self.recompute in ("none", "paper") else "all"

    def where_free(
        self,
        delay_ratio: float,
        parameters: float,
        optimizer: float,
        checkpoints: float,
        checkpoints_device: float | None,
    ) -> "FixedChoices":
        """These, with as much where nobody has decided it."""
        return replace(
            self,
            delay_ratio=delay_ratio if self.delay_ratio is None else self.delay_ratio,
            parameters=parameters if self.parameters is None else self.parameters,
            optimizer=optimizer if self.optimizer is None else self.optimizer,
            checkpoints=checkpoints if self.checkpoints is None else self.checkpoints,
            checkpoints_device=checkpoints_device if self.checkpoints_device is None else self.checkpoints_device,
        )

    def saved_tiers(self, device_bytes: float | None) -> tuple[SavedTier, ...]:
        """Where activations may be saved; on the device only where there is a limit to what it keeps."""
        if self.recompute == "all":
            return ()
        return ("host", "ssd") if self.unified_memory or device_bytes is None else ("device", "host", "ssd")


FREE = FixedChoices()
"""Everything is left to the program."""


class GradientBuffers(NamedTuple):
    """Buffers that updates of large states on host take, the gradients' above all. The states follow each other in the
    same ones, which are as large as the largest that host updates needs."""

    classes: tuple[tuple[str, float], ...] = ()
    """Class of one state -> its elements, in proportion to those of the largest."""
    host: float = 0.0
    """Bytes when host updates all of the largest."""
    device: float = 0.0


NO_BUFFERS = GradientBuffers()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a placement may take. None: no limit."""

    host_bytes: float
    """For what stays on host, and for the kinds of pipeline buffers below."""
    ssd_bytes: float | None = None
    """Size of the store."""
    ssd_write_bytes: float | None = None
    """Written a step: the drive's wear."""
    device_bytes: float | None = None
    """For what the device keeps between uses, and for its buffers below; None: it keeps nothing, unless that is
    fixed."""
    parameter_buffers: tuple[tuple[str, float], ...] = ()
    """Class of states -> host bytes that its parameters on their way take when all live on ssd; in proportion to the
    fraction that does."""
    checkpoint_buffers: float = 0.0
    """The same of checkpoints."""
    gradient_buffers: GradientBuffers = NO_BUFFERS
    """On host and device besides; in proportion to the most elements of a class that the device does not update."""
    saved_in_transit: float = 0.0
    """Pairs of layer and micro-batch whose saved activations are on their way to ssd or back at once, if all are saved
    there; on host besides, in proportion to the fraction that is."""
    pair_bytes: float | None = None
    """Of a pair whose saved activations pass through the device, which has places for a few at once."""

    @property
    def buffers(self) -> float:
        """Of all kinds, when all lives on ssd and host updates it."""
        parameters = sum(nbytes for _, nbytes in self.parameter_buffers)
        return parameters + self.checkpoint_buffers + self.gradient_buffers.host

    def without_buffers(self, host_bytes: float) -> "Limits":
        """These with `host_bytes` of host memory for what stays, whatever passes through it."""
        none = NO_BUFFERS
        return replace(self, host_bytes=host_bytes, parameter_buffers=(), checkpoint_buffers=0.0, gradient_buffers=none)


Aim = Literal["seconds", "host memory", "ssd space", "ssd writes"]


@dataclass(frozen=True, slots=True)
class Question:
    """All that a program depends on beside model and machine."""

    micro_batch_size: int
    micro_batches: int
    limits: Limits
    fixed: FixedChoices = FREE
    aim: Aim = "seconds"
    """What comes before the seconds of a step, if not they."""
