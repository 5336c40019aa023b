"""A block as explicit graphs: its forward, and a backward that rebuilds what the forward did not keep.

Owns how a block is traced and cut. `trace` runs a block once without memory and has everything that its forward and its
backward compute as one graph of ATen operations, in the order in which autograd runs them, so that running the graph
gives autograd's bits. `Traced.cheapest` finds which values to keep at a given price of bytes, and `Traced.cut` makes
the two graphs of any choice. No name of a module is looked at (PyAO section 5 lists modules; here the graph is the
layer's own). Nothing here knows where kept values lie.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
import torch.fx.traceback
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .packed import FORMATS, pack, unpack
from .values import Value, draws, is_free, is_view, value_of

Take = Callable[[int, torch.Tensor], None]
Block = Callable[..., torch.Tensor]
"""A block's call on its hidden state, then on everything else that it takes: arguments and parameters."""
LEAST_PACKED = 16
"""A value of at most this share of the hidden state's elements is not kept in int8."""


@dataclass(frozen=True)
class Cut:
    """A block's two graphs for one choice of what is kept."""

    kept: tuple[Value, ...]
    keeps_hidden: bool
    """Whether backward takes the block's input."""
    forward: fx.GraphModule
    """(hidden, *others, *places) -> output. What is kept goes to `places`, tensors as `Value.laid` makes them, as soon
    as it is computed. The output is the same whatever is kept, and in whatever format."""
    backward: fx.GraphModule
    """(*kept, hidden if it is kept, *others, gradient of the output, take) -> gradient of hidden, or None where none is
    wanted. `take(number, gradient)` is called with the gradient of each of `others` that has one, as soon as it is
    computed."""
    rebuilt: tuple[str, ...]
    """The operations of the forward that backward runs again."""


@dataclass(frozen=True)
class SubLayer:
    """A leaf module, or a stretch of functional code between two of them: consecutive operations of a forward (PyAO
    section 3)."""

    name: str
    """The module's, within the block; of a stretch, of what is before it."""
    operations: tuple[str, ...]
    saved: tuple[str, ...]
    """What autograd would keep of what is computed here, by name."""
    saved_bytes: int


class UntraceableError(Exception):
    """A block's code that no graph can stand for."""


