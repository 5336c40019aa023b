"""Which volumes are a rank's."""

from pathlib import Path

import pytest

from ssdplan.commands.ranks.of_run import dealt, volumes_of
from ssdplan.executor.ranks.place import Place
from ssdplan.plans.errors import UsageError


def place(rank: int, ranks: int = 2, machines: int = 1) -> Place:
    return Place(rank, ranks * machines, rank % ranks, ranks)


def test_directories_are_everybodys_and_what_is_not_is_one_ranks_of_each_machine(tmp_path: Path) -> None:
    shared, *own = (tmp_path / name for name in ("shared", "a", "b", "c", "d"))
    shared.mkdir()
    for path in own:
        path.touch()
    named = [own[0], shared, *own[1:]]
    assert dealt(named, None) == [0, 1, 2, 3, 4]
    assert volumes_of(named, place(0)) == [own[0], shared, own[2]]
    assert volumes_of(named, place(1)) == [shared / "rank-1", own[1], own[3]]
    second_machine = place(3, machines=2)
    assert volumes_of(named, second_machine) == [shared / "rank-3", own[1], own[3]]
    assert (shared / "rank-1").is_dir() and (shared / "rank-3").is_dir()


def test_what_ranks_cannot_share_evenly_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.touch()
    for named in (paths[:1], paths):
        with pytest.raises(UsageError, match=r"is one rank's alone, and 2 ranks .* as many blank volumes as ranks"):
            dealt(named, place(0))
    again = tmp_path / "link"
    again.symlink_to(paths[0])
    with pytest.raises(UsageError, match=r"link: is named twice, .* name another for each rank"):
        dealt([paths[0], again], place(0))
    with pytest.raises(UsageError, match="is not there"):
        dealt([tmp_path / "nowhere"], place(0))
