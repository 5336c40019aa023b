"""The tensor store of a run: extents with checksums and generations, on files and block devices that are its own.

`Store` is what a run uses, of `Record`s; `inspect` and `check` tell what lies on volumes, `initialise` makes one.
Nothing else outside this folder is for use, and nothing here imports torch.
"""

from .layout import Record
from .store import Damage, Store
from .striping import STRIPE_BYTES

__all__ = ["STRIPE_BYTES", "Damage", "Record", "Store"]
