"""What a Hugging Face causal language model is made of, once it is opened: layers, their states, and its own code.

Owns opening a model directory, and deciding whether the model can be streamed exactly. It reads no weights (persistent
buffers excepted), trains nothing and touches no GPU.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from ssdplan.native.process import growing_at_most, host_memory
from ssdplan.plans.errors import MismatchError, UsageError, first_line

from ..data.reading.model_config import blamed, read_config, require_regular
from .directory.freezing import frozen_parameters
from .directory.loaded import Zeroed, in_fp32, initialise
from .directory.shards import Checkpoint
from .directory.weight_files import weight_files
from .inspection.advice import without_advice
from .inspection.blocks import Refusal
from .inspection.inspection import Anatomy, inspect
from .inspection.routing import Routing
from .kinds import muon_parameters, said_of_muon
from .layout import LayerSpec, StateSpec, lay_out

_SAID = 400
"""Characters, at most, of what a library says of a value: the value itself may be long."""

_NAMED = 3
"""Kinds of parameters that a remark lists."""
_LEAST_BUILT, _MOST_BUILT = 2 << 30, 16 << 30

# Fields of a configuration that change neither what a model computes nor its tensors.
_VOLATILE_FIELDS = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "architectures",
        "auto_map",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "id2label",
        "label2id",
        "task_specific_params",
        "problem_type",
        "bos_token_id",
        "eos_token_id",
        "sep_token_id",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_commit_hash",
    }
)


@dataclass(frozen=True, eq=False)
class StreamedModel:
    """A model opened for streaming: its parts and layout, and the model itself without weights.

    `layers` are the embedding, block.0 to block.L-1 and the head. `module` has its parameters on the meta device and
    its buffers real. `max_sequence_length` is the longest sequence that the model computes exactly, None if any.
    `freeze` are the patterns that it was opened with. `zeroed` are ranges of parameters that from_pretrained sets to
    zero whatever is stored. `allow_unused_weights`: stored tensors that the model has no place for may be left out.
    """

    path: Path
    name: str
    architecture: str
    config: PretrainedConfig
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    layers: tuple[LayerSpec, ...]
    states: tuple[StateSpec, ...]
    fingerprint: str
    module: PreTrainedModel
    anatomy: Anatomy
    max_sequence_length: int | None
    freeze: tuple[str, ...] = ()
    zeroed: tuple[Zeroed, ...] = ()
    allow_unused_weights: bool = False
    checkpoints_itself: bool = False
    """Whether its config.json asks for that; here it is off."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of each state, the dtype of its parameters as compute takes them."""
        return tuple(torch.float32 if state.precision == "fp32" else self.dtype for state in self.states)

    @property
    def frozen_states(self) -> tuple[int, ...]:
        """Indices of the states that are not trained."""
        return tuple(index for index, state in enumerate(self.states) if state.frozen)

    def trained(self, layer: int) -> tuple[int, ...]:
        """The states of a layer that are trained."""
        return tuple(index for index in self.layers[layer].states if not self.states[index].frozen)

    @property
    def first_trained(self) -> int:
        """The lowest layer that trains anything; none below it runs backward."""
        return next(layer for layer in range(len(self.layers)) if self.trained(layer))

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's own decoder layers."""
        blocks = self.module.get_submodule(self.anatomy.blocks_path)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    @property
    def head_is_position_wise(self) -> bool:
        """Whether the head can take a micro-batch in chunks of tokens."""
        return self.anatomy.head_is_position_wise

    def keeps_apart(self, sequence_length: int) -> bool:
        """Whether sequences that share a row of `sequence_length` tokens are computed as if each had its own."""
        exact = self.anatomy.isolation.keeps_apart is not None and self.head_is_position_wise
        return exact and self.least_row(sequence_length) == 1

    def least_row(self, width: int) -> int:
        """How many tokens each row of a micro-batch of `width` tokens a row must have, lest one is computed otherwise
        than alone; padding counts in the width. 1 but for models to which the longest row is an input, or whose layers
        choose among a row's tokens."""
        if (limit := self.anatomy.row_limit) is not None and width > limit:
            return width
        reach = self.anatomy.reach
        return 1 if reach is None or reach.alike is None or width <= reach.alike else reach.alike + 1

    def remarks(self, sequence_length: int) -> tuple[str, ...]:
        """What is to be known, a line each, of training with rows of so many tokens."""
        told = (
            f"{self.name}: config.json asks for gradient checkpointing, which is off here: the plan decides what "
            "backward recomputes, to the same numbers",
        )
        return (
            *(told if self.checkpoints_itself else ()),
            *self.remarks_on_parameters(),
            *(f"{self.name}: {line}" for line in said_of_muon(self.states)),
            *self._remarks_on_rows(sequence_length),
        )

    @cached_property
    def routing(self) -> Routing:
        """Counts how tokens spread over experts, where there are any."""
        return Routing(self.blocks)

    def remarks_on_parameters(self) -> Iterator[str]:
        """What stays in fp32, and what stays as it is without having been asked for, because plain PyTorch would leave
        it alone, too; a line each."""
        wide = [tensor for state in self.states if state.precision for tensor in state.tensors]
        if wide:
            yield (
                f"{self.name}: {_kinds(tensor.name for tensor in wide)} stay in fp32, as transformers keeps them; "
                f"they take {2 * sum(tensor.elements for tensor in wide):,} bytes more than in half precision"
            )
        for names, why in (
            (self.anatomy.unused, "text never reaches"),
            (self.anatomy.untrained, "the model itself gives no gradient"),
        ):
            if names:
                yield (
                    f"{self.name}: {_kinds(sorted(names))}, which {why}, stay as they are, as in plain "
                    "PyTorch, and are exported unchanged"
                )

    def _remarks_on_rows(self, sequence_length: int) -> tuple[str, ...]:
        if (least := self.least_row(sequence_length)) == 1:
            return ()
        if (limit := self.anatomy.row_limit) is not None and sequence_length > limit:
            return (
                f"{self.name} chooses among the tokens of rows of more than {limit}: plans for {sequence_length} train "
                "on text with --attend-across alone, whose rows are all full",
            )
        return (
            f"{self.name} computes rows of {least} tokens and more otherwise than shorter ones: plans for "
            f"{sequence_length} train on text with --attend-across alone, whose rows are all full",
        )

    def require_alike(self, sequence_length: int) -> None:
        """MismatchError unless rows of fewer tokens may stand beside rows of `sequence_length`."""
        if (limit := self.anatomy.row_limit) is not None and sequence_length > limit:
            raise MismatchError(
                f"{self.name}: layers of {self.architecture} choose among the tokens of rows of more than {limit}, so "
                f"a text that shares a row of {sequence_length} tokens, or is padded to it, may not get what it gets "
                f"alone; profile with --sequence-length {limit}, or train on text with --attend-across, whose rows are "
                "all full"
            )
        if (least := self.least_row(sequence_length)) > 1:
            raise MismatchError(
                f"{self.name}: {self.architecture} computes rows of {least} tokens and more otherwise than shorter "
                f"ones, so one that shares a row of {sequence_length} tokens, or is padded to it, would not get what "
                f"it gets alone; profile with --sequence-length {least - 1}, or train on text with --attend-across, "
                "whose rows are all full"
            )

    @property
    def padding_needs_no_mask(self) -> bool:
        """Whether the tokens of a row that is padded on the right are computed as if it were not, with no mask."""
        return self.anatomy.isolation.causal and self.head_is_position_wise

    def require_apart(self, sequence_length: int) -> None:
        """MismatchError unless `keeps_apart`."""
        self.require_alike(sequence_length)  # where this fails, --no-pack is no way out
        if not self.keeps_apart(sequence_length):
            why = f" ({found})" if (found := self.anatomy.isolation.in_the_way) else ""
            raise MismatchError(
                f"{self.name}: {self.architecture} cannot keep texts apart that share a row of {sequence_length} "
                f"tokens; train with --no-pack, or with --attend-across, which lets them attend to each other{why}"
            )

    @property
    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        """Tensors of the model's state dict that are not trained, from the checkpoint; an export writes them too."""
        return _persistent_buffers(self.module)


