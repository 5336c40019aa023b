"""What a checkpoint's tensors are in the model, by the library's own description: other names, and parts of one tensor.

Owns the question which element of which model's tensor each stored one fills. Experts are stored one by one and are one
tensor in the model; the library says so by operations on whole tensors. Their reverse, run on tensors without memory,
yields views, and a view says where its part lies. So nothing is merged: a part is read into its range, and written from
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

from ssdplan.plans.errors import MismatchError


@dataclass(frozen=True)
class Part:
    """The range of a model's tensor that one stored tensor fills, in elements, and the shape of that one."""

    stored: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel()


@dataclass
class _Merged:
    """Stored tensors that are one of the model's: by the place of its pattern in the library's description."""

    converter: WeightConverter
    names: dict[int, list[str]] = field(default_factory=dict)


class Conversions:
    """The library's description of what becomes of a checkpoint of `module`, whose parameters are on the meta device.

    `renamed` is told every stored name, then `parts` says what is merged.
    """

    def __init__(self, module: PreTrainedModel, spellings: Mapping[str, str]) -> None:
        """`spellings`: name that a tensor may have -> the model's own."""
        described = get_model_conversion_mapping(module)
        self._module, self._spellings = module, spellings
        self._renamings = [each for each in described if isinstance(each, WeightRenaming)]
        self._converters = [each for each in described if isinstance(each, WeightConverter)]
        self._merged: dict[str, _Merged] = {}
        self.split: dict[str, str] = {}
        """Stored tensors that are several of the model's, and what these are called. `renamed` tells the first."""

    def renamed(self, stored: str) -> str | None:
        """The name that the model has for a stored tensor; None where it is a part of another, which `parts` tells."""
        name = stored
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        for converter in self._converters:
            whole, pattern = converter.rename_source_key(name)
            if pattern is None:
                continue
            own = self._spellings.get(whole)
            if own is None:
                break
            if len(converter.target_patterns) > 1:
                self.split[stored] = ", ".join(converter.target_patterns)
                return whole
            merged = self._merged.setdefault(own, _Merged(converter))
            merged.names.setdefault(converter.source_patterns.index(pattern), []).append(stored)
            return None
        if name not in self._spellings and stored in self._spellings:
            return stored  # as from_pretrained has it: it should not have been renamed
        return name

    def parts(self) -> dict[str, tuple[Part, ...]]:
        """For each merged tensor its parts, which fill it from its first element to its last. Errors: MismatchError
        where some are missing, or where they do not lie one after the other in it."""
        return {name: self._parts_of(name, merged) for name, merged in self._merged.items()}

    def _parts_of(self, name: str, merged: _Merged) -> tuple[Part, ...]:
        shape = tuple(self._module.state_dict(keep_vars=True)[name].shape)
        whole = torch.empty(shape, device="meta")
        views = _taken_apart(self._module, name, whole, merged.converter)
        parts: list[Part] = []
        for pattern, count_and_view in _by_pattern(merged.converter, views).items():
            stored = sorted(merged.names.get(pattern, []), key=dot_natural_key)
            if len(stored) != len(count_and_view):
                source = merged.converter.source_patterns[pattern]
                raise MismatchError(
                    f"{name} has {len(count_and_view)} parts {source}, and the checkpoint has {len(stored)} of them"
                    f"{_by_number(source, stored, len(count_and_view))}; config.json tells another number of experts "
                    "than there are, or the checkpoint is not whole"
                )
            for each, view in zip(stored, count_and_view, strict=True):
                inside = view.untyped_storage()._cdata == whole.untyped_storage()._cdata and view.is_contiguous()
                if not inside:
                    raise MismatchError(
                        f"{each} is not one range of {name}, which transformers makes of it "
                        f"({', '.join(type(op).__name__ for op in merged.converter.operations)}), so it is not "
                        "streamed; load the model by from_pretrained, and save it by save_pretrained with "
                        "save_original_format=False"
                    )
                parts.append(Part(each, int(view.storage_offset()), tuple(view.shape)))
        parts.sort(key=lambda part: part.start)
        ends = [0, *(part.stop for part in parts)]
        assert [part.start for part in parts] == ends[:-1] and ends[-1] == whole.numel(), f"{name} is not filled once"
        return tuple(parts)


def _by_number(pattern: str, stored: Sequence[str], count: int) -> str:
    """Of parts that should be numbered from 0 to count - 1: the first that is missing or too many, by name; empty where
    their names do not tell."""
    number = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    found = {int(match[1]): match for each in stored if "*" in pattern and (match := number.search(each))}
    if len(found) != len(stored) or not found:
        return ""
    of_one = next(iter(found.values()))
    begin, end = of_one.string[: of_one.start(1)], of_one.string[of_one.end(1) :]
    for what, numbers in (("lacks", set(range(count)) - set(found)), ("has", set(found) - set(range(count)))):
        if numbers:
            more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            return f": it {what} {begin}{min(numbers)}{end}{more}"
    return ""


class _Views(TorchFunctionMode):
    """Leaves out copies that only change how a tensor lies in memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _taken_apart(
    module: PreTrainedModel, name: str, whole: torch.Tensor, converter: WeightConverter
) -> Mapping[str, torch.Tensor]:
    """What the reverse of a converter makes of a tensor, by pattern."""
    reverse: Any = deepcopy(converter).reverse_transform()
    found: dict[str, Any] = {reverse.source_patterns[0]: [whole]}
    with torch.no_grad(), _Views():
        for operation in reverse.operations:
            found = operation.convert(
                found,
                source_patterns=reverse.source_patterns,
                target_patterns=reverse.target_patterns,
                full_layer_name=name,
                model=module,
                config=module.config,
            )
    return {key: each[0] if isinstance(each, list) else each for key, each in found.items()}


def _by_pattern(converter: WeightConverter, views: Mapping[str, torch.Tensor]) -> dict[int, Sequence[torch.Tensor]]:
    """The views in the order of the numbers in their names, by the place of the pattern that they are of."""
    targets = deepcopy(converter).reverse_transform().target_patterns
    found: dict[int, Sequence[torch.Tensor]] = {}
    for place, pattern in enumerate(targets):
        if "*" not in pattern:
            found[place] = [views[pattern]]
            continue
        names = (pattern.replace("*", str(number)) for number in range(len(views)))
        found[place] = [views[each] for each in names if each in views]
    return found
