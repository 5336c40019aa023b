"""Files: which ones `--data` names, in what order, and what a user should know of the choice.

Owns that no file is left out or let in without a word: links that lead nowhere, directories that may not be read, and
training data beside what they are to be tested with are errors by name; all else that is left alone is a note. It never
reads what is in a data file.
"""

import errno
import fnmatch
import glob
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import IoFailure, SsdplanError, UsageError
from ssdplan.plans.files import read_bounded

SUFFIXES = (".txt", ".jsonl", ".parquet", ".arrow")
_NAMED = 4
_SAVED_BYTES = 1 << 26
"""Of a file in which `datasets` says what it saved."""

_OF = r"(?:sets?|data|datasets?|splits?|files?|rows|examples|samples|corpus|corpora|parts?|portions?|folds?|texts?)?"
_LESS = r"(?:mini|tiny|small|sub)?"
_SPLITS = {
    "train": rf"{_LESS}train(?:ing|s)?|train[ab]|trn|learn",
    "validation": (
        rf"{_LESS}val|valid(?:at(?:e|ed|ing|ions?))?|{_LESS}dev|devel|development|news[-_. ]?dev"
        r"|(?:cross|x)[-_. ]?val(?:idations?)?"
    ),
    "test": rf"{_LESS}test(?:ing|s)?|test[ab]|tst|dev[-_. ]?tests?|test[-_. ]?dev|news[-_. ]?tests?",
    "eval": rf"{_LESS}evals?|evaluat(?:e|ed|ing|ions?)",
    "held-out": (
        r"(?:held|hold|kept|keep|left|leave)[-_. ]?outs?|(?:held|hold)[-_. ]?backs?|with(?:held|hold)"
        r"|(?:un|(?:never|not|non)[-_. ]?)seen"
        r"|out[-_. ]?of[-_. ]?(?:samples?|domain|distribution|time)|ood"
    ),
}
"""The words that `datasets` knows a split by, and their kin, each alone or with what it is a split of (`testset`)."""


def _word(words: str, begin: str = "(?<![a-z])") -> re.Pattern[str]:
    return re.compile(rf"{begin}(?:{words})(?:[-_. ]?{_OF})(?![a-z])")


_SPLIT_WORDS = {split: _word(words) for split, words in _SPLITS.items()}
_TRAIN_BESIDE = (
    _word("train[-_. ]?val|pre[-_. ]?train(?:ing)?|fine[-_. ]?tun(?:e|ing)|fit(?:ting)?|in[-_. ]?samples?|seen|tr"),
    _word("learning", r"(?<![^/])"),  # not that of machines
)
_HELD_OUT_BESIDE = (
    _word("blind|hidden|bench(?:marks?)?"),
    re.compile(rf"(?<![a-z])gold(?:[-_. ]?standard)?(?:[-_. ]?{_OF})[^a-z/]*\.[a-z]+$"),  # a name's last word: no metal
)
_TEST_BESIDE = re.compile(r"(?<![a-z])te(?![a-z])")
_TRAIN_SHORT, _TEST_SHORT = (re.compile(rf"(?<![a-z]){word}(?![a-z])") for word in ("tr", "ts"))
"""Words that are of a split only beside a file of another one: those of training data beside held-out data, those of
held-out data beside training data, and `te` beside `tr`. A `ts` is of one only where a `tr` stands behind the same
letters (`data_ts` beside `data_tr`), for alone it is a time stamp or TypeScript."""
_LANGUAGE = re.compile(r"(?<![a-z])[a-z]{2}(?![a-z])")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class Found:
    """The files of a data set in the order in which they are read, and what a user should know of the choice."""

    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def find_files(path: Path) -> Found:
    """The files that `path` names: itself, those under a directory, or those that a pattern matches.

    A directory that `datasets` saved has the files that it says; any other is searched recursively, in the order of its
    sorted paths, links followed, each directory once; files of other names in it are left alone, and so are names that
    begin with a dot. Raises UsageError where there is none, where one of them cannot be reached, or where a directory
    holds several splits; IoFailure where a drive does not answer.
    """
    kind = _kind(path) if not glob.has_magic(str(path)) or _is_there(path) else "pattern"
    if kind == "pattern":
        matched = sorted(set(map(str, _expanded(path))))
        if not matched:
            raise _absent(path)
        return _chosen(path, [Path(name) for name in matched], _NOT_ENTERED)
    if kind == "file":
        if not is_data(path):
            raise UsageError(
                f"{path}: none of {', '.join(SUFFIXES)}; rename it to what it is, or convert it to one of them"
            )
        return Found((path,))
    held = {entry.name for entry in _entries(path)}
    if "dataset_dict.json" in held:
        splits = _json_object(path / "dataset_dict.json").get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "several"
        raise UsageError(f"{path}: a data set of splits ({names}); give the directory of one of them")
    if "state.json" in held:
        return Found(tuple(_saved_files(path)))
    return _chosen(path, list(_below(path, set())), "")