def _kinds(names: Iterable[str]) -> str:
    """In words, the kinds of parameters that there are among `names`."""
    kinds = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))
    more = f" and {len(kinds) - _NAMED} more kinds" if len(kinds) > _NAMED else ""
    return f"{', '.join(kinds[:_NAMED])}{more}"


def open_model(
    path: Path,
    dtype: torch.dtype,
    *,
    freeze: Sequence[str] = (),
    allow_unused_weights: bool = False,
    muon: bool = False,
) -> StreamedModel:
    """Opens a model directory (config.json and safetensors) without memory for weights.

    Parameters whose names match one of the patterns `freeze` (`freezing.frozen_parameters`) are not to be trained.
    `muon`: matrices of blocks are states of their own, which Muon updates (`kinds.muon_parameters`).
    `allow_unused_weights`: `Weights` of it may leave out stored tensors that the model has no place for.
    Errors: UsageError where the directory is not a model's, a pattern matches nothing or all is frozen; MismatchError
    where the model cannot be streamed exactly.
    """
    path = Path(path)
    config = _read_config(path)
    weight_files(path)
    with growing_at_most(_building_bytes()), without_advice():
        module, zeroed = _build(path, config, dtype)
        checkpointing = [child for child in module.modules() if getattr(child, "gradient_checkpointing", False)]
        for child in checkpointing:  # its blocks would be recomputed within a recomputation
            vars(child)["gradient_checkpointing"] = False
        _refuse_router_loss(module)
        _refuse_layerdrop(module)
        anatomy = inspect(module)
    _load_persistent_buffers(module, path, dtype)
    frozen = frozen_parameters(path, module, freeze, anatomy.unused) | anatomy.untrained
    by_muon = muon_parameters(module, anatomy, frozen) if muon else frozenset[str]()
    layers, states = lay_out(module, anatomy, frozen, dtype, by_muon)
    return StreamedModel(
        path=path,
        name=path.resolve().name,
        architecture=type(module).__name__,
        config=module.config,
        hidden_size=anatomy.hidden_size,
        vocab_size=anatomy.vocab_size,
        dtype=dtype,
        layers=layers,
        states=states,
        fingerprint=_fingerprint(module, states),
        module=module,
        anatomy=anatomy,
        max_sequence_length=_max_sequence_length(anatomy),
        freeze=tuple(freeze),
        zeroed=zeroed,
        allow_unused_weights=allow_unused_weights,
        checkpoints_itself=bool(checkpointing),
    )


