"""Shapes: the tensors of a decoder-only transformer by its sizes, and what of them a token is multiplied by.

A shape lists the tensors of each of its layers as the Hugging Face class of its family has them, so the states that a
plan streams follow from it without weights; executor/model/model.py lays out the same tensors of a real model. Which
models there are is in `models.py`, and what a config.json says in `configs.py`; nothing here knows seconds.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Literal

from ssdplan.plans.documents.matrices import Matrix
from ssdplan.plans.documents.profile import Layer, State
from ssdplan.plans.documents.state_layout import GRAIN, TENSOR_ALIGNMENT
from ssdplan.plans.documents.table import ROW_GRAIN, Table

Tensor = tuple[int, ...]
Form = Literal["gated", "gpt2", "opt"]
"""Whose formulas count a block's work: an MLP of three matrices, of two with GELU by its formula, or with ReLU."""
Norm = Literal["rms", "layer", "scale", "none"]
"""RMSNorm; LayerNorm with a bias; LayerNorm without; and LayerNorm that has no parameters."""
NORM_TENSORS: dict[Norm, int] = {"rms": 1, "layer": 2, "scale": 1, "none": 0}
HeadNorm = Literal["", "head", "wide", "each"]
"""Norms of queries and keys: none; one of a head's width for all; of all heads together; one for each head."""


@dataclass(frozen=True, slots=True)
class Build:
    """How the blocks and ends of a family are put together; sizes are a shape's."""

    form: Form = "gated"
    norm: Norm = "rms"
    norms: int = 2
    """Of a block's width, in each block."""
    query_norm: HeadNorm = ""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of attention's last product."""
    mlp_bias: bool = False
    fused_qkv: bool = False
    """Queries, keys and values are one matrix."""
    fused_gate: bool = False
    """The two matrices before the activation are one."""
    sinks: bool = False
    """A number a head that takes part in each softmax."""
    head_bias: bool = False
    embedding_norm: bool = False
    position_rows: int | None = None
    """Of a learned table of positions, the rows beyond the longest sequence; None: there is no such table."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture in the place of each block's MLP."""

    count: int
    active: int
    """Experts that a token goes through."""
    width: int
    """Of each expert's MLP."""
    shared: int = 0
    """Width of an MLP that each token goes through besides, behind a gate of its own; 0 without one."""
    biases: bool = False
    """Of experts and router."""

    @property
    def inner(self) -> int:
        """Width of all that a token goes through."""
        return self.active * self.width + self.shared