class Traced:
    """One block with inputs of one shape and kind."""

    def __init__(self, joint: fx.GraphModule, inputs: int) -> None:
        """`joint`: (hidden, *others, gradient of the output) -> [output, *gradients]. `inputs` counts all but the last
        of what it takes."""
        self._joint = joint
        nodes = list(joint.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        assert len(placeholders) == inputs + 1
        self._hidden, self._others, self._tangent = placeholders[0], placeholders[1:-1], placeholders[-1]
        [results] = next(node for node in nodes if node.op == "output").args
        self._output, *self._gradients = results
        assert len(self._gradients) == inputs
        self._forwards = _ancestors([self._output])
        self._backward = _descendants(nodes, self._tangent)
        for node in nodes:  # an operation's other results, as the mask of a dropout, are there when its first one is
            if is_free(node) and all(each in self._forwards for each in node.all_input_nodes):
                self._forwards.add(node)
        needed = {each for node in self._backward for each in node.all_input_nodes if each not in self._backward}
        needed |= {each for each in self._gradients if isinstance(each, fx.Node) and each not in self._backward}
        self._needed = needed - set(placeholders)
        self._needs_hidden = self._hidden in needed

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """What may be kept, in the order in which the forward computes it."""
        return tuple(
            value
            for node in self._joint.graph.nodes
            if node in self._forwards and (value := value_of(node)) is not None
        )

    @cached_property
    def saved(self) -> frozenset[str]:
        """What autograd would keep: every value that the backward takes, each once, however it looks at it."""
        keepable = {value.name for value in self.values}
        found: set[str] = set()
        waiting = list(self._needed)
        while waiting:
            node = waiting.pop()
            if node.name in keepable:
                found.add(node.name)
            elif node.op != "placeholder":
                waiting += node.all_input_nodes
        return frozenset(found)

    @cached_property
    def forward(self) -> fx.GraphModule:
        """(hidden, *others) -> output, nothing kept."""
        return self._forward_graph({})

    def can_be_kept(self, kept: Iterable[str]) -> bool:
        """Whether all else can be computed again: not what is drawn at random."""
        nodes = {node.name: node for node in self._joint.graph.nodes}
        try:
            self._rebuilt({nodes[name] for name in kept})
        except ValueError:
            return False
        return True

    @cached_property
    def sublayers(self) -> tuple[SubLayer, ...]:
        """The forward's, in order. All is one of them where it was traced without the block's modules."""
        sizes = {value.name: value.nbytes for value in self.values}
        runs: list[tuple[str | None, list[fx.Node]]] = []
        for node in self._joint.graph.nodes:
            if node in self._forwards and node.op == "call_function":
                label = (node.meta.get("custom") or {}).get(_LABEL)
                if not runs or runs[-1][0] != label:
                    runs.append((label, []))
                runs[-1][1].append(node)
        made = []
        before = "the block begins"
        for label, nodes in runs:
            saved = tuple(node.name for node in nodes if node.name in self.saved)
            name = label or f"after {before}"
            operations = tuple(node.name for node in nodes if not is_free(node))
            if operations:
                made.append(SubLayer(name, operations, saved, sum(sizes[each] for each in saved)))
            before = label or before
        return tuple(made)

    def cheapest(self, seconds: Mapping[str, float], price: float) -> frozenset[str] | None:
        """The values to keep so that the seconds of what is computed again, and `price` seconds for each byte kept, are
        least together; None where the block's input alone is. `seconds`: of each operation of the forward, by its name.

        A minimum cut. Each value stands twice in the graph: cutting between the two keeps it, at its price; from the
        second on it is computed again, at its seconds, and needs its own inputs.
        """
        import networkx  # whoever measures asks; a run does not

        graph = networkx.DiGraph()
        keepable = {value.name: value.nbytes for value in self.values}
        hidden = self._hidden.meta["val"]
        graph.add_edge((self._hidden.name, "kept"), "end", capacity=price * hidden.numel() * hidden.element_size())
        waiting = list(self._needed)
        seen = set(waiting)
        for node in self._needed:
            graph.add_edge("begin", (node.name, "kept"))
        if self._needs_hidden:
            graph.add_edge("begin", (self._hidden.name, "kept"))
        while waiting:
            node = waiting.pop()
            before, after = (node.name, "kept"), (node.name, "again")
            if node.name in keepable:
                graph.add_edge(before, after, capacity=price * keepable[node.name])
            else:
                graph.add_edge(before, after)
            if not draws(node):
                ever = is_free(node) or node not in self._forwards  # the latter is backward's own work
                graph.add_edge(after, "end", capacity=0.0 if ever else seconds[node.name])
            else:
                graph.add_edge(after, "never")
            for each in node.all_input_nodes:
                if each is self._hidden or each.op != "placeholder":
                    graph.add_edge(after, (each.name, "kept"))
                    if each is not self._hidden and each not in seen:
                        seen.add(each)
                        waiting.append(each)
        if "never" in graph:
            graph.add_edge("never", "end")
        try:
            _, (reached, beyond) = networkx.minimum_cut(graph, "begin", "end")
        except networkx.NetworkXUnbounded as error:
            raise ValueError("something that is drawn at random can neither be kept nor drawn again") from error
        return frozenset(name for name in keepable if (name, "kept") in reached and (name, "again") in beyond)

    def packable(self, value: Value) -> bool:
        """Whether a value may be kept in int8: a hidden state or about as large. Small ones, as the statistics of norms
        and of attention, would lose much and spare little."""
        hidden: torch.Tensor = self._hidden.meta["val"]
        return value.dtype in FORMATS and value.elements * LEAST_PACKED > hidden.numel()

    def kept(self, names: Collection[str], *, packed: bool = False) -> tuple[Value, ...]:
        """The values of these names, in order; with `packed` those in int8 that may be."""
        return tuple(
            replace(value, packed=packed and self.packable(value)) for value in self.values if value.name in names
        )

    def cut(self, kept: Collection[str], *, packed: bool = False) -> Cut:
        """The graphs in which these values, by name, are kept, with `packed` in int8 where they may be, and all else
        that backward needs is computed again."""
        values = self.kept(kept, packed=packed)
        assert len(values) == len(kept), "only what the forward computes can be kept"
        nodes = {node.name: node for node in self._joint.graph.nodes}
        keep = {nodes[value.name]: value for value in values}
        again, hidden = self._rebuilt(set(keep))
        forward = self._forward_graph(keep)
        inputs = [*keep, *([self._hidden] if hidden else []), *self._others, self._tangent]
        backward = self._backward_graph(inputs, again | self._backward, keep)
        twice = again & self._forwards
        rebuilt = tuple(node.name for node in self._joint.graph.nodes if node in twice and not is_free(node))
        return Cut(values, hidden, forward, backward, rebuilt)

    def _forward_graph(self, keep: Mapping[fx.Node, Value]) -> fx.GraphModule:
        graph = _Graph(self._joint, [self._hidden, *self._others], self._forwards)
        places = {node: graph.input(f"place_of_{node.name}") for node in keep}
        for node in graph.missing([self._output, *keep]):
            graph.add(node)
            if node in places and keep[node].packed:
                graph.call(None, pack, (places[node], graph.made[node], keep[node].order))
            elif node in places:  # from here on it is what lies there, and its own memory is free
                graph.call(node, torch.ops.aten.copy_.default, (places[node], graph.made[node]))
        return graph.module(self._output)

    def _backward_graph(
        self, inputs: Sequence[fx.Node], among: set[fx.Node], kept: Mapping[fx.Node, Value]
    ) -> fx.GraphModule:
        """What is computed again as late as it can be, and each gradient taken as soon as it is there: so that as
        little as possible is there at once. What is kept in int8 stays so until its first use."""
        packed = {node: value for node, value in kept.items() if value.packed}
        graph = _Graph(self._joint, inputs, among, packed)
        take = graph.input("take")
        numbers: dict[fx.Node, list[int]] = {}
        for number, node in enumerate(self._gradients[1:]):
            if isinstance(node, fx.Node):
                numbers.setdefault(node, []).append(number)
        gradients = [node for node in self._gradients if isinstance(node, fx.Node)]
        for node in graph.missing(gradients):
            if node in self._backward or node in numbers:
                for each in graph.missing([node]):
                    graph.add(each)
            for number in numbers.pop(node, ()):
                graph.call(None, _hand_over, (take, number, graph.made[node]))
        for node, others in numbers.items():  # what is there from the beginning
            for number in others:
                graph.call(None, _hand_over, (take, number, graph.made[node]))
        return graph.module(self._gradients[0])

    def _rebuilt(self, kept: set[fx.Node]) -> tuple[set[fx.Node], bool]:
        """What backward computes again, and whether it takes the block's input for that."""
        waiting = [node for node in self._needed if node not in kept]
        again: set[fx.Node] = set()
        hidden = self._needs_hidden
        while waiting:
            node = waiting.pop()
            if node in again:
                continue
            if draws(node):
                raise ValueError(f"{node.name} is drawn at random, and would not be drawn again alike")
            again.add(node)
            for each in node.all_input_nodes:
                hidden = hidden or each is self._hidden
                if each.op != "placeholder" and each not in kept:
                    waiting.append(each)
        return again, hidden


def trace(block: Block, hidden: torch.Tensor, others: Sequence[torch.Tensor]) -> Traced:
    """Trace `block(hidden, *others)` for tensors like these. Gradients are those of the tensors that require one.

    Nothing is computed and no memory taken: the tensors of a tracing are fakes. It is PyTorch's own tracer below
    AOTAutograd, without the rest of the compiler, whose import alone takes 90 MB. Raises UntraceableError where the
    code looks at values, calls what is no operation of torch's, or writes into a tensor that somebody else sees.
    """
    fake = FakeTensorMode()
    given = [fake.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in (hidden, *others)]

    def joint(*inputs: torch.Tensor) -> list[torch.Tensor | None]:
        *values, tangent = inputs
        output = block(*values)
        wanted = [value for value in values if value.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, tangent, allow_unused=True))
        return [output, *(next(found) if value.requires_grad else None for value in values)]

    with torch.enable_grad(), fake, _untold():
        gradient = torch.empty_strided(hidden.shape, hidden.stride(), dtype=hidden.dtype, device=hidden.device)
        try:
            graph = make_fx(joint)(*given, gradient)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
            raise UntraceableError(f"{type(error).__name__}: {error}") from error
    _write_nowhere(graph)
    return Traced(graph, len(given))


