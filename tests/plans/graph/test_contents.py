"""What buffers hold and transfers move: closed lists, with all that is asked of a member; and operations by keyword."""

import ast
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdplan.plans.analysis.work import ROLE_COLOURS, WORK_COLOURS
from ssdplan.plans.documents.plan import ScheduleName
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.graph.contents import CONTENTS, ROLES, Content, Role, title_of
from ssdplan.plans.graph.ops import Backward, Forward, Op, Schedule, Transfer, Update
from ssdplan.plans.schedule.build import ORDERS, build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model

ROOT = Path(__file__).parents[3]
OF_LAYERS = {
    Content.HIDDEN_STATE,
    Content.ACTIVATION_CHECKPOINT,
    Content.ACTIVATION_GRADIENT,
    Content.SAVED_ACTIVATIONS,
}
HELD = {
    Content.PARAMETERS: {Role.PARAMETERS, Role.OWN_MASTERS, Role.PARAMETERS_IN_TRANSIT},
    Content.OPTIMIZER_STATES: {Role.OPTIMIZER, Role.OPTIMIZER_IN_TRANSIT},
    Content.GRADIENT: {Role.GRADIENTS, Role.ACCUMULATED_GRADIENTS},
    Content.DELAYED_GRADIENT: {Role.GRADIENTS, Role.DELAYED_GRADIENT},
    Content.HIDDEN_STATE: {Role.HIDDEN_STATES, Role.CHECKPOINTS},
    Content.ACTIVATION_CHECKPOINT: {Role.HIDDEN_STATES, Role.CHECKPOINTS},
    Content.ACTIVATION_GRADIENT: {Role.HIDDEN_STATES},
    Content.SAVED_ACTIVATIONS: {Role.SAVED_ACTIVATIONS},
}
"""The roles of the two buffers between which a transfer of each content moves."""


def test_an_unknown_role_or_content_cannot_be_made() -> None:
    for kind in (Role, Content):
        with pytest.raises(ValueError, match="is not a valid"):
            kind("swap")


def test_all_that_is_asked_of_a_role_or_a_content_is_there() -> None:
    assert set(ROLES) == set(Role) == set(ROLE_COLOURS)
    assert set(CONTENTS) == set(Content) == set(HELD)
    assert {facts.work for facts in CONTENTS.values()} <= set(WORK_COLOURS)
    assert {role for role in Role if ROLES[role].durable} == {Role.OPTIMIZER, Role.OWN_MASTERS}


def test_every_order_has_a_name_that_a_plan_may_have() -> None:
    assert set(ORDERS) == set(get_args(ScheduleName))


def test_what_people_call_a_transfer() -> None:
    assert {content: title_of(content, "" if content in OF_LAYERS else "h.3") for content in Content} == {
        Content.PARAMETERS: "h.3",
        Content.OPTIMIZER_STATES: "optimizer states of h.3",
        Content.GRADIENT: "gradient of h.3",
        Content.DELAYED_GRADIENT: "gradient of h.3",
        Content.HIDDEN_STATE: "hidden state",
        Content.ACTIVATION_CHECKPOINT: "checkpoint",
        Content.ACTIVATION_GRADIENT: "inter-layer gradient",
        Content.SAVED_ACTIVATIONS: "saved activations",
    }


fractions = st.sampled_from([0.0, 0.37, 1.0])


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(
    blocks=st.integers(1, 4),
    tied=st.booleans(),
    schedule=st.sampled_from(get_args(ScheduleName)),
    unified=st.booleans(),
    alpha=fractions,
    optimizer=fractions,
    parameters=fractions,
    checkpoints=fractions,
    gradient=fractions,
    n=st.integers(1, 3),
)
def test_a_transfer_says_of_what_it_is(
    blocks: int,
    tied: bool,
    schedule: ScheduleName,
    unified: bool,
    alpha: float,
    optimizer: float,
    parameters: float,
    checkpoints: float,
    gradient: float,
    n: int,
) -> None:
    model = made_model(blocks=blocks, tied=tied)
    built = build_schedule(
        model,
        decide(
            model,
            schedule=schedule,
            unified=unified,
            alpha=alpha if schedule == "vertical" else 0.0,
            zeroth_order=ZerothOrder(directions=2, written_every=2) if schedule == "zeroth-order" else None,
            optimizer=optimizer,
            parameters=0.0 if unified else parameters,
            checkpoints=checkpoints,
            gradient=gradient,
            micro_batches=n,
        ),
    )
    for graph in (built.first, built.steady, built.flush, built.evaluate):
        for op in graph.ops:
            if isinstance(op, Transfer):
                assert roles_of(built, op) <= HELD[op.content], op
                if op.content in OF_LAYERS:
                    assert (op.state, op.state_name) == (None, "") and not op.final_gradient
                    assert op.layer in range(1, len(model.layers)) and op.micro_batch in range(
                        4 * n if schedule == "zeroth-order" else n
                    )
                else:
                    assert (op.layer, op.micro_batch) == (None, None)
                    assert op.state is not None and model.states[op.state].name == op.state_name
    assert_inputs_are_of_the_layer_that_takes_them(built)


def roles_of(schedule: Schedule, op: Transfer) -> set[Role]:
    return {schedule.buffers[region.buffer].role for region in (op.source, op.target)}


def assert_inputs_are_of_the_layer_that_takes_them(schedule: Schedule) -> None:
    """What a compute op reads, and what leaves it, is of its own layer and micro-batch by the transfer's own word."""
    for graph in (schedule.steady, schedule.evaluate):
        brought = {}
        for op in graph.ops:
            if isinstance(op, Transfer) and op.kind == "h2d" and op.layer is not None:
                brought[op.target.buffer] = (op.content, op.layer, op.micro_batch)
            elif isinstance(op, Forward | Backward):
                if op.hidden and op.hidden.buffer in brought:
                    content, *whose = brought[op.hidden.buffer]
                    of_forward = isinstance(op, Forward) or op.layer == layers_of(schedule) - 1
                    assert content == (Content.HIDDEN_STATE if of_forward else Content.ACTIVATION_CHECKPOINT), op
                    assert whose == [op.layer, op.micro_batch], op
                if isinstance(op, Backward) and op.out_gradient and op.out_gradient.buffer in brought:
                    assert brought[op.out_gradient.buffer] == (
                        Content.ACTIVATION_GRADIENT,
                        op.layer + 1,
                        op.micro_batch,
                    )


def layers_of(schedule: Schedule) -> int:
    return 1 + max(op.layer for op in schedule.evaluate.ops if isinstance(op, Forward))


def test_operations_are_made_by_keyword() -> None:
    """Type checkers refuse positions (`schedule.operation`), but the tests are not checked for types."""
    kinds = {kind.__name__ for kind in (Op, Transfer, Forward, Backward, Update)}
    found = 0
    for folder in ("plans", "planner", "executor", "profiler", "commands", "benchmarks", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            if not any(f"{kind}(" in text for kind in kinds):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                    found += 1
                    assert not node.args, f"{file}, line {node.lineno}: an operation that is made by position"
    assert found >= 8
