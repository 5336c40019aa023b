"""The tensor store of a run: extents with checksums and generations, on files and block devices that are its own.

`Store` is what a run uses, of `Record`s; `survey`, `inspect` and `check` tell what lies on volumes, `initialise` makes
one. `Locks` are for whoever wants a directory to itself.
Nothing else outside this folder is for use, and nothing here imports torch.
"""

from . import describe
from .layout import MOST_KEPT, Record
from .store import Store
from .survey import Lying, discard, survey, sweep, withdraw
from .tools import check, initialise, inspect
from .volumes import SUFFIX, Locks, is_locked

__all__ = [
    "MOST_KEPT",
    "SUFFIX",
    "Locks",
    "Lying",
    "Record",
    "Store",
    "check",
    "describe",
    "discard",
    "initialise",
    "inspect",
    "is_locked",
    "survey",
    "sweep",
    "withdraw",
]