BUILDS: dict[str, Build] = {
    "llama": Build(),
    "mistral": Build(),
    "qwen2": Build(qkv_bias=True),
    "qwen3": Build(query_norm="head"),
    "gemma3_text": Build(norms=4, query_norm="head"),
    "phi3": Build(fused_qkv=True, fused_gate=True),
    "mixtral": Build(),
    "qwen3_moe": Build(query_norm="head"),
    "gpt_oss": Build(qkv_bias=True, output_bias=True, sinks=True),
    "gpt2": Build("gpt2", "layer", qkv_bias=True, output_bias=True, mlp_bias=True, fused_qkv=True, position_rows=0),
    "opt": Build("opt", "layer", qkv_bias=True, output_bias=True, mlp_bias=True, position_rows=2),
    "bloom": Build(
        "gpt2", "layer", qkv_bias=True, output_bias=True, mlp_bias=True, fused_qkv=True, embedding_norm=True
    ),
    "falcon": Build("gpt2", "layer", norms=1, fused_qkv=True),
}
"""Families of the catalogue; a config.json's are in `configs.py`, which begins with these."""
ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only transformer by its sizes."""

    name: str
    family: str
    """Its `model_type` in transformers."""
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    intermediate: int
    """Width of the MLP that a token goes through; of a mixture, of all its active experts together."""
    vocab: int
    tied: bool
    published: float
    """Parameters that its publisher names, as exactly as they are named."""
    source: str
    max_positions: int = 0
    """Of a learned table, the longest sequence; 0 without one."""
    named_positions: int = 0
    """Without a learned table, the longest sequence that its file names; 0 where none does."""
    head_width: int = 0
    """0: the hidden size over the heads."""
    experts: Experts | None = None
    own_build: Build | None = None
    """None: the family's."""
    own_architecture: str = ""
    remarks: tuple[str, ...] = ()
    """What an estimate leaves out of this model, beside what `remarks_of` says."""
    window: int = 0
    """How many tokens back some of its blocks see; 0: all do to the row's beginning."""

    @property
    def build(self) -> Build:
        return self.own_build or BUILDS[self.family]

    @property
    def form(self) -> Form:
        return self.build.form

    @property
    def architecture(self) -> str:
        return self.own_architecture or ARCHITECTURES[self.family]

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden // self.heads

    @property
    def layer_norm(self) -> bool:
        """LayerNorm rather than RMSNorm."""
        return self.build.norm != "rms"

    def embedding(self) -> tuple[Tensor, ...]:
        """Tensors that the embedding alone uses."""
        tokens: tuple[Tensor, ...] = () if self.tied else ((self.vocab, self.hidden),)
        if self.build.position_rows is not None:
            tokens += ((self.max_positions + self.build.position_rows, self.hidden),)
        return tokens + self._norms(1) if self.build.embedding_norm else tokens

    def block(self) -> tuple[Tensor, ...]:
        """Tensors of one block."""
        return (*self._attention(), *self._mlp(), *self._experts(), *self._vectors())

    def matrices(self) -> tuple[Tensor, ...]:
        """Those of a block that Muon updates: its weights of two dimensions."""
        return (*self._attention(), *self._mlp())

    def multiplied(self) -> int:
        """Elements of a block that a token is multiplied by: all its matrices, of a mixture those of active experts."""
        dense = sum(map(prod, (*self._attention(), *self._mlp())))
        if self.experts is None:
            return dense
        return dense + self.experts.active * self._matrices * self.experts.width * self.hidden

    def head(self) -> tuple[Tensor, ...]:
        """Tensors that the head alone uses: its norm, and the projection unless it is the embedding's."""
        bias: tuple[Tensor, ...] = ((self.vocab,),) if self.build.head_bias else ()
        projection: tuple[Tensor, ...] = () if self.tied else ((self.vocab, self.hidden),)
        return (*self._norms(1), *projection, *bias)

    def shared(self) -> tuple[Tensor, ...]:
        """Tensors of both ends."""
        return ((self.vocab, self.hidden),) if self.tied else ()

    @property
    def parameters(self) -> int:
        """Distinct parameters, from the tensors."""
        ends = (*self.embedding(), *self.head(), *self.shared())
        return sum(map(prod, ends)) + self.blocks * sum(map(prod, self.block()))

    @property
    def active_parameters(self) -> int:
        """Those that a token meets; of a mixture fewer than there are."""
        if self.experts is None:
            return self.parameters
        idle = (self.experts.count - self.experts.active) * self._expert_elements
        return self.parameters - self.blocks * idle

    @property
    def _matrices(self) -> int:
        """Of an MLP."""
        return 3 if self.form == "gated" else 2

    @property
    def _wide(self) -> int:
        return self.heads * self.head_dim

    @property
    def _keys(self) -> int:
        return self.kv_heads * self.head_dim

    def _attention(self) -> tuple[Tensor, ...]:
        h, query, kv = self.hidden, self._wide, self._keys
        if self.build.fused_qkv:
            return ((query + 2 * kv, h), (h, query))
        return ((query, h), (kv, h), (kv, h), (h, query))

    def _mlp(self) -> tuple[Tensor, ...]:
        """The matrices of the MLP that all tokens go through; of a mixture also its router."""
        h, width = self.hidden, self.intermediate
        own: tuple[Tensor, ...] = ()
        if self.experts is not None:
            width, own = self.experts.shared, ((self.experts.count, h),)
            if not width:
                return own
            own += ((1, h),)
        if self.form != "gated":
            return (*own, (width, h), (h, width))
        return (
            (*own, (2 * width, h), (h, width)) if self.build.fused_gate else (*own, (width, h), (width, h), (h, width))
        )

    def _experts(self) -> tuple[Tensor, ...]:
        """Each tensor has all experts of the block."""
        if self.experts is None:
            return ()
        count, width, h = self.experts.count, self.experts.width, self.hidden
        first = (self._matrices - 1) * width
        biases: tuple[Tensor, ...] = ((count, first), (count, h), (count,)) if self.experts.biases else ()
        return ((count, first, h), (count, h, width), *biases)

    @property
    def _expert_elements(self) -> int:
        """Of one expert."""
        assert self.experts is not None
        biases = (self._matrices - 1) * self.experts.width + self.hidden if self.experts.biases else 0
        return self._matrices * self.experts.width * self.hidden + biases

    def _vectors(self) -> tuple[Tensor, ...]:
        """Biases and norms of a block."""
        build, h, query, kv, i = self.build, self.hidden, self._wide, self._keys, self.intermediate
        found: list[Tensor] = []
        if build.qkv_bias:
            found += [(query + 2 * kv,)] if build.fused_qkv else [(query,), (kv,), (kv,)]
        if build.output_bias:
            found.append((h,))
        if build.mlp_bias:
            found += (
                [(i,), (h,)] if self.form != "gated" else [(2 * i,), (h,)] if build.fused_gate else [(i,), (i,), (h,)]
            )
        norms: dict[HeadNorm, list[Tensor]] = {
            "": [],
            "head": [(self.head_dim,)] * 2,
            "wide": [(query,), (kv,)],
            "each": [(self.heads, self.head_dim), (self.kv_heads, self.head_dim)],
        }
        found += norms[build.query_norm]
        if build.sinks:
            found.append((self.heads,))
        return (*found, *self._norms(build.norms))

    def _norms(self, count: int) -> tuple[Tensor, ...]:
        return ((self.hidden,),) * (count * NORM_TENSORS[self.build.norm])


