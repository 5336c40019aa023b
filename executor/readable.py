"""Says why a file that is there cannot be what it should be: nobody may read it, or it is a git-LFS pointer.

Owns these two reasons, in words. What a file must hold is whoever reads it to say.
"""

from pathlib import Path

from ssdplan.plans.errors import IoFailure, UsageError

_POINTER = b"version https://git-lfs.github.com/spec/"


def require_readable(file: Path) -> None:
    """UsageError where the file `file` may not be read or is a git-LFS pointer; IoFailure where reading it fails."""
    try:
        with file.open("rb") as stream:
            begin = stream.read(len(_POINTER))
    except PermissionError as error:
        raise UsageError(f"{file}: no permission to read it; chmod u+r or ask its owner") from error
    except OSError as error:
        raise IoFailure(f"{file}: {error.strerror} (while reading)") from error
    if begin == _POINTER:
        raise UsageError(f"{file}: is a git-LFS pointer, not the file itself; run git lfs pull in its repository")
