"""Configs: the shape of any model whose config.json is there, without its weights and without its code.

Owns reading such a file as somebody else's: a bounded size, JSON and nothing else, each field of its type and within
bounds, and a refusal of what is not understood. A word that transformers does not know is refused where a directory to
train would be. Other fields that change no tensor and no formula are not looked at; what the formulas leave out of a
model is among its shape's remarks. Families are in `families.py`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any, NoReturn

from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import read_bounded
from ssdplan.plans.json_errors import json_reason

from .families import ACTIVATIONS, COUNTED, FAMILIES, LEARNED_ACTIVATIONS, ROTARY, Family
from .shapes import Build, Experts, Shape

MOST_BYTES = 4 << 20
"""Of a config.json; the largest known, with a label for each class of a large classifier, has less than one MiB."""
NAME = "config.json"
MOST = {
    "layers": 4096,
    "heads": 65_536,
    "width": 262_144,
    "vocabulary": 4_194_304,
    "positions": 1 << 24,
    "experts": 65_536,
}
"""Of each size; models that anybody has are far below. Layers, widths and vocabularies as in a directory to train."""
MOST_OF_LAYER, MOST_PARAMETERS = 10**12, 10**13
"""Parameters of a layer, and of a model."""
DTYPES = frozenset(
    {
        *("auto", "bfloat16", "half", "float16", "float", "float32", "double", "float64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8", "uint8"),
    }
)
"""What weights may be saved in."""
THETAS = ("rope_theta", "rope_local_base_freq", "rotary_emb_base")
"""Names that the base of rotary embeddings has; the second is Gemma 3's for blocks that see a window."""
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""What `layer_types` may say of a block: all of these have the same tensors."""
_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "num_experts": ("num_local_experts", "num_experts"),
}
"""A size -> the names that it has in one family or another."""


def is_path(text: str) -> bool:
    """Whether `--model` names a file or a directory, there or plainly meant, rather than a thing of the catalogue."""
    if text.startswith(("./", "../", "/", "~/")) or text.endswith(".json"):
        return True
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def shape_of_path(path: Path) -> Shape:
    """The shape of the model whose config.json `path` is, or has. Raises UsageError with the reason and the way out."""
    file = path / NAME if path.is_dir() else path
    if path.is_dir() and not file.exists():
        adapter = "it holds an adapter: merge that into its model" if (path / "adapter_config.json").exists() else ""
        raise UsageError(f"--model {path}: no {NAME} in it, so it is no model's directory; {adapter or _ELSE}")
    try:
        data = read_bounded(file, MOST_BYTES, "config.json")
    except OSError as error:
        raise UsageError(f"{file}: cannot read it: {error.strerror}") from error
    try:
        content = json.loads(
            data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite
        )
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not a config.json (not UTF-8 text)") from error
    except RecursionError as error:
        raise UsageError(f"{file}: not a config.json (nested too deeply)") from error
    except ValueError as error:
        raise UsageError(f"{file}: not a config.json ({json_reason(error)})") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file}: not a config.json (not an object with fields)")
    if isinstance(content.get("schema"), str) and content["schema"].startswith("ssdplan."):
        raise UsageError(f"--model {path}: is a document of ssdplan, not a config.json; give solve a profile alone")
    source = f"{file}; shapes alone, no weight was read. ssdplan profile DIR measures a model on the machine at hand"
    return shape_of_config(content, _name(file), source, str(file))


_ELSE = "name a model of the catalogue (docs/catalogue.md), or a directory with config.json"
_WAY_OUT = "ssdplan profile DIR measures every model that it can train, and solve takes its profile"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)[:60]!r} is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number that JSON has")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"the number {text[:20]} is out of range")
    return number


def _name(file: Path) -> str:
    """Of the model: its directory's, in characters that a terminal shows as they are."""
    name = file.absolute().parent.name if file.name == NAME else file.stem
    return re.sub(r"[^\w.+-]+", "_", name, flags=re.ASCII).strip("_")[:64].lower() or "model"


