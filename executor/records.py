"""Records: a schedule's ssd arena as the records of a tensor store.

Owns which states a crash must not lose (the optimizer states, from which everything else follows) and where reads and
writes begin and end, which is where the store may cut.
"""

from ssdplan.plans.schedule import Graph, Schedule

from .store import Record


def make_records(schedule: Schedule) -> list[Record]:
    """One record for each of the schedule's buffers on ssd."""
    cuts: dict[int, set[int]] = {buffer.index: set() for buffer in schedule.buffers if buffer.tier == "ssd"}
    for home in schedule.homes:
        for region in (home.optimizer, home.parameters, home.gradient):
            if region is not None and region.buffer in cuts:
                cuts[region.buffer] |= {region.start, region.stop}
    graphs: tuple[Graph, ...] = (schedule.first, schedule.steady, schedule.flush, schedule.evaluate)
    for graph in graphs:
        for op in graph.ops:
            for region in (*op.reads, *op.writes):
                if region.buffer in cuts:
                    cuts[region.buffer] |= {region.start, region.stop}
    return [
        Record(buffer.name, buffer.offset, buffer.nbytes, buffer.role == "optimizer", tuple(cuts[buffer.index]))
        for buffer in schedule.buffers
        if buffer.tier == "ssd"
    ]
