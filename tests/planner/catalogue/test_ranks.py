"""What-ifs of several ranks: what of a machine each has, what they exchange over, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from ssdplan.planner.catalogue import GPUS
from ssdplan.planner.catalogue.networks import NETWORKS
from ssdplan.planner.catalogue.ranks import Ranks, ranks_of
from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.errors import UsageError
from tests.made.profiles import GIB


def what_if(ranks: int = 1, nodes: int = 1, *networks: str, **changes: Any) -> WhatIf:
    usual: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "gpu": "rtx-4090",
        "ssds": ["samsung-990-pro*2"],
        "host_memory_bytes": 16 * GIB,
    }
    return WhatIf(**(usual | changes), several=Ranks(ranks, nodes), networks=networks)


def test_ranks_of_a_machine_share_its_drives_cores_and_dram() -> None:
    alone, four = estimate(what_if()).machine, estimate(what_if(4)).machine
    assert alone.network is None and alone.host_memory_bytes == four.host_memory_bytes, "a budget is of a rank"
    assert (four.cores, four.device_memory_bytes) == (alone.cores // 4, alone.device_memory_bytes)
    assert four.h2d_bandwidth == alone.h2d_bandwidth, "each GPU has its link"
    assert four.update_rate == pytest.approx(alone.update_rate / 4)
    for mine, whole in zip(four.volumes, alone.volumes, strict=True):
        assert mine.free_bytes == whole.free_bytes // 4 and mine.endurance_bytes == round(
            (whole.endurance_bytes or 0) / 4
        )
        assert [(4 * point.read, 4 * point.write) for point in mine.frontier] == [
            pytest.approx((point.read, point.write)) for point in whole.frontier
        ]


def test_machines_share_nothing() -> None:
    alone, two = estimate(what_if()).machine, estimate(what_if(2, 2, "10gbe")).machine
    assert two.volumes == alone.volumes and two.update_rate == alone.update_rate and two.cores == alone.cores


def test_what_ranks_exchange_over_is_the_slowest_that_they_pass() -> None:
    """Gradients go from each to each: an adapter carries them for all ranks of its machine; parameters in a ring."""
    by_name = {network.name: network.bandwidth.value for network in NETWORKS}
    assert by_name["1gbe"] == pytest.approx(117.7e6, rel=1e-3)
    inside = estimate(what_if(4, 1, "nvlink-a100", gpu="a100-80gb")).machine.network
    assert inside and inside.gather_bandwidth == inside.exchange_bandwidth == by_name["nvlink-a100"]
    over_host = estimate(what_if(4)).machine
    assert over_host.network and over_host.network.gather_bandwidth == pytest.approx(0.6 * over_host.h2d_bandwidth)
    between = estimate(what_if(5, 5, "1gbe")).machine.network
    assert between and between.gather_bandwidth == between.exchange_bandwidth == by_name["1gbe"]
    both = estimate(what_if(8, 2, "100gbe", "nvlink-a100", gpu="a100-80gb")).machine.network
    assert both and both.ranks == 8 and both.gather_bandwidth == by_name["100gbe"]
    state = 8e9  # bytes of gradients: each rank gets an eighth from the four of the other machine, and its own three
    seconds = 4 * 4 * state / 8 / by_name["100gbe"]
    assert 7 * state / 8 / both.exchange_bandwidth == pytest.approx(seconds)
    given = estimate(what_if(2, 2, "1gbe", figures={"network.bandwidth": 5e8})).machine.network
    assert given and given.gather_bandwidth == 5e8


def test_without_gpus_ranks_exchange_in_dram() -> None:
    machine = estimate(what_if(2, gpu="none")).machine
    assert machine.network and machine.network.ranks == 2 and machine.network.gather_bandwidth < 2e9


@pytest.mark.parametrize(
    ("ranks", "nodes", "networks", "words"),
    [
        (1, 1, ["10gbe"], "one rank exchanges nothing"),
        (2, 1, ["10gbe"], "say --nodes too"),
        (2, 2, [], "name what is between them with --network"),
        (2, 2, ["nvlink-a100", "10gbe"], "between GPUs of one machine"),
        (4, 2, ["10gbe", "25gbe"], "is between machines already"),
        (2, 2, ["10gb"], "did you mean 10gbe"),
        (4, 2, ["nvlink-h100"], "name what is between them"),
    ],
)
def test_networks_that_cannot_be_meant_are_refused(ranks: int, nodes: int, networks: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        estimate(what_if(ranks, nodes, *networks))


def test_an_nvlink_joins_the_gpus_that_have_it() -> None:
    """Each names GPUs that there are, and is refused with all others, with what these have instead."""
    nvlinks = [network for network in NETWORKS if network.between == "GPUs"]
    names = {gpu.name for gpu in GPUS}
    assert all(network.gpus and set(network.gpus) <= names for network in nvlinks)
    assert all(not network.gpus for network in NETWORKS if network.between == "machines")
    for network in nvlinks:
        for gpu in names - {"gb10", "radeon-8060s", "v100-32gb"}:
            asked = what_if(2, 1, network.name, gpu=gpu)
            if gpu in network.gpus:
                found = estimate(asked).machine.network
                assert found and found.gather_bandwidth == network.bandwidth.value
            else:
                with pytest.raises(UsageError, match=f"--network {network.name}: it joins .*, and {gpu} has no such"):
                    estimate(asked)
    with pytest.raises(UsageError, match=r"rtx-4090 has no such NVLink; leave it out \(--figure ranks\.bandwidth says"):
        estimate(what_if(2, 1, "nvlink-h100"))
    with pytest.raises(UsageError, match="rtx-a6000 has no such NVLink; name nvlink-3090, or leave it out"):
        estimate(what_if(2, 1, "nvlink-h100", gpu="RTX A6000 48GB"))
    given = estimate(what_if(2, figures={"ranks.bandwidth": 9e10})).machine.network
    assert given and given.gather_bandwidth == 9e10


def test_ranks_are_spread_evenly() -> None:
    assert ranks_of(None, None) == Ranks(1, 1) and ranks_of(None, 5) == Ranks(5, 5) and ranks_of(8, 2) == Ranks(8, 2)
    for ranks, nodes in ((3, 2), (1, 2), (1 << 20, 1)):
        with pytest.raises(UsageError, match="--ranks"):
            ranks_of(ranks, nodes)


def test_a_faster_network_and_more_ranks_are_never_slower() -> None:
    """By the plan for one batch a rank; and what several ranks lose to a network is told."""
    request = SolveRequest(8 * GIB, micro_batch_size=4, micro_batches=8, ranks=2)
    reached = []
    for network in ("1gbe", "10gbe", "100gbe"):
        plan = solve(estimate(what_if(2, 2, network)), request, told="screen")
        reached.append(plan.prediction.tokens_per_second)
        gains = {row.resource: row.throughput_gain for row in plan.sensitivity}
        assert gains["network"] >= 0 and gains["ranks"] > 0
    assert reached == sorted(reached) and reached[0] < 0.9 * reached[-1]
    four = solve(estimate(what_if(4, 4, "10gbe")), replace(request, ranks=4), told="step")
    assert four.prediction.tokens_per_second > reached[1]
