"""Choices: what a block of each family could keep of its activations, and what backward then rebuilds; bytes a token.

Owns the four choices of an estimate, which follow from the shape (docs/catalogue.md). The profiler finds its own in the
graph of a block; these keep the same values. It knows no seconds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ssdplan.plans.documents.profile import PAPER

from .shapes import Shape


@dataclass(frozen=True, slots=True)
class Choice:
    """What a block's forward keeps beside its input. Bytes are those of a token unless a field says otherwise."""

    name: str
    values: Mapping[str, int]
    """Bytes of each kept value."""
    matrices: int
    """Elements of the matrices whose products backward computes again."""
    passes: int
    """Bytes that backward reads and writes to rebuild all else: norms, rotations, activations."""
    forward_workspace: int
    mlp_workspace: int
    """Of backward, while it is in the MLP."""
    attention_workspace: int
    """Of backward, while it is in attention."""
    gradient: int = 0
    """Bytes of the gradient of a matrix, however many tokens there are, that lies beside `mlp_workspace`."""

    @property
    def nbytes(self) -> int:
        return sum(self.values.values())

    def backward_workspace(self, tokens: int) -> int:
        """Bytes of a micro-batch of `tokens`."""
        return max(tokens * self.mlp_workspace + self.gradient, tokens * self.attention_workspace)


def choices(shape: Shape, element: int) -> tuple[Choice, ...]:
    """What a block could keep, in rising order of bytes. `element`: bytes of a number in the model's precision.

    `rung-1` keeps what is costly to rebuild for its bytes: the output of attention, its log-sum-exp, and the sum behind
    it. `rung-2` keeps queries, keys and values too, so all but the widest values of the MLP. `rung-3` keeps these too,
    as far as a matrix product makes them, so that only norms and activation functions are computed again. PyAO's choice
    keeps all that autograd does but the output of the activation function, which section 4.4 of the paper names as an
    outlier.
    """
    of_family = {"gpt2": _gpt2, "opt": _opt}.get(shape.form, _gated)
    return tuple(sorted(of_family(_Sizes(shape, element)), key=lambda choice: choice.nbytes))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a block that families share."""

    shape: Shape
    element: int

    @property
    def hidden(self) -> int:
        """Bytes of a hidden state."""
        return self.element * self.shape.hidden

    @property
    def inner(self) -> int:
        """Bytes of the MLP's inner width."""
        return self.element * self.shape.intermediate

    @property
    def wide(self) -> int:
        """Bytes of all heads together."""
        return self.element * self.shape.heads * self.shape.head_dim

    @property
    def keys(self) -> int:
        return self.element * self.shape.kv_heads * self.shape.head_dim

    @property
    def attention(self) -> dict[str, int]:
        return {"attention output": self.wide, "log-sum-exp": 4 * self.shape.heads, "sum after attention": self.hidden}

    @property
    def heads(self) -> dict[str, int]:
        return {"queries": self.wide, "keys": self.keys, "values": self.keys}

    @property
    def layer_norms(self) -> dict[str, int]:
        return {"norms": 2 * self.hidden, "scales of norms": 4 * self.element}

    @property
    def projections(self) -> int:
        """Elements of the matrices of queries, keys and values."""
        return self.shape.hidden * (self.wide + 2 * self.keys) // self.element

    @property
    def gradient(self) -> int:
        """Bytes of the largest matrix's gradient."""
        return self.element * max(prod(tensor) for tensor in self.shape.block())

    @property
    def attention_workspace(self) -> int:
        """Gradients; and fp32 sums and two numbers a head on a GPU, or as much for rotations and the mask."""
        return max(9 * self.wide, 4 * self.wide + 12 * self.wide // self.element) + 8 * self.shape.heads


def _gated(of: _Sizes) -> Iterator[Choice]:
    """RMSNorm, rotary embeddings, and an MLP of three matrices. In 16 bits a norm makes fp32 copies on its way."""
    h, hidden, inner, floor = of.shape.hidden, of.hidden, of.inner, of.attention_workspace
    upcasts, mlp = of.element < 4, 2 * h * of.shape.intermediate
    scales, products = {"scales of norms": 8}, {"gate product": inner, "up product": inner}
    norm = 16 * h + 4 * hidden if upcasts else 16 * h
    expansion = 0 if of.keys == of.wide else 2 * (of.wide + of.keys)
    rotation = 10 * (of.wide + of.keys)
    passes = 2 * norm + expansion + 5 * inner  # SiLU reads and writes, its product with the other reads twice
    few = (3 * inner, 5 * inner + 8 * h, floor)
    yield Choice("rung-1", of.attention | scales, of.projections + mlp, passes + rotation, *few)
    yield Choice("rung-2", of.attention | of.heads | scales, mlp, passes, *few)
    kept = of.attention | of.heads | products | scales
    more = max(2 * inner + hidden, 12 * h), 3 * inner + (5 * h if upcasts else 2 * h), floor, of.gradient
    yield Choice("rung-3", kept, 0, passes, *more)
    everything = kept | {"norms": (8 * h if upcasts else 0) + 4 * hidden, "input of the last product": inner}
    if upcasts:
        del everything["sum after attention"]  # autograd keeps its fp32 copy, which is among the norms'
    yield Choice(PAPER, everything, 0, expansion + 2 * inner, max(2 * inner, 12 * h), 3 * inner, floor, of.gradient)


def _gpt2(of: _Sizes) -> Iterator[Choice]:
    """LayerNorm, and GELU by its formula, of which autograd keeps every step."""
    hidden, inner, floor = of.hidden, of.inner, of.attention_workspace
    mlp, product = of.shape.hidden * of.shape.intermediate, {"first product of the MLP": inner}
    norms, function = 4 * hidden, 18 * inner
    few = (4 * inner, 6 * inner + hidden, floor, of.gradient)
    more = (3 * inner, 5 * inner, floor, of.gradient)
    yield Choice("rung-1", of.attention, of.projections + mlp, norms + function, *few)
    yield Choice("rung-2", of.attention | of.heads, mlp, norms + function, *few)
    yield Choice("rung-3", of.attention | of.heads | product, 0, norms + function, *more)
    yield Choice(PAPER, of.attention | of.heads | product | of.layer_norms, 0, function, *more)


def _opt(of: _Sizes) -> Iterator[Choice]:
    """LayerNorm, and ReLU, of which autograd keeps only the output: rebuilding that takes the product before it."""
    hidden, inner, floor = of.hidden, of.inner, of.attention_workspace
    mlp = of.shape.hidden * of.shape.intermediate
    norms, function = 4 * hidden, 2 * inner
    few = (2 * inner, 3 * inner + hidden, floor)
    yield Choice("rung-1", of.attention, of.projections + mlp, norms + function, *few)
    yield Choice("rung-2", of.attention | of.heads, mlp, norms + function, *few)
    yield Choice(PAPER, of.attention | of.heads | of.layer_norms, mlp, function, 2 * inner, 3 * inner, floor)
    kept = of.attention | of.heads | {"activation": inner}
    yield Choice("rung-3", kept, 0, norms, 2 * inner, 2 * inner, floor)
