"""Finds out what a causal language model's own forward does around its decoder layers, before any weight is read.

Owns the questions that decide whether a model can be streamed exactly: which parameters run before, inside and after
the layers, what each layer is called with, whether anything but the hidden state, in the model's dtype, passes from one
layer to the next, whether random numbers decide on more than dropout, and what the loss is. Answers come from running
the model's own forward on tiny inputs, never from a table of names. A model that cannot be streamed exactly is refused
with a MismatchError that says why. It allocates nothing of the size of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ssdplan.plans.errors import MismatchError

from .blocks import Refusal, alike, embedding_table, find_blocks
from .experts import experts_one_by_one
from .isolation import Isolation, isolation
from .made_numbers import MadeNumbers, leaves_behind
from .position_wise import head_kind
from .reach import Reach, reach
from .row_limits import row_limit
from .standins import LayerCall, split_call, stand_ins

ROWS, LENGTH = 2, 8
LOUD = 30.0
"""By how much logits are scaled so that a loss shows terms that grow faster with them than the cross entropy."""
_TOO_MANY = "a router takes more experts than there are: look at config.json, such as num_experts_per_tok"
"""The way out where torch cannot choose as many of a row's numbers as it is asked for."""


@dataclass(frozen=True)
class Anatomy:
    """What inspection found. `before` and `after` name parameters; `calls` has one entry a block."""

    blocks_path: str
    hidden_size: int
    vocab_size: int
    before: frozenset[str]
    after: frozenset[str]
    calls: tuple[LayerCall, ...]
    returned: int | None  # entries of the tuple that a block returns (the first is the hidden state); None: a tensor
    calls_depend_on_ids: bool  # whether a block's arguments depend on which tokens the input has
    position_rows: int | None  # longest sequence that the model's learned position table has rows for
    head_is_position_wise: bool  # whether a position's logits depend on that position's hidden state alone
    isolation: Isolation  # what sequences that share a row, or padding, do to each other
    row_limit: int | None  # the widest row that may be shared or padded, where layers choose among tokens; None: any
    reach: Reach | None  # how long rows may be before their length decides; None where it is not known
    unused: frozenset[str]  # parameters that it never uses, as those of a part for images
    shifts_labels: bool  # whether its own loss compares each position with the next token, or takes labels shifted
    untrained: frozenset[str]  # parameters that the model itself freezes, or of which no gradient is ever asked


@dataclass
class _Trace:
    """One run of the model's own forward with stand-ins."""

    calls: list[LayerCall]
    before: set[str]
    inside: list[set[str]]
    between: set[str]
    after: set[str]
    logits: torch.Tensor
    loss: torch.Tensor | None
    hidden_size: int
    returned: int | None
    positions: list[tuple[torch.Tensor, int]]


def inspect(module: PreTrainedModel) -> Anatomy:
    """Finds a model's blocks and what runs around them; MismatchError where it cannot be streamed exactly."""
    with experts_one_by_one(module):
        return _inspect(module)


