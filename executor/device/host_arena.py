"""An arena: one block of page-locked host memory, as torch sees it.

Owns that memory until it is closed. How a GPU is told of it, `device.py` knows.
"""

import torch

from ssdplan import native
from ssdplan.plans.errors import MemoryBudgetError


class HostArena:
    """One block of page-locked host memory and its bytes as a torch tensor. Close it when no view is left."""

    def __init__(self, nbytes: int, *, lock: bool = True) -> None:
        try:
            self._arena = native.Arena(nbytes, lock=lock)
        except MemoryError as error:
            raise MemoryBudgetError(f"host memory: cannot allocate an arena of {nbytes} bytes: {error}") from error
        self.bytes: torch.Tensor = torch.from_dlpack(self._arena)
        self.address = self._arena.address
        self.nbytes = nbytes
        self.note = "" if self._arena.locked or not lock else self._arena.lock_error

    def close(self) -> None:
        """Give the memory back: now, or when the last view is dropped."""
        del self.bytes
        if not self._arena.exports:
            self._arena.close()