def laid_out(shape: Shape, *, muon: bool = False) -> tuple[tuple[State, ...], tuple[Layer, ...]]:
    """The states and layers of such a model, in the order of executor/model/model.py: embedding, blocks, head, and last
    what both ends use. `muon`: the matrices of each block are a state of their own, which Muon updates."""
    states: list[State] = []

    def add(state: State) -> tuple[int, ...]:
        states.append(state)
        return (len(states) - 1,)

    def state(name: str, state_class: str, tensors: Sequence[Tensor], table: Table | None = None) -> tuple[int, ...]:
        if not tensors:
            return ()
        return add(State(name=name, state_class=state_class, elements=_padded(tensors), table=table))

    def block(name: str) -> tuple[int, ...]:
        if not muon:
            return state(name, "block", shape.block())
        matrices: list[Matrix] = []
        for rows, columns in shape.matrices():
            matrices.append(Matrix(rows=rows, columns=columns, start=matrices[-1].stop if matrices else 0))
        rest = state(name, "block", (*shape._experts(), *shape._vectors()))
        mine = State(
            name=f"{name}.matrices",
            state_class="block.matrices",
            elements=matrices[-1].stop,
            matrices=tuple(matrices),
        )
        return rest + add(mine)

    embedding = state("embedding", "embedding", shape.embedding(), _table(shape))
    blocks = [block(f"block.{index}") for index in range(shape.blocks)]
    head = state("head", "head", shape.head())
    tied = state("tied", "tied", shape.shared())
    layers = [Layer(name="embedding", layer_class="embedding", states=embedding + tied)]
    layers += [Layer(name=f"block.{index}", layer_class="block", states=own) for index, own in enumerate(blocks)]
    layers.append(Layer(name="head", layer_class="head", states=head + tied))
    return tuple(states), tuple(layers)


def _table(shape: Shape) -> Table | None:
    """The embedding's, which the head does not share, where the embedding has nothing else."""
    if shape.embedding() != ((shape.vocab, shape.hidden),) or shape.hidden % ROW_GRAIN:
        return None
    return Table(rows=shape.vocab, row_elements=shape.hidden)


def _padded(tensors: Sequence[Tensor]) -> int:
    """Elements of a state: each tensor begins at a multiple of TENSOR_ALIGNMENT."""
    return _up(sum(_up(prod(tensor), TENSOR_ALIGNMENT) for tensor in tensors), GRAIN)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def fingerprint(shape: Shape) -> str:
    """Of the shape, and no model's: so no run takes the plan of a what-if for one of its own."""
    said = {name: value for name, value in asdict(shape).items() if value or name not in _LATER}
    return hashlib.sha256(f"catalogue {sorted(said.items())}".encode()).hexdigest()


_LATER = ("named_positions", "head_width", "experts", "own_build", "own_architecture", "remarks", "window")
"""Fields that shapes had not always: where a shape has none of them, its fingerprint is what it was."""


def remarks_of(shape: Shape, sequence_length: int) -> tuple[str, ...]:
    """What the formulas leave out of a model of this shape in rows of so many tokens, a sentence each."""
    found = list(shape.remarks)
    if 0 < shape.named_positions < sequence_length:
        found.append(
            f"its file names {shape.named_positions:,} positions, and rows have {sequence_length:,} tokens: it knows "
            "nothing of those beyond"
        )
    if shape.experts is not None:
        found.append(
            f"a mixture: all {shape.experts.count} experts of a block stream and are updated, and a token is computed "
            f"by {shape.experts.active} ({shape.active_parameters:,} of {shape.parameters:,} parameters); sorting "
            "tokens by expert, and experts that get more tokens than others, are not in the estimate"
        )
    if shape.build.query_norm or shape.build.norms > 2:
        found.append("norms beyond two a block are in its parameters, and not in its activations and seconds")
    return tuple(found)