def _inspect(module: PreTrainedModel) -> Anatomy:
    refuse = Refusal(module)
    blocks_path = find_blocks(module, refuse)
    blocks = module.get_submodule(blocks_path)
    assert isinstance(blocks, nn.ModuleList)
    module.train(False)
    generator = torch.Generator().manual_seed(0)
    table = embedding_table(module, refuse)
    limit = min(table.shape[0], 1000)
    ids = torch.randint(0, limit, (ROWS, LENGTH), generator=generator)
    other_ids = torch.randint(0, limit, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, LENGTH - 3 :] = 0

    like = alike(module, blocks, blocks_path)
    given = {"salt": 1.0, "hidden_seed": 1, "real_blocks": True, "returned": None, "refuse": refuse, "like": like}
    whole = _trace(module, blocks, ids, None, **given)  # type: ignore[arg-type]
    returned = whole.returned

    def trace(
        ids: torch.Tensor, mask: torch.Tensor | None, salt: float, hidden: int, seed: int = 0, scale: float = 1.0
    ) -> _Trace:
        return _trace(
            module,
            blocks,
            ids,
            mask,
            salt=salt,
            hidden_seed=hidden,
            real_blocks=False,
            returned=returned,
            refuse=refuse,
            seed=seed,
            scale=scale,
        )

    unused = _check_parameters(module, blocks_path, whole, refuse)
    shifts = _check_loss(whole, ids, refuse)
    for padding in (None, mask):
        base = trace(ids, padding, 1.0, 1)
        if padding is None and not (_same(base.calls, whole.calls) and torch.equal(base.logits, whole.logits)):
            refuse("what a layer returns beside the hidden state matters")
        if not _same(base.calls, trace(ids, padding, 1.0, 2).calls):
            refuse("a layer's arguments other than the hidden state depend on another layer's output")
        salted = trace(ids, padding, 2.0, 1)
        if not _same(base.calls, salted.calls):
            refuse("a layer's arguments other than the hidden state depend on trained parameters")
        if not torch.equal(base.logits, trace(ids, padding, 2.0, 3).logits):
            refuse("what follows the layers depends on more than the last layer's output")
    module.train(True)
    quiet, loud = trace(ids, None, 1.0, 1, seed=1), trace(ids, None, 1.0, 1, seed=2, scale=LOUD)
    if not _same(quiet.calls, loud.calls):
        refuse("a layer's arguments other than the hidden state are drawn at random in training")
    for drawn in (quiet, loud):
        _check_loss(drawn, ids, refuse)
    module.train(False)
    other = trace(other_ids, None, 1.0, 1)
    rows = [
        table - (int(index.max()) + 1 - LENGTH)
        for (index, table), (again, _) in zip(whole.positions, other.positions, strict=True)
        if _counts_up(index) and torch.equal(index, again)
    ]
    head = head_kind(
        module,
        blocks,
        after=whole.after,
        returned=returned,
        hidden_size=whole.hidden_size,
        vocab_size=whole.logits.shape[-1],
    )
    apart = isolation(module, blocks, returned=returned, hidden_size=whole.hidden_size)
    if apart.looks_ahead or head == "looks ahead":
        way_out = (
            "; set is_decoder to true in config.json" if getattr(module.config, "is_decoder", True) is False else ""
        )
        refuse(f"a token sees those behind it, and would learn to repeat them{way_out}")
    if apart.padding_shows:
        refuse("what it makes of a row depends on the padding behind it, although a mask tells what is padding")
    found = reach(module, blocks, returned=returned, hidden_size=whole.hidden_size)
    known = None if found is None else found.alike
    return Anatomy(
        blocks_path=blocks_path,
        hidden_size=whole.hidden_size,
        vocab_size=whole.logits.shape[-1],
        before=frozenset(whole.before),
        after=frozenset(whole.after),
        calls=tuple(whole.calls),
        returned=whole.returned,
        calls_depend_on_ids=not _same(whole.calls, other.calls),
        position_rows=min(rows, default=None),
        head_is_position_wise=head == "position-wise",
        isolation=apart,
        row_limit=row_limit(module, blocks, apart, known=known, returned=returned, hidden_size=whole.hidden_size),
        reach=found,
        unused=unused,
        shifts_labels=shifts,
        untrained=_untrained(module, blocks_path, ids, unused, given),
    )


def _counts_up(index: torch.Tensor) -> bool:
    """Whether an embedding's input is positions: one more in each column."""
    return index.shape[-1] == LENGTH and bool((index.diff(dim=-1) == 1).all())