def shape_of_config(content: Mapping[str, Any], name: str, source: str, where: str = NAME) -> Shape:
    """The shape that the fields of a config.json say. `where`: the file, for errors. Raises UsageError."""
    remarks = []
    kind, fields, outer = content.get("model_type"), content, content
    text = content.get("text_config")
    if isinstance(text, dict) and not (isinstance(kind, str) and kind in FAMILIES):
        kind, fields = text.get("model_type"), text
        remarks.append("its text model alone: a part for images or sound stays as it is, and is not in the estimate")
    if text is not None and not isinstance(text, dict):
        raise UsageError(
            f"{where}: text_config is {_shown(text)}, no object with the fields of its text model; {_WAY_OUT}"
        )
    if not isinstance(kind, str):
        there = "" if kind is None else f" in words (it is {_shown(kind)})"
        raise UsageError(f"{where}: has no model_type{there}, so it is not said what model this is; {_WAY_OUT}")
    if kind not in FAMILIES and fields is content and ("text_config" in content or f"{kind}_text" in FAMILIES):
        there = "is null" if "text_config" in content else "is not there"
        raise UsageError(
            f"{where}: of model_type {kind[:60]!r} only the text model has a formula here, and text_config, which says "
            f"what that is, {there}; {_WAY_OUT}"
        )
    if kind not in FAMILIES:
        raise UsageError(
            f"{where}: model_type {kind[:60]!r} has no formula here (there are: {', '.join(sorted(FAMILIES))}); "
            + _WAY_OUT
        )
    return _Reading(kind, FAMILIES[kind], fields, outer, where).shape(name, source, remarks)


