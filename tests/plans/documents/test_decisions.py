"""A decision that contradicts itself is refused when it is opened, and the message names field, value and way out."""

import pytest
from pydantic import ValidationError

from ssdplan.plans.documents.plan import MAX_VISITS, Decision, Placement, Plan, Prediction
from ssdplan.plans.documents.profile import Model
from tests.made.decisions import decide
from tests.made.profiles import made_machine, made_model


def edited(decision: Decision, state_class: str = "block", **fields: float) -> dict:
    """The document of `decision` with fields of itself, or of one class's placement, changed."""
    raw = decision.model_dump()
    for name, value in fields.items():
        (raw["placement"][state_class] if name in Placement.model_fields else raw)[name] = value
    return raw


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parameters_device": 0.7, "parameters_turn": 0.4}, "block.parameters_device and parameters_turn sum to 1.1"),
        ({"schedule": "horizontal", "parameters_turn": 0.5}, "parameters_turn = 0.5: the horizontal schedule keeps"),
        ({"parameters_device": 1.5}, "less than or equal to 1"),
    ],
)
def test_what_a_decision_refuses(fields, message):
    with pytest.raises(ValidationError, match=message):
        Decision.model_validate(edited(decide(made_model()), **fields))


def test_the_horizontal_schedule_has_no_delay():
    raw = edited(decide(made_model(), alpha=0.3), schedule="horizontal")
    with pytest.raises(ValidationError, match=r"delay_ratio = 0\.3: the horizontal schedule updates everything"):
        Decision.model_validate(raw)


def test_a_plan_from_before_device_residency_is_still_one():
    decision = decide(made_model())
    raw = decision.model_dump()
    for placement in raw["placement"].values():
        del placement["parameters_device"], placement["parameters_turn"]
    assert Decision.model_validate(raw) == decision


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("state_class", ["embedding", "head"])
def test_only_states_of_blocks_stay_across_the_turn(tied, state_class):
    model = made_model(tied=tied)
    decision = Decision.model_validate(edited(decide(model), state_class, parameters_turn=1.0))
    with pytest.raises(ValidationError, match=f"placement.{state_class}.parameters_turn = 1: .* not a state of blocks"):
        plan_of(model, decision)
    assert plan_of(model, Decision.model_validate(edited(decide(model), parameters_turn=1.0)))


def plan_of(model: Model, decision: Decision) -> Plan:
    return Plan(
        profile_sha256="0" * 64,
        model=model,
        machine=made_machine(),
        decision=decision,
        prediction=Prediction.model_construct(),
        alternatives=(),
        sensitivity=(),
    )


def test_a_step_too_large_to_lay_out_is_refused_when_it_is_opened():
    """What an edited plan could ask for in a line: a million micro-batches, or an update of every grain alone."""
    model = made_model(blocks=14, hidden=2048, vocab=4096)
    most = MAX_VISITS // len(model.layers)
    assert plan_of(model, decide(model, micro_batches=most))
    with pytest.raises(
        ValidationError, match=f"micro_batches = {most + 1}: {most} is the most for one step of 16 layers"
    ):
        plan_of(model, decide(model, micro_batches=most + 1))
    with pytest.raises(ValidationError, match=r"update_chunk_elements = 2048 makes [0-9]+ updates a step"):
        plan_of(model, decide(model, chunk=2048))
