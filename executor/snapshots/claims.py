"""Claims: which runs' directories this user made, kept where only the user writes.

A run's directory may have been received from somebody else: what its run.json says of places outside of it, and of
stores that lie there, proves nothing. A claim does: it was written when the run was begun. Owns the files of claims,
one a run; it knows nothing else of a run.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import Folder, make_folder, read_bounded, require_private, write_whole

_MOST_BYTES = 1 << 16
_PRUNED = 4096
"""Claims that are looked at, at most, for runs that are gone."""


class Claims:
    """The claims of this user, in a directory of their own; with None there is no place for them, and no run is known.

    A claim names the run's directory by its path, so that of a directory that is moved or copied counts no more.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @classmethod
    def of_user(cls) -> Self:
        """Those in $SSDPLAN_STATE, or $XDG_STATE_HOME/ssdplan, or ~/.local/state/ssdplan. Raises UsageError where that
        directory is another user's, or others may write to it."""
        try:
            if own := os.environ.get("SSDPLAN_STATE"):
                base = Path(own)
            else:
                base = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()) / "ssdplan"
        except RuntimeError:  # of a user without a home
            return cls(None)
        directory = base / "runs"
        try:
            make_folder(directory)
            status = directory.stat()
        except OSError:
            return cls(None)
        require_private(directory, status, "name another directory in SSDPLAN_STATE")
        return cls(directory)

    def note(self, run: str, directory: Path) -> None:
        """The run of this identity is this user's, in `directory`. Where that cannot be written the run stays unknown:
        a resume then asks for the places outside of it."""
        if self._directory is not None:
            with suppress(OSError):
                self._prune()
                write_whole(self._directory / run, os.fsencode(directory.resolve()), durable=True)

    def knows(self, run: str, directory: Path) -> bool:
        """Whether the run of this identity was begun by this user in `directory`."""
        if self._directory is None:
            return False
        try:
            told = read_bounded(self._directory / run, _MOST_BYTES, "claim")
        except OSError:
            return False
        return told == os.fsencode(directory.resolve())

    def _prune(self) -> None:
        """Forget runs whose directories are gone."""
        assert self._directory is not None
        with Folder(self._directory) as folder:
            for name in folder.names()[:_PRUNED]:
                with suppress(UsageError):  # no claim of ours
                    if not os.path.lexists(folder.read(name, _MOST_BYTES, "claim")):
                        folder.remove(name)
