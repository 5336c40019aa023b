"""Contents: what a buffer of a schedule holds (its role), and what a transfer moves (its content).

Owns both closed lists, and what follows from a member alone: the words for it, the kind of work that moving it is,
whether a crash may lose it, and what its size grows with. Whoever adds a content or a role adds it here, with its row
of the table. The module knows no buffer and no operation.
"""

from dataclasses import dataclass
from enum import StrEnum

BETWEEN_LAYERS = "hidden states, checkpoints, their gradients"
"""The kind of work of every transfer of what passes between layers."""


class Role(StrEnum):
    """What a buffer holds. The values are the names in traces, plots and tables of memory."""

    PARAMETERS = "parameters"
    """Where they live, or on the device for a layer's compute."""
    OWN_MASTERS = "parameters without fp32 masters"
    """Parameters where they live whose masters are no more than they and a residual."""
    PERTURBED_PARAMETERS = "perturbed parameters"
    """A zeroth-order step's copies of a layer's parameters, at plus and at minus eps along a direction."""
    PARAMETERS_IN_TRANSIT = "parameters in transit"
    """On host, between ssd and the device, or between an update and where they live."""
    OPTIMIZER = "optimizer"
    OPTIMIZER_IN_TRANSIT = "optimizer in transit"
    """On host, between ssd and an update."""
    GRADIENTS = "gradients"
    """On the device where backward adds to them, or on host on their way to an update."""
    DELAYED_GRADIENT = "delayed gradient"
    """Where a gradient waits for the next step's forward."""
    ACCUMULATED_GRADIENTS = "accumulated gradients"
    """The sum on host of a state's gradients over micro-batches."""
    HIDDEN_STATES = "hidden states"
    """On their way from layer to layer, their gradients too."""
    CHECKPOINTS = "checkpoints"
    """Activation checkpoints."""
    SAVED_ACTIVATIONS = "saved activations"
    """What a block's forward keeps for its backward beside the activation checkpoint, or that on its way."""
    ORTHOGONALISATION = "orthogonalisation"
    """What an update of matrices works in."""


@dataclass(frozen=True, slots=True)
class RoleFacts:
    """What is known of a buffer by its role."""

    words: str
    """What people call it."""
    durable: bool = False
    """A snapshot keeps it; all else can be made from what is durable."""
    by_tokens: bool = False
    """Its bytes grow with the tokens of a micro-batch, not with the model's parameters."""


ROLES: dict[Role, RoleFacts] = {
    Role.PARAMETERS: RoleFacts("parameters"),
    Role.OWN_MASTERS: RoleFacts("parameters without fp32 masters", durable=True),
    Role.PERTURBED_PARAMETERS: RoleFacts("perturbed parameters"),
    Role.PARAMETERS_IN_TRANSIT: RoleFacts("parameters in transit"),
    Role.OPTIMIZER: RoleFacts("optimizer states", durable=True),
    Role.OPTIMIZER_IN_TRANSIT: RoleFacts("optimizer states in transit"),
    Role.GRADIENTS: RoleFacts("gradients"),
    Role.DELAYED_GRADIENT: RoleFacts("delayed gradients"),
    Role.ACCUMULATED_GRADIENTS: RoleFacts("accumulated gradients"),
    Role.HIDDEN_STATES: RoleFacts("hidden states", by_tokens=True),
    Role.CHECKPOINTS: RoleFacts("checkpoints", by_tokens=True),
    Role.SAVED_ACTIVATIONS: RoleFacts("saved activations", by_tokens=True),
    Role.ORTHOGONALISATION: RoleFacts("orthogonalisation of matrices"),
}


class Content(StrEnum):
    """What a transfer moves."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATES = "optimizer states"
    GRADIENT = "gradient"
    """A state's, for an update of the same step, or a part of its sum."""
    DELAYED_GRADIENT = "delayed gradient"
    """A state's, to where it waits for the next step, or from there."""
    HIDDEN_STATE = "hidden state"
    """A layer's input on its way from the layer below."""
    ACTIVATION_CHECKPOINT = "activation checkpoint"
    """A layer's input on its way to ssd for its backward, or from there, or to the device."""
    ACTIVATION_GRADIENT = "activation gradient"
    """The gradient of a layer's input on its way to the layer below."""
    SAVED_ACTIVATIONS = "saved activations"
    """What a block's forward keeps for its backward, on its way to where it waits, or from there."""


@dataclass(frozen=True, slots=True)
class ContentFacts:
    """What is known of a transfer by its content."""

    words: str
    """What people call it, in plans too: the seconds of a critical path are summed by these words."""
    work: str
    """The kind of work that moving it is; several contents share a kind, and so a colour."""
    title: str = ""
    """What one transfer is called, with `{state}` for the name of its state; empty for `words` alone."""


CONTENTS: dict[Content, ContentFacts] = {
    Content.PARAMETERS: ContentFacts("parameters", "parameters", "{state}"),
    Content.OPTIMIZER_STATES: ContentFacts("optimizer states", "optimizer states", "optimizer states of {state}"),
    Content.GRADIENT: ContentFacts("gradient", "gradients of parameters", "gradient of {state}"),
    Content.DELAYED_GRADIENT: ContentFacts("gradient", "gradients of parameters", "gradient of {state}"),
    Content.HIDDEN_STATE: ContentFacts("hidden state", BETWEEN_LAYERS),
    Content.ACTIVATION_CHECKPOINT: ContentFacts("checkpoint", BETWEEN_LAYERS),
    Content.ACTIVATION_GRADIENT: ContentFacts("inter-layer gradient", BETWEEN_LAYERS),
    Content.SAVED_ACTIVATIONS: ContentFacts("saved activations", BETWEEN_LAYERS),
}


def title_of(content: Content, state_name: str) -> str:
    """What people call a transfer of `content`; `state_name` is empty when it is of no state."""
    facts = CONTENTS[content]
    return facts.title.format(state=state_name) or facts.words
