"""Kinds of parameters: which are biases or weights of norms, and which are the matrices that Muon updates.

Owns both rules, and how what Muon takes, and what it does not, is said. It lays nothing out: `layout.py` does.
"""

import re
from collections.abc import Collection, Iterable

from torch import nn

from ssdplan.plans.errors import UsageError

from .inspection.inspection import Anatomy
from .layout import StateSpec

_SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""In the lower-case name of a parameter; a parameter of an nn.LayerNorm is spared by any name."""
_FUSED = re.compile(r"(?:^|[._])(?:qkv|query_key_value|c_attn|gate_up|wqkv|attn_qkv|in_proj_weight)", re.IGNORECASE)
"""In the name of a matrix that is several side by side."""


def spared_parameters(model: nn.Module) -> frozenset[str]:
    """The names of the biases and of the weights of norms, as `named_parameters` has them, by the rule of
    transformers.Trainer. They do not decay."""
    norms = tuple(f"{name}." for name, child in model.named_modules() if isinstance(child, nn.LayerNorm))
    return frozenset(
        name for name, _ in model.named_parameters() if _SPARED.search(name.lower()) or name.startswith(norms)
    )


def muon_parameters(module: nn.Module, anatomy: Anatomy, frozen: Collection[str]) -> frozenset[str]:
    """The names of the parameters that Muon updates, as `named_parameters` has them: the trained weights of two
    dimensions in blocks, without biases, weights of norms and tables. Errors: UsageError where there is none."""
    tables = tuple(f"{name}." for name, child in module.named_modules() if isinstance(child, nn.Embedding))
    spared, blocks = spared_parameters(module), f"{anatomy.blocks_path}."
    found = frozenset(
        name
        for name, parameter in module.named_parameters()
        if name.startswith(blocks)
        and parameter.ndim == 2
        and name not in spared
        and name not in frozen
        and name not in anatomy.unused
        and not name.startswith(tables)
    )
    if not found:
        raise UsageError(
            "optimizer muon: the blocks have no weight of two dimensions that is trained; take --optimizer adamw"
        )
    return found


def said_of_muon(states: Iterable[StateSpec]) -> tuple[str, ...]:
    """What Muon updates, and what AdamW, a line each: how many tensors, of how many parameters, and which."""
    every = [(state, tensor) for state in states for tensor in state.tensors if not state.frozen]
    by_muon = [tensor for state, tensor in every if state.muon]
    rest = [(state, tensor) for state, tensor in every if not state.muon]
    if not by_muon:
        return ()
    fused = [tensor.name for tensor in by_muon if _FUSED.search(tensor.name)]
    lines = [
        f"Muon updates {len(by_muon)} matrices of blocks, {_parameters(t.elements for t in by_muon)}: "
        + ", ".join(_named(t.name for t in by_muon))
    ]
    if fused:
        lines.append(f"fused matrices are orthogonalised whole, as torch.optim.Muon does: {', '.join(_named(fused))}")
    groups = {
        "of embedding and head": [t for s, t in rest if s.name in ("embedding", "head")],
        "tied, of embedding and head": [t for s, t in rest if s.name == "tied"],
        "of three dimensions, as fused experts are": [
            t for s, t in rest if s.name.startswith("block") and len(t.shape) > 2
        ],
    }
    taken = {t.name for group in groups.values() for t in group}
    groups["norms, biases and others in blocks"] = [t for _, t in rest if t.name not in taken]
    said = [
        f"{len(group)} {what} ({_parameters(t.elements for t in group)}: {', '.join(_named(t.name for t in group))})"
        for what, group in groups.items()
        if group
    ]
    lines.append(f"AdamW updates the other {len(rest)} tensors: {'; '.join(said)}")
    return tuple(lines)


_SHOWN = 8
"""Kinds of names in a line."""


def _named(names: Iterable[str]) -> list[str]:
    """Names without the numbers of their layers, each once."""
    kinds = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))
    more = [f"{len(kinds) - _SHOWN} more kinds"] if len(kinds) > _SHOWN else []
    return kinds[:_SHOWN] + more


def _parameters(elements: Iterable[int]) -> str:
    return f"{sum(elements):,} parameters"
