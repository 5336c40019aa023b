"""Stages: what one kind of stage of a step takes, and the layers that cost the same.

Owns these records. `traffic.py`, `horizontal.py` and `saved.py` fill them.
"""

from dataclasses import dataclass, field

from ssdplan.plans.documents.plan import SavedTier, ScheduleName
from ssdplan.plans.documents.state_layout import ELEMENT_BYTES, USUAL, OptimizerFormats, Precision, formats_in
from ssdplan.plans.documents.zeroth_order import ZerothOrder, parameter_format

from .variables import Linear, Variable


@dataclass(frozen=True, slots=True)
class Work:
    """All that forms depend on beside model and machine."""

    micro_batch_size: int
    micro_batches: int
    schedule: ScheduleName
    formats: OptimizerFormats = USUAL
    """Of optimizer states."""
    unified_memory: bool = False
    keeps: bool = False
    """The device may keep parameters between their uses."""
    saves: tuple[SavedTier, ...] = ()
    """Where activations may be saved."""
    zeroth_order: ZerothOrder | None = None
    """Of the zeroth-order schedule."""
    updates_on_device: bool = False
    """The device may keep optimizer states too, and update them."""
    checkpoints_on_device: bool = False
    """The device may keep activation checkpoints."""
    matrices_on_device: bool = False
    """The device updates all matrices, whose optimizer states come there for it where they live elsewhere."""
    updates_wait: bool = False
    """No update may begin before a step's last gradient is there."""
    ranks: int = 1
    """That train together: all forms are of one of them."""

    def parameter_bytes(self, use: "Use") -> int:
        """An element of a state's parameters, wherever they live, move and are updated."""
        return parameter_format(use.precision, self.zeroth_order, frozen=use.frozen).element_bytes

    def formats_of(self, use: "Use") -> OptimizerFormats:
        """Of a state's optimizer states."""
        return formats_in(use.precision, self.formats, muon=use.muon)


@dataclass(frozen=True, slots=True)
class Stage:
    """What one kind of stage takes, and how many of them a step has."""

    layer_class: str
    phase: str
    """forward or backward."""
    count: int
    read_bytes: Linear
    write_bytes: Linear
    updates: Linear
    """Elements."""
    h2d_bytes: Linear
    d2h_bytes: Linear
    compute_seconds: Linear
    device_updates: Linear = field(default_factory=dict)
    """Elements that compute's own device updates."""
    matrices: Linear = field(default_factory=dict)
    """Of `updates`, the elements of matrices that Muon updates."""
    matrix_seconds: Linear = field(default_factory=dict)
    """What those take, which no rate of elements says."""
    device_matrix_seconds: Linear = field(default_factory=dict)
    """What the device's updates of matrices take; they are not among `device_updates`."""
    perturbed: float = 0.0
    """Elements of which perturbed copies are made, once for each direction that is drawn for them."""
    pending: Linear = field(default_factory=dict)
    """Elements times the updates that are pending of them, on average."""
    on_host: float = 0.0
    """Elements of a table times the updates that host makes of them, on average over steps."""
    taken: float = 0.0
    """Bytes of rows of a table that host packs."""
    gathered: Linear = field(default_factory=dict)
    """Bytes of the other ranks' parameters that come."""
    exchanged: float = 0.0
    """Bytes of gradients that come from the other ranks."""
    added: float = 0.0
    """Bytes of all ranks' gradients that are added up."""
    collectives: int = 0


@dataclass(frozen=True, slots=True)
class Use:
    """One state of a layer."""

    state_class: str
    elements: int
    """Of it, or of several ranks each rank's share."""
    own: bool
    """The layer is the first that uses the state: it owns its updates."""
    shared: bool
    """Another layer uses it too."""
    frozen: bool
    """It has parameters only, which nothing updates."""
    whole: int
    """Elements of all ranks."""
    padded: int
    """The same with the padding behind the last ranks' shares."""
    precision: Precision
    """Of its parameters."""
    muon: bool = False
    """Muon updates it."""
    seconds: float = 0.0
    """Of Muon's update of all of it, on host."""
    device_seconds: float | None = None
    """The same on the device, if that can."""

    @property
    def element(self) -> int:
        """Bytes of a parameter that compute takes."""
        return ELEMENT_BYTES[self.precision]

    @property
    def others(self) -> int:
        """Elements that come from the other ranks."""
        return self.padded - self.elements

    @property
    def updated(self) -> bool:
        """The layer is the one that updates the state."""
        return self.own and not self.frozen


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that cost the same, stage by stage."""

    layer_class: str
    role: str
    """embedding, block or head."""
    uses: tuple[Use, ...]
    backward: bool
    """It is not below all layers that are trained."""
    lowest: bool
    """Of those the first, which hands no gradient down."""
    keeps_output: bool
    """Its output is a checkpoint, not only the next layer's input."""
    head_share: float
    """The part of the head's delayed updates that runs during its forward."""
    count: int = field(default=1)


@dataclass(slots=True)
class Updating:
    """The updates of a stage while they are being summed: what of `Stage` says them."""

    host: dict[Variable, float] = field(default_factory=dict)
    device: dict[Variable, float] = field(default_factory=dict)
    matrices: dict[Variable, float] = field(default_factory=dict)
    seconds: dict[Variable, float] = field(default_factory=dict)
    device_seconds: dict[Variable, float] = field(default_factory=dict)

    def add(self, use: Use, share: float, on_host: Linear, on_device: Linear, *, visits: bool = False) -> None:
        """A share of a state, of which host updates the fraction `on_host` and the device that `on_device`; where it
        `visits` the device for it, that updates both."""
        size = share * use.elements
        if visits:
            assert use.device_seconds is not None, "matrices whose updates on the device nobody measured"
            _add(self.device_seconds, on_host, share * use.device_seconds)
            _add(self.device_seconds, on_device, share * use.device_seconds)
            return
        _add(self.host, on_host, size)
        if not use.muon:
            _add(self.device, on_device, size)
            return
        _add(self.matrices, on_host, size)
        _add(self.seconds, on_host, share * use.seconds)
        if use.device_seconds is not None:
            _add(self.device_seconds, on_device, share * use.device_seconds)


def _add(total: dict[Variable, float], form: Linear, factor: float) -> None:
    for variable, each in form.items():
        total[variable] = total.get(variable, 0.0) + factor * each