def _trace(
    module: PreTrainedModel,
    blocks: nn.ModuleList,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    salt: float,
    hidden_seed: int,
    real_blocks: bool,
    returned: int | None,
    refuse: Refusal,
    seed: int = 0,
    scale: float = 1.0,
    record: Callable[[torch.Tensor], None] | None = None,
    like: Mapping[int, int] = MappingProxyType({}),
) -> _Trace:
    """Runs the model's own forward. Before the blocks parameters act with `salt`, after them always alike but that what
    they yield, and so the logits, is multiplied by `scale`; the layers' hidden states come from `hidden_seed`, but for
    the last one's, which never changes. `real_blocks` runs the layers too, on what the model calls them with, and
    returns what they return beside the hidden state; without, that is None, in a tuple of `returned` entries where the
    layers return tuples. What the model draws at random comes from `seed`. `record` is called with what the embedding
    yields, and each layer, and with the loss, which autograd has recorded. `like` layers do as earlier ones did."""
    layers = list(blocks)
    calls: list[LayerCall] = []
    inside: list[set[str]] = []
    returned_beside: dict[int, tuple[Any, ...]] = {}
    positions: list[tuple[torch.Tensor, int]] = []
    phases: dict[str, set[str]] = {"before": set(), "between": set(), "after": set()}
    state: dict[str, Any] = {"hidden": None, "returned": returned, "phase": "before", "draws": None}
    random = torch.random.default_generator
    path = next((name for name, child in module.named_modules() if child is blocks), "")

    def embedding_call(index: torch.Tensor, table_rows: int) -> None:
        if state["phase"] == "before" and not index.is_meta:
            positions.append((index, table_rows))

    mode = MadeNumbers({id(p): name for name, p in module.named_parameters()}, salt, embedding_call)

    def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        phases[state["phase"]] |= mode.used
        mode.used = set()
        if index != len(calls):
            refuse("its layers do not run once each, one after another")
        try:
            hidden, call = split_call(args, kwargs)
        except TypeError as error:
            refuse(str(error))
        if index == 0:
            if tuple(hidden.shape[:2]) != tuple(ids.shape) or hidden.dim() != 3:
                refuse(f"its layers take a hidden state of shape {list(hidden.shape)}, not [batch, sequence, hidden]")
            _check_precision("its layers take", hidden, module, refuse)
            state["shape"] = hidden.shape
            if record:
                record(hidden)
        elif not _is_same_tensor(hidden, state["hidden"]):
            refuse(f"layer {index} is not called with what layer {index - 1} returns")
        elif not torch.equal(random.get_state(), state["draws"]):
            refuse("it draws random numbers between its layers")
        _check_plain(call, refuse)
        calls.append(call)
        extras: tuple[Any, ...] = (None,) * ((state["returned"] or 1) - 1)
        if real_blocks and index in like:
            first = like[index]
            own, its = (f"{path}.{each}." for each in (index, first))
            inside.append({name.replace(its, own, 1) if name.startswith(its) else name for name in inside[first]})
            extras = returned_beside[first]
        elif real_blocks:
            result = _run_block(module, layers[index], hidden, call, refuse)
            several = isinstance(result, (tuple, list))
            state["returned"] = len(result) if several else None
            extras = tuple(result[1:]) if several else ()
            returned_beside[index] = extras
            if record:
                record(result[0] if several else result)
            inside.append(mode.used)
            mode.used = set()
        last = index == len(layers) - 1
        state["phase"] = "after" if last else "between"
        if last:
            mode.salt, mode.scale = 0.5, scale
        generator = torch.Generator().manual_seed(7 if last else 1000 * hidden_seed + index)
        state["hidden"] = torch.randn(state["shape"], generator=generator).to(hidden.dtype)
        state["draws"] = random.get_state()
        return state["hidden"] if state["returned"] is None else (state["hidden"], *extras)

    recording = torch.set_grad_enabled(record is not None)
    with torch.random.fork_rng(devices=[]), recording, stand_ins(blocks, answer), mode:
        random.manual_seed(seed)
        try:
            output = module(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False, return_dict=True)
        except MismatchError:
            raise
        except Exception as error:
            told = _first_line(error)
            way_out = f"; {_TOO_MANY}" if "selected index k out of range" in told else ""
            refuse(f"its own forward cannot be followed ({type(error).__name__}: {told}){way_out}")
    if record:
        record(output.loss)
    _check_numbers(module, calls, output, refuse)
    phases["after"] |= mode.used
    if len(calls) != len(layers):
        refuse(f"its forward runs {len(calls)} of its {len(layers)} layers")
    if output.logits.dim() != 3 or tuple(output.logits.shape[:2]) != tuple(ids.shape):
        refuse(f"its logits have shape {list(output.logits.shape)}, not [batch, sequence, vocabulary]")
    return _Trace(
        calls=calls,
        before=phases["before"],
        inside=inside,
        between=phases["between"],
        after=phases["after"],
        logits=output.logits,
        loss=output.loss,
        hidden_size=state["shape"][-1],
        returned=state["returned"],
        positions=positions,
    )


