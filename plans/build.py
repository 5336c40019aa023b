"""The one door to a schedule: a decision in, buffers with places and graphs with waits out.

Owns who does what: `homes.py` where states live, `vertical.py` the order of operations, `memory.py` their buffers'
places, `waits.py` what they wait for. Decides nothing.
"""

from . import vertical
from .emission import Emission, When
from .homes import Buffers, make_homes
from .memory import assign
from .plan import Decision
from .profile import Model
from .schedule import Graph, GraphName, Op, Schedule
from .waits import with_waits

_STEPS: dict[GraphName, tuple[When, ...]] = {
    "first": (When.ALWAYS, When.NOT_PENDING),
    "steady": (When.ALWAYS, When.PENDING),
    "flush": (When.PENDING,),
    "evaluate": (When.ALWAYS,),
}


def build_schedule(model: Model, decision: Decision) -> Schedule:
    """Expand a decision into buffers with places and graphs with waits. Depends on nothing else."""
    assert decision.schedule == "vertical", "a decision that this version cannot expand"
    buffers = Buffers()
    homes = make_homes(model, decision, buffers)
    training = Emission(model, decision, homes, buffers)
    evaluation = Emission(model, decision, homes, buffers, prefix="evaluate/")
    stages = {id(training): vertical.train(training), id(evaluation): vertical.evaluate(evaluation)}
    steps = [[entry.op for entry in program.emitted] for program in (training, evaluation)]
    placed, arenas = assign(buffers.all, steps)

    def emitted(name: GraphName) -> list[Op]:
        program = evaluation if name == "evaluate" else training
        return [entry.op for entry in program.emitted if entry.when in _STEPS[name]]

    def make_graph(name: GraphName) -> Graph:
        program = evaluation if name == "evaluate" else training
        return Graph(name, with_waits(emitted(name), placed), stages[id(program)])

    return Schedule(placed, arenas, homes, make_graph, emitted)
