"""Costs: the seconds and bytes of one micro-batch in a layer, by formula, on a device that nobody measured.

Owns the formulas of docs/catalogue.md for a model's layers; what a block could keep of its activations is in
`choices.py`. It knows no catalogue but the shapes of models, and decides nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from ssdplan.plans.documents.profile import PAPER, Rung, Timing
from ssdplan.plans.documents.state_layout import ELEMENT_BYTES, Precision

from . import Shape
from .choices import Choice, choices
from .shapes import Tensor

ALIBI = ("bloom", "mpt")
"""Families whose attention knows distances by what it adds to scores, as a mask does."""
PAIRS = ("FalconForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "GPTJForCausalLM")
"""Architectures that are given a mask of each pair of a row's tokens; the others are told by spans of tokens
(`executor/model/attention`)."""
SPANS_BYTES = 4
"""Of a token, where sequences share rows or a window is shorter than a row."""
WORTH = 0.01
"""Of a block's seconds: the least gain of a rung that keeps more than another; the profiler asks for as much."""


@dataclass(frozen=True, slots=True)
class Compute:
    """What a device reaches, FLOP/s and bytes/s."""

    flops: float
    """In the matrix products of layers."""
    memory_bandwidth: float
    attention_flops: float
    """In fused causal attention, in rows without end; less in shorter ones."""
    attention_tokens: float
    """The row length at which attention reaches half of that."""
    passes: float = 0.0
    """How often the kernels between two products move what autograd keeps of them, over once written and once read.
    They take turns with the products. 0: caches hold what one leaves to the next, and the longer of both counts."""
    launch_seconds: float = 0.0
    """What a block's forward takes at least, for its kernels are launched one by one; its backward three times that."""

    def seconds(self, products: float, attention: float, nbytes: float, length: int) -> float:
        """What so many FLOP take in matrix products and in attention on rows of `length` tokens, and so many bytes that
        are moved between them."""
        rate = self.attention_flops * length / (length + self.attention_tokens)
        work, moved = products / self.flops + attention / rate, nbytes / self.memory_bandwidth
        return work + self.passes * moved if self.passes else max(work, moved)


USUAL_SIZES, MOST_ROWS = (1, 2, 4), 64
"""Micro-batch sizes to choose between where nobody says which, and the largest that may be added."""
QUICKER, ON_DEVICE = 0.01, 0.5
"""Of a row's seconds, what a size must gain over half of it to be added; and what a block's backward may take of the
device's memory then."""


def usual_sizes(at: Callable[[int], "Costs"], device_bytes: int) -> tuple[int, ...]:
    """Micro-batch sizes to choose between: 1, 2 and 4 rows, and on by doubling as long as a block has room on a device
    of so many bytes and a row of it becomes quicker, for parameters are read once for all rows. `at`: the costs of a
    micro-batch of so many rows."""
    sizes, block = [*USUAL_SIZES], at(USUAL_SIZES[-1]).block()
    while sizes[-1] < MOST_ROWS:
        twice = at(2 * sizes[-1]).block()
        before, after = (each.forward_seconds + each.backward_seconds for each in (block, twice))
        if twice.backward_workspace_bytes > ON_DEVICE * device_bytes or after > 2 * before * (1 - QUICKER):
            break
        sizes.append(2 * sizes[-1])
        block = twice
    return tuple(sizes)


MATRIX_STEPS = 5
"""Of the iteration by which Muon orthogonalises a matrix, in torch."""
MATRIX_BYTES = 32 + MATRIX_STEPS * 6
"""That Muon's update of a matrix moves an element: momentum, gradient, master, copy and the matrix in bf16; and in each
step of the iteration the matrix, read twice and written once."""


