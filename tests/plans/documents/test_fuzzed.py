"""Any bytes are a plan, a profile, or refused with one line that begins with the file: never a traceback."""

import functools
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import SsdplanError, UsageError
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.profiles import made_profile

ODD = [0, -1, 1 << 62, 1 << 70, 1e308, 5e-324, "", "\ud800", "x" * 300, "a\nb", "ssdplan.plan/1"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths(raw: object, path: tuple = ()) -> list[tuple]:
    """Where there is something in a document."""
    keys = raw.keys() if isinstance(raw, dict) else range(len(raw)) if isinstance(raw, list) else ()
    return [path, *(found for key in keys for found in paths(raw[key], (*path, key)))]


@functools.cache
def whole(kind: type[Plan] | type[Profile]) -> str:
    profile = made_profile(tied=True)
    return (profile if kind is Profile else solve(profile, SolveRequest(host_memory_bytes=1 << 33))).text()


@pytest.mark.parametrize("kind", [Plan, Profile])
@settings(max_examples=examples(250), deadline=None)
@given(data=st.data())
def test_a_document_with_anything_anywhere_is_one_or_refused(tmp_path_factory, kind, data):
    """Of a whole document any one thing becomes another, is gone, or gets a neighbour."""
    raw = json.loads(whole(kind))
    *above, last = data.draw(st.sampled_from(paths(raw)[1:]))
    inside = raw
    for key in above:
        inside = inside[key]
    match data.draw(st.sampled_from(["another", "gone", "neighbour"])):
        case "another":
            inside[last] = data.draw(JSON)
        case "gone":
            del inside[last]
        case "neighbour":
            new = data.draw(JSON)
            inside.insert(last, new) if isinstance(inside, list) else inside.update({data.draw(st.text()): new})
    refused_or_read(tmp_path_factory.getbasetemp() / "fuzzed.json", json.dumps(raw).encode(), kind)


@pytest.mark.parametrize("kind", [Plan, Profile])
@settings(max_examples=examples(100), deadline=None)
@given(content=st.one_of(st.binary(max_size=100), JSON.map(lambda raw: json.dumps(raw).encode())))
@example(content=b"1" * 5000)
@example(content=b'{"schema": ' + b"9" * 5000 + b"}")
@example(content=b'{"a\\nb": 1}')
@example(content=b"[" * 100_000)
def test_any_bytes_are_a_document_or_refused(tmp_path_factory, kind, content):
    refused_or_read(tmp_path_factory.getbasetemp() / "fuzzed.json", content, kind)


def operations(plan: Plan) -> float:
    """About as many as its schedule has: what a person could write may take days to expand."""
    elements = sum(state.elements for state in plan.model.states)
    return 16 * len(plan.model.layers) * plan.decision.micro_batches + elements / plan.decision.update_chunk_elements


def refused_or_read(path: Path, content: bytes, kind: type[Plan] | type[Profile]) -> None:
    """The document is read and survives a round trip, or is refused with one line."""
    path.write_bytes(content)
    try:
        found = kind.load(path)
    except UsageError as error:
        assert str(error).startswith(str(path)) and len(str(error).splitlines()) == 1
        return
    found.save(path)
    assert kind.load(path) == found
    if isinstance(found, Plan) and operations(found) < 20_000:
        try:
            build_schedule(found.model, found.decision)
        except SsdplanError as error:
            assert len(str(error).splitlines()) == 1
