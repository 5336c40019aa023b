"""Decisions with any fractions, for tests of the schedule."""

from collections.abc import Sequence

from ssdplan.plans.documents.overlap import Overlap
from ssdplan.plans.documents.plan import Decision, Placement, Saved, ScheduleName
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import Masters, OptimizerStates
from ssdplan.plans.documents.zeroth_order import ZerothOrder


def decide(
    model: Model,
    *,
    alpha: float = 0.0,
    optimizer: float = 0.0,
    parameters: float = 0.0,
    checkpoints: float = 0.0,
    gradient: float = 1.0,
    micro_batches: int = 2,
    micro_batch_size: int = 1,
    chunk: int = 1 << 14,
    lookahead: int = 2,
    on_device: float = 0.0,
    across_turn: float = 0.0,
    updated: float = 0.0,
    inputs: float = 0.0,
    schedule: ScheduleName = "vertical",
    optimizer_states: OptimizerStates = "fp32",
    masters: Masters = "fp32",
    clip_grad_norm: float | None = None,
    unified: bool = False,
    saved: Sequence[Saved] = (),
    zeroth_order: ZerothOrder | None = None,
    ranks: int = 1,
    behind: bool = False,
    overlap: Overlap = "all",
) -> Decision:
    """The same fractions on host for every class, prompt and delayed part alike; of frozen ones, of parameters alone.

    `on_device`: of each class's states, those kept on the device for the whole run; `across_turn`: of the blocks'
    states, those kept there from forward to backward; `updated`: of each class's states, those that the device updates;
    `inputs`: of the blocks, those whose activation checkpoints it keeps.
    `unified`: compute works on host memory, where parameters are
    whole or not at all: `parameters` is for separate memory only. `saved`: of the activations of all blocks.
    `zeroth_order`: a schedule without gradients; a table that comes by rows lives on host whole. `behind`: ranks
    exchange gradients beside the next backward.
    """
    assert not (unified and parameters)
    prompt = 1.0 - alpha
    turning = range(max(model.first_trained, 1), len(model.layers) - 1)
    without_turn = {
        state.state_class for index, state in enumerate(model.states) if not set(model.uses(index)) <= set(turning)
    }
    placement = Placement(
        optimizer_prompt_host=prompt * optimizer,
        optimizer_prompt_ssd=prompt * (1 - optimizer),
        optimizer_delayed_host=alpha * optimizer,
        optimizer_delayed_ssd=alpha * (1 - optimizer),
        parameters_prompt_host=prompt * parameters,
        parameters_prompt_ssd=prompt * (1 - parameters),
        parameters_delayed_host=alpha * parameters,
        parameters_delayed_ssd=alpha * (1 - parameters),
        delayed_gradient_host=alpha * gradient,
        delayed_gradient_ssd=alpha * (1 - gradient),
        parameters_device=on_device,
        optimizer_device=updated,
    )
    frozen = Placement(
        **dict.fromkeys(Placement.model_fields, 0.0)
        | {
            "parameters_prompt_host": parameters,
            "parameters_prompt_ssd": 1 - parameters,
            "parameters_device": on_device,
        }
    )
    if zeroth_order:
        schedule, placement = "zeroth-order", frozen
    own = {}
    if zeroth_order and zeroth_order.by_rows:
        assert model.table is not None
        whole = {"parameters_prompt_host": 1.0, "parameters_prompt_ssd": 0.0, "parameters_device": 0.0}
        own = {model.states[model.table].state_class: frozen.model_copy(update=whole)}
    return Decision(
        schedule=schedule,
        optimizer="mezo" if zeroth_order else "muon" if model.muon else "adamw",
        zeroth_order=zeroth_order,
        optimizer_states=optimizer_states,
        masters=masters,
        clip_grad_norm=clip_grad_norm,
        precision=model.precision,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        sequence_length=model.sequence_length,
        delay_ratio=alpha,
        placement={
            state.state_class: (frozen if state.frozen else placement).model_copy(
                update={"parameters_turn": 0.0 if state.state_class in without_turn else across_turn}
            )
            for state in model.states
        }
        | own,
        checkpoint_device=inputs,
        checkpoint_host=checkpoints,
        recompute="part" if saved else "all",
        saved={"block": tuple(saved)} if saved else {},
        update_chunk_elements=chunk,
        update_lookahead=lookahead,
        ranks=ranks,
        exchange_behind=behind,
        overlap=overlap,
        host_budget_bytes=1 << 40,
        device_budget_bytes=1 << 40,
        unified_memory=unified,
    )