def _check_numbers(module: PreTrainedModel, calls: list[LayerCall], output: Any, refuse: Refusal) -> None:
    """NaN equals nothing, itself included, so any comparison that follows would give a false reason."""
    found = next((what for what, value in _yielded(calls, output) if _has_nan(value)), "")
    if found:
        tables = [name for name, each in module.named_buffers() if not (each.is_meta or each.isfinite().all())]
        buffers = f", and its buffer {tables[0]} is not finite" if tables else ""
        refuse(f"{found} NaN{buffers}; look at the values in its config.json")


def _yielded(calls: list[LayerCall], output: Any) -> Iterator[tuple[str, Any]]:
    """What a run yields, each with its name in words."""
    for index, call in enumerate(calls):
        named = [*((str(number), value) for number, value in enumerate(call.args)), *call.kwargs.items()]
        for name, value in named:
            for leaf in tree_leaves(value):
                yield f"the argument {name} of its layer {index} holds", leaf
    yield "its logits hold", output.logits
    yield "its loss is", output.loss


def _has_nan(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta and bool(value.isnan().any())


def _run_block(
    module: PreTrainedModel, layer: nn.Module, hidden: torch.Tensor, call: LayerCall, refuse: Refusal
) -> Any:
    """Runs one real block; returns what it returns: a hidden state, or a tuple or list that begins with one."""
    name = type(layer).__name__
    leaves, structure = tree_flatten((call.args, call.kwargs))
    versions = [leaf._version for leaf in (*leaves, hidden) if isinstance(leaf, torch.Tensor)]
    args, kwargs = call.arguments(hidden)
    result = layer(*args, **kwargs)
    after, structure_after = tree_flatten((call.args, call.kwargs))
    changed = [leaf._version for leaf in (*after, hidden) if isinstance(leaf, torch.Tensor)] != versions
    filled = any(isinstance(leaf, Mapping) and leaf for leaf in after)
    if changed or filled or structure_after != structure:
        refuse(f"{name} changes its arguments, through which one layer could reach another")
    output = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(output, torch.Tensor) or output.shape != hidden.shape:
        refuse(f"{name} does not return a hidden state of the shape that it takes")
    _check_precision(f"{name} returns", output, module, refuse)
    return result


def _check_precision(what: str, hidden: torch.Tensor, module: PreTrainedModel, refuse: Refusal) -> None:
    """Hidden states pass from layer to layer in the model's dtype; another one would be rounded on its way."""
    if hidden.dtype == module.dtype:
        return
    found, wanted = (str(dtype).removeprefix("torch.") for dtype in (hidden.dtype, module.dtype))
    way_out = "use --precision fp32"
    if getattr(module.config, "residual_in_fp32", False):
        way_out += ", or set residual_in_fp32 to false in config.json if rounding is wanted"
    refuse(f"{what} a hidden state in {found}, which would be rounded to {wanted} between the layers; {way_out}")


def _check_parameters(module: PreTrainedModel, blocks_path: str, trace: _Trace, refuse: Refusal) -> frozenset[str]:
    """Every parameter that is used runs in exactly one block, or outside the blocks in the embedding, the head or both.
    Returns those that are never used."""
    outside = trace.before | trace.after
    used = outside | trace.between
    for index, inside in enumerate(trace.inside):
        prefix = f"{blocks_path}.{index}."
        foreign = sorted(name for name in inside if not name.startswith(prefix))
        if foreign:
            refuse(f"{foreign[0]} is used by layer {index}, but is not its own")
        used |= inside
    if trace.between:
        refuse(f"{sorted(trace.between)[0]} is used between two layers")
    unused = set()
    for name, parameter in module.named_parameters():
        if name not in used:
            if (part := _chosen_among(module, blocks_path, name, used)) is not None:
                refuse(f"it uses some of {part} and others not, as its input decides; of those no gradient would come")
            unused.add(name)
            continue
        if name in outside and name.startswith(f"{blocks_path}."):
            refuse(f"{name} belongs to a layer, but is used outside the layers")
        if parameter.dtype not in (module.dtype, torch.float32):
            refuse(f"the parameter {name} is {parameter.dtype} in a model of {module.dtype}")
    return frozenset(unused)


def _chosen_among(module: PreTrainedModel, blocks_path: str, name: str, used: set[str]) -> str | None:
    """The list of parts of which that of the unused parameter `name` is one, where others of the list have used the
    parameter of that name in them: another input may use this one. The layers' own list has all that each uses."""
    path = name.split(".")
    for end in range(1, len(path)):
        parent = ".".join(path[:end])
        if parent != blocks_path and path[end].isdecimal() and isinstance(module.get_submodule(parent), nn.ModuleList):
            rest = ".".join(path[end + 1 :])
            if any(f"{parent}.{other}.{rest}" in used for other in range(len(module.get_submodule(parent)))):  # type: ignore[arg-type]
                return parent
    return None


def _untrained(
    module: PreTrainedModel, path: str, ids: torch.Tensor, unused: frozenset[str], given: dict[str, Any]
) -> frozenset[str]:
    """Parameters that are used and get no gradient, because the model itself freezes them or asks for none. `given` are
    a trace's arguments."""
    own = {name: parameter for name, parameter in module.named_parameters() if name not in unused}
    frozen = {name for name, parameter in own.items() if not parameter.requires_grad}
    reached: set[int] = set()

    def record(tensor: torch.Tensor) -> None:
        reached.update(leaves_behind(tensor))

    blocks = module.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    try:
        _trace(module, blocks, ids, None, **given, record=record)
    except MismatchError:  # what has no gradient is said by name by the first backward
        return frozenset(frozen)

    def is_reached(name: str) -> bool:
        """For a layer that did as an earlier one did, whether that one's parameter is."""
        index, _, rest = name.removeprefix(f"{path}.").partition(".")
        first = given["like"].get(int(index)) if name.startswith(f"{path}.") else None
        return id(own[name if first is None else f"{path}.{first}.{rest}"]) in reached

    found = frozen | {name for name in own if not is_reached(name)}
    if len(found) == len(own):
        given["refuse"]("none of its parameters gets a gradient")
    return frozenset(found)


def _check_loss(trace: _Trace, ids: torch.Tensor, refuse: Refusal) -> bool:
    """Whether the model's own loss shifts its labels; else whoever calls it shifts them, and it may take logits in the
    model's dtype. The two losses are one function of one tensor, so they may differ by the order of additions only."""
    width = trace.logits.shape[-1]
    shifted = ForCausalLMLoss(trace.logits, ids, width)
    as_it_is = nn.functional.cross_entropy(trace.logits.reshape(-1, width), ids.reshape(-1))
    if trace.loss is not None:
        for shifts, expected in ((True, shifted), (False, as_it_is)):
            if torch.allclose(trace.loss.float(), expected.float(), rtol=1e-6):
                return shifts
    refuse("its own loss is not the cross entropy of the next token")
    raise AssertionError


def _check_plain(call: LayerCall, refuse: Refusal) -> None:
    plain = (torch.Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))
    for leaf in tree_leaves((call.args, call.kwargs)):
        empty = isinstance(leaf, Mapping) and not leaf
        if not isinstance(leaf, plain) and not empty:
            refuse(f"its layers are called with a {type(leaf).__name__}, which may pass from layer to layer")
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            refuse("a layer's arguments other than the hidden state depend on trained parameters")


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    same_place = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same_place and one.shape == other.shape and one.dtype == other.dtype


def _same(one: list[LayerCall], other: list[LayerCall]) -> bool:
    """Whether two runs called every layer with the same values."""
    for a, b in zip(one, other, strict=True):
        leaves_a, structure_a = tree_flatten((a.args, a.kwargs))
        leaves_b, structure_b = tree_flatten((b.args, b.kwargs))
        if structure_a != structure_b:
            return False
        for x, y in zip(leaves_a, leaves_b, strict=True):
            if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
                return False
            if not (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y):
                return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