_NOT_ENTERED = "directory(s), which the pattern matches but does not enter"


def is_data(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def unreadable(path: Path, error: OSError) -> SsdplanError:
    """What to say of a file or directory that the operating system does not let us read."""
    if isinstance(error, PermissionError):
        return UsageError(f"{path}: no permission to read it; give it (chmod), or leave the file out")
    if error.errno == errno.ELOOP:
        return UsageError(f"{path}: a link that leads to itself; mend it, or take it away")
    return IoFailure(f"{path}: cannot be read: {error.strerror or error}")


def _kind(path: Path) -> str:
    """`directory` or `file`. Raises for what is neither, what a link names in vain, and what may not be looked at."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise UsageError(
                f"{path}: a link to {os.readlink(path)}, which is not there; mend the link, or take it away"
            ) from None
        raise _absent(path) from None
    except OSError as error:
        raise unreadable(path, error) from error
    if stat.S_ISDIR(mode):
        return "directory"
    if not stat.S_ISREG(mode) and is_data(path):
        raise UsageError(f"{path}: no regular file, and data are read more than once; copy it into one")
    return "file"


def _is_there(path: Path) -> bool:
    """Whether a name is there, a link that leads nowhere included. Raises where that may not be known."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(path, error) from error
    return True


def _absent(path: Path) -> UsageError:
    return UsageError(
        f"{path}: no such file or directory; --data takes a file ({', '.join(SUFFIXES)}), a directory of them, "
        "or a pattern in quotes"
    )


def _entries(directory: Path) -> list[Path]:
    """What a directory holds, sorted, but for names that begin with a dot."""
    try:
        return sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise unreadable(directory, error) from error


def _below(directory: Path, entered: set[Path]) -> Iterator[Path]:
    """The files below a directory, in the order of sorted paths. `entered` are directories that are not read again."""
    real = directory.resolve()
    if real in entered:
        return
    entered.add(real)
    entries = _entries(directory)
    if {"state.json", "dataset_info.json"} <= {entry.name for entry in entries}:
        yield from _saved_files(directory)
        return
    for entry in entries:
        if _kind(entry) == "directory":
            yield from _below(entry, entered)
        else:
            yield entry


def _expanded(pattern: Path) -> Iterator[Path]:
    """What a pattern matches, as `glob.glob(recursive=True)`, which skips what it may not read; here that is an error.
    Below `**` no directory is entered twice."""
    return _matches(Path(pattern.anchor), pattern.parts[1:] if pattern.anchor else pattern.parts)


def _matches(base: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    if not parts:
        yield base
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        for directory in _directories(base, set()):
            if rest:
                yield from _matches(directory, rest)
            else:
                yield from (entry for entry in _entries(directory) if _kind(entry) == "file")
    elif not glob.has_magic(part):
        if _is_there(base / part) and (_kind(base / part) == "directory" or not rest):
            yield from _matches(base / part, rest)
    else:
        for entry in _hidden_too(base) if part.startswith(".") else _entries(base):
            if fnmatch.fnmatchcase(entry.name, part) and (_kind(entry) == "directory" or not rest):
                yield from _matches(entry, rest)


def _hidden_too(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise unreadable(directory, error) from error


def _directories(directory: Path, entered: set[Path]) -> Iterator[Path]:
    """A directory and all below it, each once."""
    real = directory.resolve()
    if real in entered:
        return
    entered.add(real)
    yield directory
    for entry in _entries(directory):
        if _kind(entry) == "directory":
            yield from _directories(entry, entered)


def _chosen(path: Path, found: list[Path], directories: str) -> Found:
    """The data files among `found`; what else is in it is told, `directories` under that name."""
    files = tuple(file for file in found if is_data(file) and _kind(file) == "file")
    if not files:
        raise UsageError(
            f"{path}: no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file in this directory or below it"
            if not directories
            else f"{path}: the pattern matches {len(found)} name(s), and none is a {', '.join(SUFFIXES[:-1])} or "
            f"{SUFFIXES[-1]} file; what is below directories, '**' matches"
        )
    notes = list(_splits(path, files, is_pattern=bool(directories)))
    chosen = set(files)
    others = [entry for entry in found if entry not in chosen and _kind(entry) == "file"]
    left = [entry for entry in found if entry not in chosen and _kind(entry) == "directory"]
    for entries, what in ((others, "file(s) of other kinds"), (left, directories)):
        if entries:
            notes.append(f"{path}: left alone are {len(entries)} {what} ({named(entries, path)})")
    notes += _twice(path, files)
    return Found(files, tuple(notes))


def _splits(path: Path, files: Iterable[Path], *, is_pattern: bool) -> Iterator[str]:
    """A note of the splits that a pattern mixes, or of held-out data among others. Raises UsageError where a directory
    holds files of several splits."""
    below = Path(path.anchor, *(part for part in _plain_parts(path))) if is_pattern else path
    by_splits: dict[frozenset[str], Path] = {}
    for file in files:
        by_splits.setdefault(_named_of(file, below), file)
    by_splits = _by_their_company([file for file in files if not _named_of(file, below)], by_splits, below)
    several = {splits: file for splits, file in by_splits.items() if splits}
    if len(several) > 1:
        names = ", ".join(sorted(frozenset.union(*several)))
        examples = " and ".join(str(file) for file in list(several.values())[:2])
        if is_pattern:
            yield f"{path}: takes several splits together ({names}), as in {examples}; each is read like the others"
            return
        what = "training data beside another split" if any("train" in s for s in several) else "several splits"
        raise UsageError(
            f"{path}: holds {what} ({names}), as in {examples}; give the directory or a pattern of one of them, such "
            "as 'DIR/train-*.parquet'"
        )
    if several and len(by_splits) > 1:
        ((splits, file),) = several.items()
        if "train" not in splits:
            yield f"{path}: {file} is called {' and '.join(sorted(splits))}, and is read like the files beside it"


def _named_of(file: Path, below: Path) -> frozenset[str]:
    return splits_of(file.relative_to(below) if file.is_relative_to(below) else file)


def _by_their_company(
    others: list[Path], by_splits: dict[frozenset[str], Path], below: Path
) -> dict[frozenset[str], Path]:
    """`by_splits` with those of the `others`, which no word says a split of, that are of one for what lies beside:
    `trainval` beside `test`, `benchmark` or `gold` beside `train`, `tr` beside `te`, and `data_tr` beside `data_ts`.
    The short ones are languages where others lie beside."""
    words = {file: _words(file.relative_to(below) if file.is_relative_to(below) else file) for file in others}
    known = {"tr", "te", "ts"}
    abroad = any(found not in known for text in words.values() for found in _LANGUAGE.findall(text.rsplit("/", 1)[-1]))

    def having(*patterns: re.Pattern[str]) -> list[Path]:
        matches = ((file, pattern.search(text)) for file, text in words.items() for pattern in patterns)
        return [file for file, match in matches if match and not (abroad and _is_language(match[0]))]

    found = {
        "train": having(*_TRAIN_BESIDE),
        "test": [*having(_TEST_BESIDE), *([] if abroad else _short_tests(words))],
        "held-out": having(*_HELD_OUT_BESIDE),
    }
    if not (found["train"] and (found["test"] or any(splits - {"train"} for splits in by_splits))):
        found["train"] = found["test"] = []
    if not any("train" in splits for splits in by_splits):
        found["held-out"] = []
    if not any(found.values()):
        return by_splits
    taken = {frozenset((split,)): files[0] for split, files in found.items() if files}
    left = [file for file in others if not any(file in files for files in found.values())]
    named = {splits: file for splits, file in by_splits.items() if splits}
    return {**taken, **named, **({frozenset(): left[0]} if left else {})}


def _short_tests(words: dict[Path, str]) -> list[Path]:
    """The files whose path has a `ts` where another file's has a `tr`, behind the same letters."""
    begun = {text[: match.start()] for text in words.values() for match in _TRAIN_SHORT.finditer(text)}
    return [
        file
        for file, text in words.items()
        if any(text[: match.start()] in begun for match in _TEST_SHORT.finditer(text))
    ]


def _is_language(word: str) -> bool:
    return _LANGUAGE.fullmatch(word) is not None


def _plain_parts(path: Path) -> Iterator[str]:
    """The parts of a pattern before its first that is one."""
    for part in path.parts[1:] if path.anchor else path.parts:
        if glob.has_magic(part):
            return
        yield part


def splits_of(name: Path) -> frozenset[str]:
    """Which splits of a data set a file says it belongs to, by the words of its path."""
    words = _words(name)
    return frozenset(split for split, pattern in _SPLIT_WORDS.items() if pattern.search(words))


def _words(name: Path) -> str:
    return _HUMP.sub("-", str(name)).lower()


def _twice(path: Path, files: Iterable[Path]) -> Iterator[str]:
    """A note of each file that has two names among `files`."""
    seen: dict[tuple[int, int], Path] = {}
    for file in files:
        status = file.stat()
        first = seen.setdefault((status.st_dev, status.st_ino), file)
        if first is not file:
            yield f"{path}: {file} is {first} by another name; it is read twice"


def copies(path: Path, files: Iterable[Path], digests: Iterable[bytes]) -> Iterator[str]:
    """A note of the files that hold what another one does, by `digests` of what is in them; those that are one file by
    two names are told of already (`find_files`)."""
    seen: dict[bytes, Path] = {}
    found = []
    for file, digest in zip(files, digests, strict=True):
        first = seen.setdefault(digest, file)
        if first is not file and not first.samefile(file):
            found.append((file, first))
    if found:
        file, first = found[0]
        yield f"{path}: {len(found)} file(s) hold what another does, as {file} and {first}; each is read"


def named(entries: Iterable[Path], below: Path) -> str:
    """A few names, and how many of which suffix there are besides."""
    paths = list(entries)
    shown = [str(entry.relative_to(below) if entry.is_relative_to(below) else entry) for entry in paths[:_NAMED]]
    kinds = Counter(entry.suffix.lower() or "no suffix" for entry in paths[_NAMED:])
    return ", ".join([*shown, *(f"{count} more of {kind}" for kind, count in sorted(kinds.items()))])


def _saved_files(path: Path) -> list[Path]:
    """The arrow files of a directory that `datasets.Dataset.save_to_disk` wrote."""
    state = _json_object(path / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UsageError(f"{path}: the data set is a selection kept as indices; save it again with flatten_indices()")
    entries = state.get("_data_files")
    listed = entries if isinstance(entries, list) else []
    names = [str(entry.get("filename") or "") if isinstance(entry, dict) else "" for entry in listed]
    if not names or not all(Path(name).name for name in names):
        raise UsageError(f"{path / 'state.json'}: names no data files; save the data set again")
    files = [path / Path(name).name for name in names]
    if len(set(files)) < len(files):
        raise UsageError(f"{path / 'state.json'}: names a data file twice; save the data set again")
    for file in files:
        if not _is_there(file):
            raise UsageError(f"{file}: is missing, but state.json names it; save the data set again")
        if _kind(file) != "file":
            raise UsageError(f"{file}: a directory, but state.json names it as a file; save the data set again")
    return files


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_bounded(file, _SAVED_BYTES, "description of a data set").decode("utf-8"))
    except OSError as error:
        raise unreadable(file, error) from error
    except UsageError:  # which is a ValueError too
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not valid JSON; save the data set again") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file}: holds no JSON object; save the data set again")
    return value
