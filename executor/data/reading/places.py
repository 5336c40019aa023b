"""Places: the file or row that is being worked on, for the process that watches (`data/apart.py`)."""

from collections.abc import Callable

At = Callable[[str, str, int], None]
"""Called with what is done next, to which file or row, and how many characters it has, before that is begun."""


def unsaid(doing: str, place: str, characters: int) -> None:
    """An `At` of nobody who asks."""
