"""Ranks of a what-if: how machines are divided between them, and how fast they exchange.

Owns both rules (docs/catalogue.md, "Several ranks"). Budgets are of a rank, so it divides none; drives, cores and the
bandwidth of DRAM are a machine's, which its ranks share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssdplan.plans.documents.plan import MOST_RANKS
from ssdplan.plans.documents.profile import Network
from ssdplan.plans.errors import UsageError

from . import find
from .figure import Figure
from .networks import (
    DRAM_BANDWIDTH,
    LATENCY_OF_DRAM,
    LATENCY_OF_LINK,
    LINK_SHARE,
    NETWORKS,
    OVER_DRAM,
    OVER_LINK,
    Interconnect,
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many there are, on how many machines, alike on each."""

    ranks: int = 1
    nodes: int = 1

    @property
    def each(self) -> int:
        """Ranks of a machine."""
        return self.ranks // self.nodes

    def name(self, machine: str) -> str:
        """Of all machines, from what one rank of a machine has."""
        inside = f"{self.each} x {machine}" if self.each > 1 else machine
        return f"{self.nodes} machines of {inside}" if self.nodes > 1 else inside


ONE_RANK = Ranks()


def ranks_of(ranks: int | None, nodes: int | None) -> Ranks:
    """What was asked for; machines alone have a rank each. Raises UsageError."""
    machines = nodes or 1
    several = Ranks(ranks or machines, machines)
    if not several.ranks <= MOST_RANKS:
        raise UsageError(f"--ranks {several.ranks}: at most {MOST_RANKS}")
    if several.ranks % machines:
        raise UsageError(
            f"--ranks {several.ranks}: {machines} machines cannot have as many each; take a multiple of {machines}"
        )
    return several


def networks_of(names: Sequence[str], several: Ranks, gpu: str) -> list[Interconnect]:
    """What ranks exchange over: between machines if there are several, and between the ranks of one if it has several.
    `gpu`: what each rank has, by the catalogue's name; empty without GPUs.

    Raises UsageError for names that the catalogue lacks, or that say of what there is none.
    """
    within = OVER_LINK if gpu else OVER_DRAM
    by_place: dict[str, Interconnect] = {}
    for name in names:
        if name.lower() == within:
            continue  # it is what there is where nothing else is said
        network = find(f"network (or {within})", name, NETWORKS)
        if network.between in by_place:
            raise UsageError(
                f"--network {name}: {by_place[network.between].name} is between {network.between} already; name one"
            )
        by_place[network.between] = network
    if several.ranks == 1 and names:
        raise UsageError(
            f"--network {names[0]}: one rank exchanges nothing; say --ranks or --nodes too, or leave it out"
        )
    if "machines" in by_place and several.nodes == 1:
        raise UsageError(f"--network {by_place['machines'].name}: it is between machines; say --nodes too")
    if "machines" not in by_place and several.nodes > 1:
        between = ", ".join(network.name for network in NETWORKS if network.between == "machines")
        raise UsageError(f"--nodes {several.nodes}: name what is between them with --network ({between})")
    if "GPUs" in by_place and (several.each == 1 or not gpu):
        raise UsageError(f"--network {by_place['GPUs'].name}: it is between GPUs of one machine, which has not several")
    if "GPUs" in by_place and gpu not in by_place["GPUs"].gpus:
        raise UsageError(_not_joined(by_place["GPUs"], gpu))
    return list(by_place.values())


def _not_joined(network: Interconnect, gpu: str) -> str:
    """Why GPUs cannot exchange over an NVLink of others, and what they can."""
    own = [each.name for each in NETWORKS if gpu in each.gpus]
    there = f"name {' or '.join(own)}, or leave it out" if own else "leave it out"
    return (
        f"--network {network.name}: it joins {', '.join(network.gpus)}, and {gpu} has no such NVLink; {there} "
        "(--figure ranks.bandwidth says what its GPUs reach)"
    )


def network_figures(
    networks: Sequence[Interconnect], several: Ranks, link: tuple[Figure, Figure] | None
) -> dict[str, Figure]:
    """The figures of what ranks exchange over, by the names under which they can be given; none of one rank. `link`:
    what copies reach each way between host and GPU; without GPUs None."""
    found: dict[str, Figure] = {}
    if several.each > 1:
        inside = next((network for network in networks if network.between == "GPUs"), None)
        found |= {
            "ranks.bandwidth": inside.bandwidth if inside else _over_host(link),
            "ranks.latency": inside.latency if inside else LATENCY_OF_LINK if link else LATENCY_OF_DRAM,
        }
    if several.nodes > 1:
        between = next(network for network in networks if network.between == "machines")
        found |= {"network.bandwidth": between.bandwidth, "network.latency": between.latency}
    return found


def _over_host(link: tuple[Figure, Figure] | None) -> Figure:
    if link is None:
        return DRAM_BANDWIDTH
    slower = min(link, key=lambda way: way.value)
    share = LINK_SHARE.value
    return Figure(
        share * slower.value, "bytes/s", f"{share:g} of the slower way of the link: {LINK_SHARE.source}", True
    )


def network(figures: Mapping[str, Figure], several: Ranks, memory_bandwidth: float) -> Network | None:
    """What ranks exchange, as a profile has it; None for one. `memory_bandwidth`: of what adds gradients up, bytes/s.

    Parameters go round in a ring, so a machine's adapter carries each byte once, however many of its ranks want it.
    Gradients go from each rank to each, so an adapter carries what all its ranks get from other machines.
    """
    if several.ranks == 1:
        return None
    gather, exchange, latency = [], [], 0.0
    if several.each > 1:
        gather.append(figures["ranks.bandwidth"].value)
        exchange.append(figures["ranks.bandwidth"].value)
        latency += figures["ranks.latency"].value
    if several.nodes > 1:
        others, outside = several.ranks - 1, several.each * (several.ranks - several.each)
        gather.append(figures["network.bandwidth"].value)
        exchange.append(figures["network.bandwidth"].value * others / outside)
        latency += figures["network.latency"].value
    return Network(
        ranks=several.ranks,
        gather_bandwidth=min(gather),
        exchange_bandwidth=min(exchange),
        latency_seconds=latency,
        add_rate=memory_bandwidth / (1 + 1 / several.ranks),
    )
