"""The plan by which a run goes on with another number of ranks."""

import io

import pytest

from ssdplan.commands.ranks.of_run import _planned
from ssdplan.plans.documents.profile import Network
from ssdplan.plans.errors import InfeasibleError
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.progress_line import ProgressLine
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model


def test_where_an_equal_part_of_the_memory_is_too_little_it_says_how_ranks_get_more() -> None:
    model = made_model(blocks=2, hidden=64)
    decision = decide(model, micro_batches=4).model_copy(update={"host_budget_bytes": 1 << 16})
    plan = planned(model, made_machine(device_memory=2 << 40), decision, build_schedule(model, decision))
    network = Network(ranks=2, gather_bandwidth=1e9, exchange_bandwidth=1e9, add_rate=1e10)
    with pytest.raises(InfeasibleError) as raised:
        _planned(plan, 2, network, ProgressLine("run", io.StringIO()))
    words = str(raised.value)
    assert "host memory of 32 KiB is too little" in words
    assert "ssdplan profile --ranks 2" in words and "ssdplan run PLAN --resume RUN --ranks 2" in words
