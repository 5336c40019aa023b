"""Where a command may write: what cannot be is refused before any work, in one line that names the option.

Owns that an output replaces nothing but a file of its own kind, or an empty one, and no file of a run; that it can be
made where it is to be; and that two outputs of a command are not in one place. It writes nothing that stays.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations
from pathlib import Path

from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import require_name, require_replaceable, require_room_for_files
from ssdplan.plans.room import no_room

from .kinds import Kind

_MODELS = r"model-[0-9]+"
"""Models of a run's earlier ends: no place for a file that an option names, but `export RUN --to RUN/model-20` may make
one."""


def require_writable(path: Path | None, option: str, kind: Kind) -> None:
    """Refuse an output of this kind before the work, not after it; None is none. Raises UsageError."""
    if path is not None:
        _require_replaceable(path, option, kind)
        with _told(path, option):
            if not path.parent.is_dir():
                raise UsageError(f"{path}: cannot be written; name a file in a directory that exists with {option}")
            require_room_for_files(path.parent)


def require_place(path: Path | None, option: str, kind: Kind) -> None:
    """The same of an output whose directories are made where they are missing. Raises UsageError."""
    if path is not None:
        _require_replaceable(path, option, kind)
        _require_folder(path.parent, path, option)


def require_folder(path: Path | None, option: str, suffix: str = "") -> None:
    """Refuse a directory of outputs that is none, and where none can be made, before the work; None is none. Of what
    has the `suffix` of these outputs there, each is to be a regular file. Raises UsageError."""
    if path is None:
        return
    _refuse_of_run(path, option)
    _require_folder(path, path, option)
    if suffix and path.is_dir():
        with _told(path, option):
            for entry in sorted(path.glob(f"*{suffix}")):
                require_replaceable(entry)


def require_new_file(path: Path, option: str) -> None:
    """Refuse a file that is not there and cannot be made; its directories are made where they are missing. Raises
    UsageError."""
    _require_folder(path.parent, path, option)


def require_apart(outputs: Mapping[str, Path | None]) -> None:
    """Refuse two options that name one file, of which only the last would be left, and an output within the directory
    of another, which may write a file of that name. Raises UsageError."""
    named = [(option, path, Path(os.path.realpath(path))) for option, path in outputs.items() if path is not None]
    for (first, _, above), (second, path, here) in permutations(named, 2):
        if here == above:
            raise UsageError(f"{path}: is named by {first} and by {second}; name another file with one of them")
        if here.is_relative_to(above):
            raise UsageError(
                f"{path}: is named by {second}, within what {first} names; name another place with one of them"
            )


def require_names(folder: Path, names: Iterable[str], output: Path, option: str) -> None:
    """Refuse an output where the file system of the directory `folder` has no room for names as long as these. Raises
    UsageError."""
    with _told(output, option):
        for name in names:
            require_name(folder, name)


def _require_replaceable(path: Path, option: str, kind: Kind) -> None:
    with _told(path, option):
        require_replaceable(path)
        _refuse_of_run(path, option, _MODELS)
        if path.is_file() and path.stat().st_size and not kind.is_at(path):
            raise UsageError(f"{path}: exists and is not a {kind.name} of ssdplan; name another file with {option}")


def _refuse_of_run(path: Path, option: str, others: str = "") -> None:
    """Raise UsageError where a run's directory has or will have what lies at `path`, or above it, for itself; also by
    the pattern `others` of names."""
    from ssdplan.plans.documents.run import RUN

    with _told(path, option):
        there = Path(os.path.realpath(path))
        for folder in there.parents:
            name = there.relative_to(folder).parts[0]
            if (folder / RUN).is_file() and (_is_of_run(name) or re.fullmatch(others, name)):
                raise UsageError(f"{path}: belongs to the run in {folder}; name another place with {option}")


def _is_of_run(name: str) -> bool:
    """Whether a run's directory has an entry of this name for itself."""
    from ssdplan.executor.snapshots.run_directory import CONFIGURATION
    from ssdplan.plans.documents.metrics import METRICS, REPORT, TRACE
    from ssdplan.plans.documents.preparation import PROFILE, TRAIN
    from ssdplan.plans.documents.run import MODEL, PLAN, RUN

    own = {RUN, PLAN, CONFIGURATION, METRICS, REPORT, TRACE, MODEL, PROFILE, TRAIN}
    numbered = r"plan(-[0-9]+|\.next)\.json|rank-[0-9]+.*|volume-[0-9]+\.ssdplan|zeroth-order\.log"
    return name in own or re.fullmatch(numbered, name) is not None


def _require_folder(folder: Path, output: Path, option: str) -> None:
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    with _told(output, option):
        if not there.is_dir():
            raise UsageError(
                f"{output}: cannot be written: {there} is not a directory; name another place with {option}"
            )
        require_room_for_files(there)
    missing = output.absolute().parts[len(there.absolute().parts) :]
    require_names(there, missing, output, option)


@contextlib.contextmanager
def _told(output: Path, option: str) -> Iterator[None]:
    """Let an OSError be a UsageError that names the output and its option, but for a drive that has no room."""
    try:
        yield
    except OSError as error:
        if no_room(error):
            raise
        raise UsageError(f"{output}: cannot be written: {error.strerror}; name another place with {option}") from error