GPT_NEO_WINDOW = 256
"""Of every second block, by its configuration class."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """One file, being read."""

    kind: str
    family: Family
    fields: Mapping[str, Any]
    outer: Mapping[str, Any]
    """Those of the model around a text model; else the same."""
    where: str

    def shape(self, name: str, source: str, remarks: list[str]) -> Shape:
        family = self.family
        for key, only in family.refused.items():
            if (value := self.fields.get(key, only)) != only:
                self._refuse(f"{key} is {_shown(value)}, and tensors are known only for {_shown(only)}")
        self._require_causal()
        self._require_rotary()
        self._require_dtype()
        hidden, heads = self._size("hidden_size", "width"), self._size("num_attention_heads", "heads")
        build, kv_heads = self._build(heads)
        head_width = self._own("head_dim", "width") if family.own_head_width else None
        if head_width is None and hidden % heads:
            names = self._named("hidden_size"), self._named("num_attention_heads")
            self._refuse(f"{names[0]} {hidden:,} is no multiple of {names[1]} {heads:,}")
        if heads % kv_heads:
            self._refuse(
                f"{heads:,} heads cannot share {kv_heads:,} heads of keys evenly (num_attention_heads and "
                "num_key_value_heads, or what transformers takes where the file has none)"
            )
        width, said = (
            (head_width, "head_dim") if head_width else (hidden // heads, "hidden_size by num_attention_heads")
        )
        if build.form == "gated" and width % 2:
            self._refuse(f"heads of {width:,} elements ({said}), and rotary embeddings turn pairs of them")
        experts = self._experts() if family.mixture else None
        learned = build.position_rows is not None
        own = self._size if learned else self._own
        positions = own("max_position_embeddings", "positions") or 0
        blocks = self._size("num_hidden_layers", "layers")
        shape = Shape(
            name=name,
            family=self.kind,
            hidden=hidden,
            blocks=blocks,
            heads=heads,
            kv_heads=kv_heads,
            intermediate=experts.inner if experts else self._inner(hidden),
            vocab=self._size("vocab_size", "vocabulary"),
            tied=self._tied(),
            published=0.0,
            source=source,
            max_positions=positions if learned else 0,
            named_positions=0 if learned else positions,
            head_width=head_width or 0,
            experts=experts,
            own_build=build,
            own_architecture=family.architecture,
            remarks=(*remarks, *self._remarks(blocks)),
            window=self._window(blocks),
        )
        self._require_within_reason(shape)
        return shape

    def _require_within_reason(self, shape: Shape) -> None:
        """Sizes may each be within bounds, and their products beyond all that can be counted."""
        for what, tensors in (
            ("its embedding", shape.embedding()),
            ("a block", shape.block()),
            ("its head", shape.head()),
        ):
            if (parameters := sum(map(prod, tensors))) > MOST_OF_LAYER:
                self._refuse(f"{what} has {parameters:,} parameters, more than {MOST_OF_LAYER:,}")
        if shape.parameters > MOST_PARAMETERS:
            self._refuse(f"it has {shape.parameters:,} parameters, more than {MOST_PARAMETERS:,}")

    def _require_causal(self) -> None:
        """It is a decoder alone, with the head that makes text: others have other tensors."""
        if self._flag("is_encoder_decoder"):
            self._refuse("is_encoder_decoder is true, and only a decoder alone is a causal language model")
        names = self.fields.get("architectures")
        if names is None or names == []:
            return
        own = self.family.architecture
        if not isinstance(names, list):
            self._refuse(f"architectures is {_shown(names)}, no list of names")
        name = names[0]
        if not isinstance(name, str):
            self._refuse(f"architectures begins with {_shown(name)}, no name")
        if self.fields is self.outer and _letters(name) != _letters(own):
            self._refuse(f"architectures names {_shown(name)}, and tensors are known only for {own}")

    def _require_rotary(self) -> None:
        """Its rotary embeddings are of a kind that transformers knows: of all blocks, or of each type of block."""
        for key in ("rope_parameters", "rope_scaling"):
            said = self.fields.get(key)
            if said is None:
                continue
            if not isinstance(said, dict):
                self._refuse(f"{key} is {_shown(said)}, no object with fields")
            for each in (said, *(value for value in said.values() if isinstance(value, dict))):
                kind = each.get("rope_type", each.get("type", "default"))
                if not isinstance(kind, str) or kind not in ROTARY:
                    self._refuse(f"rope_type of {key} is {_shown(kind)}, which transformers does not know")
                self._require_theta(each)
        self._require_theta(self.fields)

    def _require_theta(self, fields: Mapping[str, Any]) -> None:
        """The base of rotary embeddings, by any of its names, is one that powers are taken of."""
        for key in THETAS:
            theta = fields.get(key)
            number = isinstance(theta, int | float) and not isinstance(theta, bool)
            if theta is not None and (not number or theta <= 0):
                self._refuse(f"{key} is {_shown(theta)}, no number above 0")

    def _require_dtype(self) -> None:
        """What its weights are saved in is a word for that. A model around a text model may have one for each part."""
        for fields in (self.fields, self.outer):
            for key in ("dtype", "torch_dtype"):
                said = fields.get(key)
                parts = said.values() if isinstance(said, dict) and fields is not self.fields else (said,)
                for each in parts:
                    if each is not None and (not isinstance(each, str) or each.removeprefix("torch.") not in DTYPES):
                        self._refuse(f"{key} is {_shown(each)}, and no weights are saved in that")

    def _activation(self) -> str | None:
        """The function of its MLP by the name that the file says; None where the class decides."""
        key = self.family.activation
        if not key or key not in self.fields:
            return None
        name = self.fields[key]
        if isinstance(name, str) and name in LEARNED_ACTIVATIONS:
            self._refuse(f"{key} is {_shown(name)}, which has parameters of its own")
        if not isinstance(name, str) or name not in ACTIVATIONS:
            self._refuse(f"{key} is {_shown(name)}, which transformers does not know")
        return name

    def _build(self, heads: int) -> tuple[Build, int]:
        """How its blocks are put together, and the heads that keys have."""
        family = self.family
        switched: dict[str, Any] = {}
        for key, parts in family.switches.items():
            if (on := self._flag(key)) is not None:
                switched |= dict.fromkeys(parts, on)
        build = replace(family.build, **switched)
        if family.switched_norm and self._flag(family.switched_norm):
            build = replace(build, query_norm="each")
        if self.kind == "opt" and self.fields.get("word_embed_proj_dim", None) not in (
            None,
            self.fields.get("hidden_size"),
        ):
            self._refuse("word_embed_proj_dim is not the hidden size: its embeddings are projected")
        if self.kind == "gpt_bigcode":
            return build, 1 if self._flag("multi_query") in (None, True) else heads
        if self.kind == "falcon":
            return self._falcon(build, heads)
        if not family.heads_of_keys:
            return build, heads
        return build, self._own("num_key_value_heads", "heads") or heads

    def _falcon(self, build: Build, heads: int) -> tuple[Build, int]:
        if self._flag("new_decoder_architecture"):
            norms = self.fields.get("num_ln_in_parallel_attn")
            if norms is not None and (type(norms) is not int or norms not in (1, 2)):
                self._refuse(f"num_ln_in_parallel_attn is {_shown(norms)}, neither 1 nor 2")
            return replace(build, norms=norms or 2), self._own("num_kv_heads", "heads") or heads
        if self._flag("parallel_attn") is False:
            build = replace(build, norms=2)
        return build, 1 if self._flag("multi_query") in (None, True) else heads

    def _inner(self, hidden: int) -> int:
        wide = self.family.wide
        own = self._own("intermediate_size", "width") if wide else self._size("intermediate_size", "width")
        return own or wide * hidden

    def _experts(self) -> Experts:
        for key in self.family.uneven:
            value = self.fields.get(key)
            if isinstance(value, bool) or value not in (None, 1, []):
                self._refuse(f"{key} is {_shown(self.fields[key])}: its blocks differ from each other")
        count, active = self._size("num_experts", "experts"), self._size("num_experts_per_tok", "experts")
        if active > count:
            named = self._named("num_experts")
            self._refuse(f"a token goes through {active:,} of {count:,} experts (num_experts_per_tok, {named})")
        shared = self._size("shared_expert_intermediate_size", "width") if self.kind == "qwen2_moe" else 0
        return Experts(count, active, self._size(self.family.mixture, "width"), shared, biases=self.kind == "gpt_oss")

    def _tied(self) -> bool:
        for fields in (self.fields, self.outer):
            value = fields.get("tie_word_embeddings")
            if value is not None:
                if not isinstance(value, bool):
                    self._refuse(f"tie_word_embeddings is {_shown(value)}, neither true nor false")
                return value
        return self.family.tied

    def _window(self, blocks: int) -> int:
        """How many tokens back some blocks see; 0 where all see all."""
        some = any(kind != LAYER_TYPES[0] for kind in self._layer_types(blocks))
        said = self.fields.get("sliding_window")
        window = 0 if type(said) is int and not said else self._own("sliding_window", "positions")
        if window and (some or self._flag("use_sliding_window") is not False):
            return window
        return GPT_NEO_WINDOW if self.kind == "gpt_neo" else 0

    def _layer_types(self, blocks: int) -> list[str]:
        """What each block attends to, where the file says so."""
        kinds = self.fields.get("layer_types")
        if kinds is None:
            return []
        if not isinstance(kinds, list):
            self._refuse(f"layer_types is {_shown(kinds)}, no list with a type for each of {blocks:,} blocks")
        if len(kinds) != blocks:
            self._refuse(f"layer_types has {len(kinds):,} types for {blocks:,} blocks")
        if unknown := [kind for kind in kinds if kind not in LAYER_TYPES]:
            self._refuse(f"layer_types has {_shown(unknown[0])}, none of {', '.join(LAYER_TYPES)}")
        return kinds

    def _remarks(self, blocks: int) -> list[str]:
        """What of the file the formulas leave out."""
        found = []
        if self.kind != "gpt_neo" and (window := self._window(blocks)):
            found.append(f"attention is counted over whole rows, though some of its blocks see {window:,} tokens back")
        if self.kind == "gpt_neo":
            found.append("attention is counted over whole rows, though every second block sees a window")
        if self.outer.get("quantization_config"):
            found.append("the file describes quantised weights, which are not trained: save them in bf16 first")
        form, activation = self.family.build.form, self._activation()
        if form != "gated" and self.kind not in ("gpt2", "opt"):
            nearest = {"gpt2": "GPT-2", "opt": "OPT"}[form]
            found.append(f"{self.kind}: activations and workspaces are by the formulas of {nearest}, the nearest")
        elif activation is not None and activation not in COUNTED[form][1]:
            name = self.family.activation
            found.append(f"{name} is {activation}, and what its MLP keeps is counted as with {COUNTED[form][0]}")
        return found

    def _flag(self, key: str) -> bool | None:
        value = self.fields.get(key)
        if value is not None and not isinstance(value, bool):
            self._refuse(f"{key} is {_shown(value)}, neither true nor false")
        return value

    def _size(self, key: str, kind: str) -> int:
        """A size that has to be there, unless transformers' class has it by default."""
        value = self._own(key, kind)
        if value is None:
            self._refuse(f"has no {' or '.join(_SIZES.get(key, (key,)))}")
        return value

    def _own(self, key: str, kind: str) -> int | None:
        """A size by any of its names, or the class's default; None where the file says null, or nothing is known."""
        said = [name for name in _SIZES.get(key, (key,)) if name in self.fields]
        values = {name: self.fields[name] for name in said if self.fields[name] is not None}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST[kind]:
                self._refuse(f"{name} is {_shown(value)}, no whole number from 1 to {MOST[kind]:,}")
        if len(set(values.values())) > 1:
            self._refuse(f"{' and '.join(values)} contradict each other")
        if values:
            return next(iter(values.values()))
        return None if said else self.family.defaults.get(key)

    def _named(self, key: str) -> str:
        """The name by which the file has a size."""
        return next((name for name in _SIZES[key] if self.fields.get(name) is not None), key)

    def _refuse(self, why: str) -> NoReturn:
        raise UsageError(f"{self.where}: {self.kind}: {why}; {_WAY_OUT}")


def _letters(name: str) -> str:
    """Of a class: some files write MPTForCausalLM for MptForCausalLM."""
    return name.replace("_", "").lower()


def _shown(value: object) -> str:
    """A value of the file, short and without control characters."""
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