def _building_bytes() -> int:
    """What a model may take to be built and looked into. There are no weights in that, but there are tables and masks,
    which grow with the square of the positions that config.json says."""
    return min(max(host_memory().available, _LEAST_BUILT), _MOST_BUILT)


def _read_config(path: Path) -> PretrainedConfig:
    if not path.is_dir():
        raise UsageError(f"{path}: not a directory; a model is a directory with config.json and {'*.safetensors'}")
    require_regular(path)
    file = path / "config.json"
    if not file.exists():
        if (path / "adapter_config.json").is_file():
            raise UsageError(
                f"{path}: holds an adapter and no model; merge it into its model (merge_and_unload of peft)"
            )
        raise UsageError(f"{path}: no config.json, so this is not a Hugging Face model directory")
    raw = read_config(file)
    model_type = raw.get("model_type")
    if raw.get("quantization_config"):
        raise MismatchError(
            f"{file}: the checkpoint is quantised; full training needs unquantised weights: load it by from_pretrained "
            "with a quantization_config that dequantises, as Mxfp4Config(dequantize=True) does, and save it by "
            "save_pretrained with save_original_format=False"
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except StrictDataclassError as error:  # its first line names a field or a check, the next one what is wrong
        why = " ".join(str(error).split("\n", 1)[-1].split()).partition(": ")[-1]
        kind = UsageError if isinstance(error, StrictDataclassFieldValidationError) else MismatchError
        raise kind(f"{file}: {why[:_SAID].rstrip('.')}; copy the model's own again") from error
    except Exception as error:  # transformers raises many kinds here
        if raw.get("auto_map"):
            why = f"model_type {model_type!r} needs remote code, which is never run"
        else:
            why = blamed(raw, error) or f"model_type {model_type!r} cannot be opened ({first_line(error)})"
        raise MismatchError(f"{file}: {why}") from error
    if config.is_encoder_decoder:
        raise MismatchError(f"{file}: model_type {model_type!r} is an encoder-decoder, not a causal language model")
    if not _classes_of(config):
        raise MismatchError(f"{file}: model_type {model_type!r} is not a causal language model")
    return config


def _classes_of(config: PretrainedConfig) -> list[Any]:
    """The library's classes that make text by such a configuration: of text alone, then those that also take images."""
    found: list[Any] = []
    mappings: tuple[Any, ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    for mapping in mappings:
        kinds = mapping.get(type(config), ())
        found += kinds if isinstance(kinds, tuple) else (kinds,)
    return list(dict.fromkeys(found))


def _build(path: Path, config: PretrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, tuple[Zeroed, ...]]:
    """The Hugging Face model with parameters on meta, buffers real, weights tied; and what is zero of its parameters
    whatever is stored."""
    names: Any = config.architectures or [None]
    if not isinstance(names, list) or not isinstance(names[0], str | None):
        raise MismatchError(f"{path / 'config.json'}: architectures is {names!s:.40}, no list of names")
    saved_as = names[0]
    known = {each.__name__: each for each in _classes_of(config)}
    if saved_as is not None and saved_as not in known:
        raise MismatchError(f"{path}: holds a {saved_as}, not a causal language model ({' or '.join(known)})")
    kind = known[saved_as] if saved_as is not None else next(iter(known.values()))
    # Where a model has no sdpa, or sdpa would leave something out (soft-capping), the library itself refuses it.
    attention = "sdpa" if kind._supports_sdpa else "eager"
    of_text = kind.config_class is config.sub_configs.get("text_config")  # and the whole configuration tells more
    try:
        with init_empty_weights(include_buffers=False):
            own = config.get_text_config() if of_text else config
            module = kind._from_config(own, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # any code of any model may be in there
        why = blamed(config.to_dict(), error) or f"describes a model that cannot be built ({first_line(error)})"
        raise MismatchError(f"{path / 'config.json'}: {why}") from error
    # from_pretrained initialises the buffers when fp32 is the default again: in bf16 GPT-J's position table has values
    # of other precision than those that its constructor computes. As there, parameters are said to have their values.
    zeroed = initialise(module)
    module.config.use_cache = False
    parameters: dict[str, Any] = dict(module.named_parameters())
    for name in in_fp32(module, parameters, dtype):
        parameters[name].data = parameters[name].data.float()
    return module, zeroed


def _refuse_router_loss(module: PreTrainedModel) -> None:
    """A mixture of experts may add a loss of its routers to its own, of all layers at once."""
    configs = (module.config, module.config.get_text_config(decoder=True))
    if any(getattr(config, "output_router_logits", False) for config in configs):
        Refusal(module)(
            "it adds a loss of its routers, over all layers at once, to the cross entropy; set output_router_logits to "
            "false in config.json to train without that"
        )


def _refuse_layerdrop(module: PreTrainedModel) -> None:
    """LayerDrop leaves whole layers out at random in training; all are streamed in each step."""
    drops = {getattr(child, "layerdrop", 0.0) for child in module.modules()} - {0.0, None}
    if drops:
        Refusal(module)(f"it leaves layers out at random (layerdrop {max(drops)}); set layerdrop to 0 in config.json")


def _persistent_buffers(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {n: t for n, t in module.state_dict(keep_vars=True).items() if not isinstance(t, nn.Parameter)}


def _load_persistent_buffers(module: PreTrainedModel, path: Path, dtype: torch.dtype) -> None:
    """Buffers that belong to the checkpoint are the checkpoint's, not the constructor's."""
    buffers = _persistent_buffers(module)
    if not buffers:
        return
    checkpoint = Checkpoint(path, module)
    kept = in_fp32(module, buffers, dtype)
    for name, buffer in buffers.items():
        entries = checkpoint.find((name,))
        if not entries:
            raise MismatchError(f"{path}: the checkpoint has no tensor {name}")
        for entry in entries:
            if entry.shape != tuple(buffer.shape):
                raise MismatchError(
                    f"{entry.file}: {entry.name} has shape {list(entry.shape)}, the model's is {list(buffer.shape)}"
                )
        for twin in entries[1:]:
            checkpoint.require_equal(entries[0], twin, tied=False)
        stored = torch.empty(buffer.shape, dtype=torch.float32 if name in kept else buffer.dtype)
        checkpoint.read(entries[0], stored)
        owner, _, own = name.rpartition(".")
        module.get_submodule(owner)._buffers[own] = stored


def _max_sequence_length(anatomy: Anatomy) -> int | None:
    """Where a table of positions ends, or where results begin to depend on each row's length, or on history."""
    limits = [anatomy.position_rows]
    if anatomy.reach is not None and not anatomy.reach.beyond:
        limits.append(anatomy.reach.alike)
    return min((limit for limit in limits if limit is not None), default=None)


def _fingerprint(module: PreTrainedModel, states: tuple[StateSpec, ...]) -> str:
    """sha256 over the architecture, the configuration's fields that matter, and the table of tensors."""
    content = {
        "architecture": type(module).__name__,
        "config": _stable(module.config.to_dict()),
        "states": [[s.name, s.elements, [[t.name, t.shape, t.offset] for t in s.tensors]] for s in states],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _stable(item) for key, item in value.items() if key not in _VOLATILE_FIELDS}
    if isinstance(value, (list, tuple)):
        return [_stable(item) for item in value]
    return value
