"""The inspection of a model, once for all that are alike: it takes half a second, most of what opening one takes.

Owns what was found. Models are alike whose configuration, precision and code are; the weights of a checkpoint are none
of an inspection's business. Tests that are about the inspection do without this (`executor/conftest.py`).
"""

import hashlib
import json
import os
import pickle
from collections.abc import Hashable
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from ssdplan.executor.model.inspection import inspection
from ssdplan.executor.model.inspection.inspection import Anatomy, inspect

MOST = 256
"""Of what was found, so much is kept."""
_found: dict[Hashable, Anatomy] = {}


def inspect_once(module: PreTrainedModel, folder: Path | None = None) -> Anatomy:
    """What `inspect` finds, here or earlier; with a `folder`, earlier in any process that has it. A model that is
    refused is inspected each time."""
    key = _likeness(module)
    if key not in _found:
        if len(_found) == MOST:
            _found.clear()
        _found[key] = inspect(module) if folder is None else _kept(folder, key, module)
    module.train(False)  # as an inspection leaves it
    return _found[key]


def _kept(folder: Path, key: Hashable, module: PreTrainedModel) -> Anatomy:
    """What the folder has for the key, or what `inspect` finds, which is put there."""
    path = folder / hashlib.sha256(pickle.dumps(key)).hexdigest()
    if path.exists():
        anatomy = pickle.loads(path.read_bytes())
        assert isinstance(anatomy, Anatomy)
        return anatomy
    anatomy = inspect(module)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(pickle.dumps(anatomy))
    unfinished.rename(path)
    return anatomy


def _likeness(module: PreTrainedModel) -> Hashable:
    config = {name: value for name, value in module.config.to_dict().items() if name != "_name_or_path"}
    parameters = tuple((name, tuple(each.shape), each.dtype) for name, each in module.named_parameters())
    buffers = tuple((name, tuple(each.shape), each.dtype) for name, each in module.named_buffers())
    questions = inspection.head_kind, inspection.isolation, inspection.reach, inspection.row_limit  # a test may answer
    told = json.dumps(config, sort_keys=True, default=repr)
    return told, parameters, buffers, tuple(map(_code, module.modules())), questions


def _code(module: nn.Module) -> Hashable:
    """A test may give a class, or one module, a forward of its own."""
    return type(module), type(module).forward, vars(module).get("forward")