def matrix_seconds(rows: int, columns: int, where: Compute) -> float:
    """Of Muon's update of a matrix. A step of its iteration multiplies the matrix with itself along the longer side,
    the square that this makes with itself, and the result with the matrix."""
    short, long = sorted((rows, columns))
    products = MATRIX_STEPS * (4.0 * short * short * long + 2.0 * short**3)
    return products / where.flops + MATRIX_BYTES * rows * columns / where.memory_bandwidth


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes of one micro-batch in each class of layer."""

    shape: Shape
    precision: Precision
    rows: int
    length: int
    compute: Compute
    head_chunk: int | None
    margin: float
    whole_rows: bool = False
    """Of one sequence each, without padding."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def mask(self) -> int:
        """Bytes of a mask for one token: none where every row is whole and each token sees all that are before it, and
        none where spans of tokens say as much."""
        return self.length if self._limited and not self._by_spans else 0

    @property
    def _limited(self) -> bool:
        """Whether causal order is not all that decides what a token attends to."""
        shape = self.shape
        return not self.whole_rows or shape.family in ALIBI or 0 < shape.window <= self.length

    @property
    def _by_spans(self) -> bool:
        return self.shape.family not in ALIBI and self.shape.architecture not in PAIRS

    def block(self) -> Timing:
        shape, e, tokens = self.shape, self.element, self.tokens
        elements, matrices = _elements(shape.block()), shape.multiplied()
        products = 2.0 * matrices * tokens
        # Causal attention computes half of the scores: 2 of 4 x length^2 x width FLOP a row.
        attention = 2.0 * self.rows * self.length**2 * shape.heads * shape.head_dim
        saved = self._saved()
        least = self.compute.launch_seconds
        forward = max(self._roofline(products, e * elements + 2 * saved, attention), least)
        # Recomputes the forward, and computes two gradients for each product; fused attention makes its scores anew.
        backward = max(self._roofline(3 * products, 3 * (e * elements + 2 * saved), 3.5 * attention), 3 * least)
        gradients = e * max(prod(t) for t in shape.block())
        h, i = shape.hidden, shape.intermediate
        width = {"gpt2": 3 * h + 4 * i, "opt": h + 2 * i}.get(shape.form, 2 * h + 3 * i)
        timing = self._timing(
            forward,
            backward + self._accumulation(elements),
            forward_workspace=e * tokens * width,
            backward_workspace=max(
                saved + e * tokens * (h + i) + max(gradients, e * tokens * i),
                saved - tokens * self._saved_of_mlp() + self._attention_workspace(),
            ),
            saved=saved,
        )
        return timing.model_copy(update={"rungs": tuple(self._rungs(timing))})

    def _rungs(self, timing: Timing) -> tuple[Rung, ...]:
        """What the block could keep, in rising order of bytes. `timing` is that of the block that keeps nothing."""
        found: list[Rung] = []
        backward = timing.backward_seconds
        for choice in choices(self.shape, self.element):
            rung = self.rung(choice, timing)
            backward = min(rung.backward_seconds, backward)
            found.append(rung.model_copy(update={"backward_seconds": backward}))
        return _worthwhile(found, timing)

    def rung(self, choice: Choice, timing: Timing) -> Rung:
        """What a block takes that keeps so much. Kept values are moved once more, into their places, and backward
        computes again what it does not find."""
        shape, e, tokens, bandwidth = self.shape, self.element, self.tokens, self.compute.memory_bandwidth
        elements, matrices = _elements(shape.block()), shape.multiplied()
        # Two gradients for each product; fused attention makes its scores anew for its own.
        attention = 2.5 * 2.0 * self.rows * self.length**2 * shape.heads * shape.head_dim
        nbytes = 2 * (e * elements + 2 * timing.saved_activation_bytes) + e * choice.matrices
        backward = self._roofline(2.0 * (2 * matrices + choice.matrices) * tokens, nbytes, attention)
        backward = max(backward, 2 * self.compute.launch_seconds)
        kept = tokens * choice.nbytes
        return Rung(
            name=choice.name,
            values=tuple(choice.values),
            kept_bytes=kept,
            forward_seconds=timing.forward_seconds + max(self.compute.passes, 1.0) * 2 * kept / bandwidth,
            backward_seconds=backward + tokens * choice.passes / bandwidth + self._accumulation(elements),
            forward_workspace_bytes=self._with_margin(tokens * choice.forward_workspace),
            backward_workspace_bytes=self._with_margin(choice.backward_workspace(tokens)),
        )

    def _attention_workspace(self) -> int:
        """Bytes of a fused backward: gradients of its output, queries, keys and values, fp32 sums of the latter three,
        and two numbers a head and token."""
        wide = self.shape.heads * self.shape.head_dim
        return self.tokens * (4 * self.element * wide + 12 * wide + 8 * self.shape.heads)

    def _saved_of_mlp(self) -> int:
        """Of what autograd keeps, bytes a token."""
        kept = {"gpt2": 5, "opt": 1}.get(self.shape.form, 4)  # GELU by its formula keeps every step
        return kept * self.element * self.shape.intermediate

    def _saved(self) -> int:
        """Bytes that autograd keeps of a block: norms, attention, MLP and, for rows that need one, the mask."""
        shape, e = self.shape, self.element
        h, wide = shape.hidden, shape.heads * shape.head_dim
        # Under a mask keys and values are repeated for all heads; without one the kernel takes them as they are.
        keys = wide if self.mask else shape.kv_heads * shape.head_dim
        attention = 2 * e * (wide + keys) + 4 * shape.heads + e * self.mask
        if shape.layer_norm:
            norms = 3 * e * h + 4 * e
        else:
            upcast = 1 if self.precision == "fp32" else 2  # RMSNorm computes in fp32
            norms = 4 * h * upcast + 4 * e * h + 8
        return self.tokens * (norms + attention + self._saved_of_mlp())

    def embedding(self) -> Timing:
        shape, e, tokens = self.shape, self.element, self.tokens
        table = e * shape.vocab * shape.hidden
        elements = _elements((*shape.embedding(), *shape.shared()))
        output = 2 * e * tokens * shape.hidden
        positions = self.length if self.whole_rows else tokens
        tables = 0 if shape.layer_norm else positions * (18 * shape.head_dim + 8)  # rotary, in fp32 on the way
        passes = 3 if shape.layer_norm else 1
        # The masks of rows that several sequences share are made in steps; OPT is given a whole one.
        masks = 1 if shape.form == "opt" else 3 if shape.layer_norm else 4
        forward = tokens * passes * e * shape.hidden + max(tokens * self.mask + tables, tokens * masks * self.mask)
        return self._timing(
            self._roofline(0.0, output),
            # The gradient is dense: a whole table of zeros, and rows added.
            self._roofline(0.0, 2 * output) + self._accumulation(elements),
            forward_workspace=forward,
            backward_workspace=max(table + e * tokens * shape.hidden, forward),
            saved=0,
        )

    def head(self) -> Timing:
        shape, e, tokens = self.shape, self.element, self.tokens
        elements = _elements((*shape.head(), *shape.shared()))
        table = shape.vocab * shape.hidden
        upcast = e if e < 4 else 0
        norm = e * shape.hidden + 2 * e if shape.layer_norm else 8 * shape.hidden + 4
        most = min(tokens, self.head_chunk or tokens)
        chunks = [most] * (tokens // most) + ([tokens % most] if tokens % most else [])
        # Logits are written, read and, in fp32, written again; the loss reads and writes them once more.
        loss = self._roofline(0.0, tokens * shape.vocab * (2 * upcast + 12))
        products = sum(self._roofline(2.0 * table * chunk, e * elements) for chunk in chunks)
        gradients = sum(self._roofline(6.0 * table * chunk, 3 * e * elements) for chunk in chunks)
        logits = most * shape.vocab
        return self._timing(
            products + loss,
            gradients + 2 * loss + len(chunks) * self._accumulation(elements),
            forward_workspace=8 * logits + 8 * most,
            backward_workspace=max(12 * logits + most * norm, e * table + e * logits + 12 * most * shape.hidden),
            saved=tokens * (4 * shape.vocab + norm),
        )

    def context_bytes(self) -> int:
        """Token ids, labels, and mask or positions; what layers are called with: a mask or spans, positions and rotary
        tables, of each row where several sequences share one, and of all together where none does."""
        mask = SPANS_BYTES if self._limited and self._by_spans else self.mask
        rotary = 0 if self.shape.layer_norm else 2 * self.element * self.shape.head_dim
        if self.whole_rows:
            positions = self.tokens if self.shape.form == "opt" else self.length
            return self.tokens * (16 + mask) + 8 * positions + self.length * rotary
        return self.tokens * (24 + mask + 8 + rotary)

    def _roofline(self, products: float, nbytes: float, attention: float = 0.0) -> float:
        return self.compute.seconds(products, attention, nbytes, self.length)

    def _accumulation(self, elements: int) -> float:
        """Seconds to write a gradient, and to read it and add it to its fp32 sum."""
        return elements * (2 * self.element + 8) / self.compute.memory_bandwidth

    def _timing(
        self, forward: float, backward: float, *, forward_workspace: int, backward_workspace: int, saved: int
    ) -> Timing:
        return Timing(
            micro_batch_size=self.rows,
            forward_seconds=forward,
            backward_seconds=backward,
            forward_workspace_bytes=self._with_margin(forward_workspace),
            backward_workspace_bytes=self._with_margin(backward_workspace),
            saved_activation_bytes=saved,
        )

    def _with_margin(self, workspace: int) -> int:
        return round(workspace * (1 + self.margin))


def _worthwhile(rungs: Iterable[Rung], timing: Timing) -> tuple[Rung, ...]:
    """PyAO's rung, and those of the others that gain more than what keeps less. A plan mixes rungs, so one that gains
    no more for its bytes than a mixture of two others would only make the search longer."""
    whole = timing.forward_seconds + timing.backward_seconds
    found: list[Rung] = []
    points = [(0, 0.0)]  # (bytes, seconds gained) of nothing and of what was found
    for rung in rungs:
        point = (rung.kept_bytes, whole - rung.forward_seconds - rung.backward_seconds)
        if rung.name != PAPER and point[1] < points[-1][1] + WORTH * (whole - points[-1][1]):
            continue
        while found and found[-1].name != PAPER and _slope(points[-1], point) >= _slope(points[-2], points[-1]):
            found.pop()
            points.pop()
        found.append(rung)
        points.append(point)
    return tuple(found)


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(prod(tensor) for tensor in tensors)