@contextmanager
def _untold() -> Iterator[None]:
    """Leaves out what torch logs where an operation knows no fakes (grouped products in fp32): the error tells it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _write_nowhere(graph: fx.GraphModule) -> None:
    """Make every operation that writes into a tensor one that makes a new tensor, as what comes after it uses already.

    Raises UntraceableError where somebody else sees the tensor that is written into: through a view, or after it.
    """
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    for node in list(graph.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        chain = [node.args[0]]  # what is written into, and what it is a view of
        while is_view(chain[-1]):
            chain.append(chain[-1].args[0])
        own = chain[-1].op == "call_function"
        seen = any(
            user is not node and user not in chain and (order[user] > order[node] or is_view(user))
            for each in chain
            for user in each.users
        )
        packet = getattr(torch.ops.aten, node.target._schema.name.partition("::")[2].removesuffix("_"), None)
        overload = _FUNCTIONAL.get(node.target._overloadname, node.target._overloadname)
        if not own or seen or packet is None or overload not in packet.overloads():
            raise UntraceableError(f"{node.name} writes into a tensor that others see")
        node.target = getattr(packet, overload)
    graph.recompile()


_FUNCTIONAL = {"float": "p"}
"""Overloads that have another name where they make a new tensor: of bernoulli_."""


@contextmanager
def labelled(block: nn.Module) -> Iterator[None]:
    """Within the context every operation that is traced knows the leaf module that it is of."""
    contexts: list[AbstractContextManager[Any]] = []

    def enter(name: str) -> None:
        contexts.append(fx.traceback.annotate({_LABEL: name}))
        contexts[-1].__enter__()

    def leave() -> None:
        contexts.pop().__exit__(None, None, None)

    handles = []
    for name, module in block.named_modules():
        if name and not list(module.children()):
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            handles.append(module.register_forward_hook(lambda *_: leave(), always_call=True))
    try:
        with fx.traceback.preserve_node_meta():
            yield
    finally:
        for handle in handles:
            handle.remove()


_LABEL = "ssdplan"


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _descendants(nodes: Iterable[fx.Node], of: fx.Node) -> set[fx.Node]:
    found = {of}
    for node in nodes:
        if node.op == "call_function" and any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


class _Graph:
    """A graph of some operations of another while it is made."""

    def __init__(
        self,
        joint: fx.GraphModule,
        inputs: Sequence[fx.Node],
        among: set[fx.Node],
        packed: Mapping[fx.Node, Value] = MappingProxyType({}),
    ) -> None:
        """`among`: the operations that it may have; `packed`: those of `inputs` that come in int8."""
        self._joint, self._among, self._packed = joint, among, dict(packed)
        self._order = {node: number for number, node in enumerate(joint.graph.nodes)}
        self._graph = fx.Graph()
        self.made = {node: self._graph.placeholder(node.name) for node in inputs}
        """The other graph's nodes -> where this one has their results."""

    def input(self, name: str) -> fx.Node:
        return self._graph.placeholder(name)

    def missing(self, outputs: Iterable[fx.Node]) -> list[fx.Node]:
        """What is still to be added before the outputs are there, themselves included, in order."""
        waiting = list(outputs)
        wanted: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in self.made and node not in wanted:
                assert node in self._among, f"{node.name} is not there"
                wanted.add(node)
                waiting += node.all_input_nodes
        return sorted(wanted, key=self._order.__getitem__)

    def add(self, node: fx.Node) -> None:
        for each in node.all_input_nodes:
            if value := self._packed.pop(each, None):
                self.call(each, unpack, (self.made[each], value.shape, value.order, value.dtype))
        self.made[node] = self._graph.node_copy(node, self.made.__getitem__)

    def call(self, node: fx.Node | None, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Add a call, whose result takes the place of that of `node`."""
        made = self._graph.call_function(function, arguments)
        if node is not None:
            self.made[node] = made

    def module(self, output: fx.Node | None) -> fx.GraphModule:
        self._graph.output(None if output is None else self.made[output])
        return fx.GraphModule(self._joint, self._graph)


def _hand_over(take: Take, number: int, gradient: torch.Tensor) -> None:
    take(number, gradient)
