"""The one door to a schedule: a decision in, buffers with places and graphs with waits out.

Owns the table of orders, and who does what: `homes.py` says where states live, an `Order` emits the operations,
`graph/allocation.py` gives their buffers places, `graph/waits.py` says what each operation waits for. Decides nothing.
"""

from ..documents.plan import Decision, ScheduleName
from ..documents.profile import Model
from ..gc_pause import no_collection
from ..graph.allocation import GRACE, assign
from ..graph.ops import Graph, GraphName, Op, Schedule
from ..graph.waits import with_waits
from .emission import Emission, When
from .homes import Buffers, make_homes
from .horizontal import HORIZONTAL
from .order import Order
from .shards import Shards
from .vertical import VERTICAL
from .zeroth_order import ZEROTH_ORDER

ORDERS: dict[ScheduleName, Order] = {
    "vertical": VERTICAL,
    "horizontal": HORIZONTAL,
    "zeroth-order": ZEROTH_ORDER,
}
"""Every order of operations, by the name that a plan has for it."""

_STEPS: dict[GraphName, tuple[When, ...]] = {
    "first": (When.ALWAYS, When.NOT_PENDING, When.WRITTEN),
    "steady": (When.ALWAYS, When.PENDING, When.WRITTEN),
    "unwritten": (When.ALWAYS, When.PENDING, When.UNWRITTEN),
    "flush": (When.PENDING,),
    "evaluate": (When.ALWAYS,),
}


@no_collection()
def build_schedule(model: Model, decision: Decision, rank: int = 0) -> Schedule:
    """Expand a decision into buffers with places and graphs with waits, for one rank of those that train together.
    Depends on nothing else."""
    buffers, shards = Buffers(), Shards(decision.shares, rank if decision.shares > 1 else 0)
    homes = make_homes(model, decision, buffers, shards)
    order = ORDERS[decision.schedule]
    training = Emission(model, decision, homes, buffers, shards)
    evaluation = Emission(model, decision, homes, buffers, shards, prefix="evaluate/")
    order.train(training)
    order.evaluate(evaluation)
    flush = Emission(model, decision, homes, buffers, shards, prefix="flush/") if order.flush else training
    if order.flush:
        order.flush(flush)
    programs: dict[GraphName, Emission] = {
        "first": training,
        "steady": training,
        "unwritten": training,
        "flush": flush,
        "evaluate": evaluation,
    }
    distinct = {id(program): program for program in programs.values()}
    grace = GRACE if decision.overlap == "all" else 0
    placed, arenas = assign(buffers.all, [program.ops for program in distinct.values()], grace_on_device=grace)

    def emitted(name: GraphName) -> list[Op]:
        program = programs[name]
        wanted = _STEPS["steady"] if name == "flush" and order.flush else _STEPS[name]
        return [op for op, when in zip(program.ops, program.whens, strict=True) if when in wanted]

    @no_collection()
    def make_graph(name: GraphName) -> Graph:
        return Graph(name, with_waits(emitted(name), placed), programs[name].stages)

    return Schedule(placed, arenas, homes, make_graph, emitted)
