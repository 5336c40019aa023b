"""The tensor store of a run: extents with checksums and generations, on files and block devices that are its own.

`Store` is what a run uses, of `Record`s; `inspect` and `check` tell what lies on volumes, `initialise` makes one.
Nothing else outside this folder is for use, and nothing here imports torch.
"""

from . import describe
from .layout import Record
from .store import Store
from .tools import check, initialise, inspect

__all__ = ["Record", "Store", "check", "describe", "initialise", "inspect"]
