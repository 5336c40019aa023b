"""Reasons: why a plan is as it is, in sentences that a person can check against its figures.

Owns the words and what they may claim. Every sentence is computed from the plan and from what the search knew; none is
written where its figures do not hold.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from ssdplan.plans.analysis.memory_usage import checkpoint_layers, device_alone_bytes
from ssdplan.plans.analysis.wear import TB, drive_words, lifetime, wear
from ssdplan.plans.documents.plan import Alternative, Compared, Plan, Reason, needs_all_gradients
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import (
    GRADIENT_BYTES,
    checkpoint_bytes,
    optimizer_bytes,
)
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.shards import Shards
from ssdplan.plans.units import format_bytes

from ..fit.fit import Fitter
from ..fit.found import Solved
from ..predict.critical_path import DRAIN, FILL, NO_WORK, SHARED_CORES, loads
from ..program.placement import ProgramResult
from ..program.program import Bound, program_bound, solve_program
from .alternatives import NO_DELAY
from .recomputation import NOTHING, SavedEvidence, gather_saved, why_it_recomputes
from .zeroth_order import how_often_it_writes, why_this_optimizer

QUICKER = 0.03
"""Of a row's compute: what the largest micro-batch gains over the one before where larger ones are worth measuring."""
MANY = 3
"""The most that a sentence lists."""
WORDS = {
    "read": "ssd reads",
    "write": "ssd writes",
    "h2d": "copies to the device",
    "d2h": "copies from the device",
    "compute": "compute",
    "cpu": "updates",
    "host buffer": "a free host buffer",
    "device buffer": "a free device buffer",
    FILL: "its first work",
    DRAIN: "the end of the step",
    NO_WORK: "any work",
}
ON_HOST_ALONE = {"d2h": "copies on host", "device buffer": WORDS["host buffer"]}
"""Other words where compute works on host memory itself."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the search knew of the chosen plan and plan.json does not hold."""

    given: frozenset[str]
    """What the user has decided: `batch`, `delay ratio`, `residency`."""
    loads: dict[str, float]
    """What could bound the step, in words -> seconds in which it works."""
    resident_bytes: int
    """What of the host arena states, checkpoints, saved activations and waiting gradients keep for the whole run."""
    free: Bound | None
    """The program with the plan's own limits and whatever delay ratio is best; None where they leave no placement."""
    prompt: ProgramResult | None
    """The same with a delay ratio of 0."""
    saved: SavedEvidence = field(default_factory=SavedEvidence)
    written_every: tuple[tuple[int, float], ...] = ()
    """Of a zeroth-order plan: steps from one write of parameters to the next -> seconds of a step."""


def gather(
    fitter: Fitter,
    solved: Solved,
    timeline: Timeline,
    given: Collection[str],
    written_every: tuple[tuple[int, float], ...] = (),
) -> Evidence:
    """The evidence on a plan: its program solved twice more, and its timeline's loads. `written_every`: what a search
    for a zeroth-order plan tried."""
    candidate, branch = solved.fitted.candidate, solved.branch
    return Evidence(
        given=frozenset(given),
        loads=loads(timeline, fitter.machine),
        resident_bytes=solved.fitted.peaks.residents,
        free=program_bound(
            fitter.model,
            fitter.machine,
            micro_batch_size=candidate.micro_batch_size,
            micro_batches=candidate.micro_batches,
            limits=branch.limits,
            fixed=branch.fixed,
        ),
        prompt=solve_program(
            fitter.model,
            fitter.machine,
            micro_batch_size=candidate.micro_batch_size,
            micro_batches=candidate.micro_batches,
            limits=branch.limits,
            fixed=replace(branch.fixed, delay_ratio=0.0),
        ),
        saved=gather_saved(solved.fitted.schedule, fitter.fixed.wear_price),
        written_every=written_every,
    )


def explain(plan: Plan, evidence: Evidence) -> tuple[Reason, ...]:
    """Why the plan is as it is: what bounds it, its batch, its delay ratio, its use of the ssd, what it recomputes,
    what would help."""
    if plan.decision.zeroth_order:
        return _of_zeroth_order(plan, evidence)
    told = (
        ("bound", _bound(plan, evidence)),
        ("batch", _batch(plan, evidence)),
        ("delay ratio", _delay_ratio(plan, evidence)),
        ("ssd", _ssd(plan, evidence)),
        ("recomputation", why_it_recomputes(plan, evidence.saved)),
        ("offloading", _offloading(plan)),
        ("to be faster", _help(plan)),
        ("wear", _wear(plan)),
    )
    return tuple(Reason(topic=topic, text=text) for topic, text in told if text)


def _of_zeroth_order(plan: Plan, evidence: Evidence) -> tuple[Reason, ...]:
    """What bounds it, its batch, how often it writes, and whether gradients would do better."""
    told = (
        ("bound", _bound(plan, evidence)),
        ("batch", _batch(plan, evidence)),
        ("writes", how_often_it_writes(plan, evidence.written_every)),
        ("first order", why_this_optimizer(plan) if plan.comparison else ""),
        ("to be faster", _help(plan)),
        ("wear", _wear(plan)),
    )
    return tuple(Reason(topic=topic, text=text) for topic, text in told if text)


def _bound(plan: Plan, evidence: Evidence) -> str:
    step = plan.prediction.explained_seconds
    zeroth_order = plan.decision.zeroth_order
    which = "A step that writes parameters" if zeroth_order and zeroth_order.written_every > 1 else "The step"
    ranked = sorted(evidence.loads.items(), key=lambda entry: -entry[1])
    (first, most), (second, less) = ranked[:2]
    next_one = f"; next comes {second} with {less / step:.0%}" if less else ", and nothing else has any work"
    text = f"{which} is bound by {first}, busy for {most / step:.0%} of it{next_one}."
    if zeroth_order and first != plan.prediction.bound_by:
        text += (
            f" One step in {zeroth_order.written_every} writes; over all, {plan.prediction.bound_by} is busy longest."
        )
    spent = {resource: sum(seconds.values()) / step for resource, seconds in plan.prediction.critical_path.items()}
    words = WORDS | (ON_HOST_ALONE if plan.decision.unified_memory else {})
    chain = [f"{share:.0%} {words.get(name, name)}" for name, share in _largest(spent)]
    if chain:
        text += f" The chain of operations that makes it so long is {_listed(chain)}."
    waits = plan.prediction.idle.get(_RESOURCE.get(first, ""), {})
    idle = {name: seconds / step for name, seconds in waits.items()}
    if first == SHARED_CORES:
        idle.pop("cpu", None)
    if sum(idle.values()) >= 0.05:
        each = [f"{share:.0%} for {words.get(name, name)}" for name, share in _largest(idle)]
        text += f" It still waits {_listed(each)}."
    return text


_RESOURCE = {
    SHARED_CORES: "compute",
    "compute": "compute",
    "link to device": "h2d",
    "link from device": "d2h",
    "cpu updates": "cpu",
}
"""What can bound a step -> the resource whose idle seconds are its own; the drive has two."""


def _batch(plan: Plan, evidence: Evidence) -> str:
    """Its throughput among those looked at. Simulated figures are compared with simulated ones, bounds with bounds."""
    size, n = plan.decision.micro_batch_size, plan.decision.micro_batches
    own = next(entry for entry in plan.alternatives if (entry.micro_batch_size, entry.micro_batches) == (size, n))
    best = max((e for e in plan.alternatives if e.simulated), key=lambda entry: entry.tokens_per_second)
    top = best.tokens_per_second
    smaller = [entry for entry in plan.alternatives if _batch_of(entry) < size * n]
    larger = [entry for entry in plan.alternatives if _batch_of(entry) > size * n]
    if "batch" in evidence.given and not (smaller or larger):
        text = f"A batch of {_rows(own)}{' a rank' if plan.decision.ranks > 1 else ''} was asked for"
        if best is not own:
            share = own.tokens_per_second / top
            text += f"; {n} x {size} reaches {share:.1%} of {best.micro_batches} x {best.micro_batch_size}"
    elif own.tokens_per_second >= top:
        text = f"A batch of {_rows(own)} ({n} x {size}) is the fastest that was simulated"
    else:
        share = own.tokens_per_second / top
        text = (
            f"A batch of {_rows(own)} ({n} x {size}) reaches {share:.1%} of what {_rows(best)} do, the best simulated"
        )
    tried = [entry for entry in smaller if entry.simulated]
    if tried:
        nearest = max(tried, key=lambda entry: entry.tokens_per_second)
        text += f"; of smaller ones that of {_rows(nearest)} comes nearest, with {nearest.tokens_per_second / top:.1%}"
    elif smaller:
        nearest = min(smaller, key=_seconds_a_row)
        fastest = min(plan.alternatives, key=_seconds_a_row)
        share = _seconds_a_row(fastest) / _seconds_a_row(nearest)
        text += f"; by the program alone smaller ones reach about {share:.1%} of the best, without fill and drain"
    compute, rest = own.compute_tokens_per_second, own.io_tokens_per_second
    text += f". Compute alone would allow {_number(compute)} tokens/s here, all else {_number(rest)}."
    return text + _of_larger_micro_batches(plan)


def _of_larger_micro_batches(plan: Plan) -> str:
    """What the largest micro-batch that was measured gained over the one before, where it was taken and gained much."""
    sizes, block = sorted(plan.model.micro_batch_sizes), plan.model.layers[1].layer_class
    if plan.model.figures == "estimated" or len(sizes) < 2 or plan.decision.micro_batch_size != sizes[-1]:
        return ""
    timings = [plan.model.timing(block, size) for size in sizes[-2:]]
    seconds = [(each.forward_seconds + each.backward_seconds) / each.micro_batch_size for each in timings]
    gain = 1 - seconds[1] / seconds[0]
    words = f"in micro-batches of {sizes[-1]} than of {sizes[-2]}, and larger ones were not measured: ssdplan profile"
    told = f" A row took {gain:.0%} less compute {words} --micro-batch-sizes {sizes[-1]},{2 * sizes[-1]} tells."
    return told if gain > QUICKER else ""


def _batch_of(entry: Alternative) -> int:
    return entry.micro_batch_size * entry.micro_batches


def _seconds_a_row(entry: Alternative) -> float:
    return entry.program_seconds / _batch_of(entry)


def _rows(entry: Alternative) -> str:
    batch = _batch_of(entry)
    return f"{batch:,} row" if batch == 1 else f"{batch:,} rows"


def _delay_ratio(plan: Plan, evidence: Evidence) -> str:
    alpha, seconds = plan.decision.delay_ratio, plan.prediction.program_seconds
    if plan.decision.schedule == "horizontal":
        return "The horizontal schedule, which was asked for, runs every update in its own step."
    share = "All of each update" if alpha == 1.0 else f"{alpha:.1%} of each update"
    delays = f"{share} runs during the next step's forward"
    if reason := needs_all_gradients(plan.decision.precision, plan.decision.clip_grad_norm):
        return f"{delays}: {reason}."
    if _all_on_device(plan):
        return "No update is delayed: the device makes each where its state lies."
    if "delay ratio" in evidence.given:
        return f"The delay ratio of {alpha:g} was asked for."
    if alpha == 0:
        if evidence.free is None or evidence.free.seconds < seconds * (1 - 2 * NOTHING):
            return "The budgets leave room for no delayed updates: of what fits, the leanest placement was taken."
        return "No delayed update would make the program's step faster, so every update runs in its own step."
    rows = [row for row in plan.comparison if row.name == NO_DELAY]
    if rows:
        return f"{delays}{_beside(plan, rows[0])}."
    if evidence.prompt is None:
        return f"{delays}: without that, no placement keeps the budgets."
    longer = evidence.prompt.seconds / seconds - 1
    if longer >= NOTHING:
        return f"{delays}: without that, the program's step would take {longer:.1%} longer."
    more = evidence.prompt.ssd_write_bytes - plan.prediction.ssd_write_bytes
    if more > NOTHING * plan.prediction.ssd_write_bytes:
        return f"{delays}: without that, a program's step as fast would write {format_bytes(more)} more to the ssd."
    return f"{delays}, for next to nothing: without that, the program's step would take {max(longer, 0.0):.3%} longer."


def _beside(plan: Plan, prompt: Compared) -> str:
    """What a plan gains over the row of the comparison that delays no update, by that row's own figures."""
    if not prompt.fits or prompt.step_seconds is None or prompt.ssd_write_bytes is None:
        return ": without that, no placement was found that keeps the budgets"
    longer = prompt.step_seconds / plan.prediction.step_seconds - 1
    more = prompt.ssd_write_bytes - plan.prediction.ssd_write_bytes
    writes = (
        f"and write {format_bytes(more)} more to the ssd" if more > NOTHING * plan.prediction.ssd_write_bytes else ""
    )
    if longer >= NOTHING:
        return f": without that, a step would take {longer:.2%} longer {writes}".rstrip()
    if writes:
        return f": without that, a step would take {_no_longer(longer)} {writes}"
    return f", for next to nothing: without that, a step would take {_no_longer(longer)}".rstrip(",")


def _no_longer(longer: float) -> str:
    return "as long" if longer > -NOTHING else f"{-longer:.2%} less, by an estimate that is good to a few percent,"


def _ssd(plan: Plan, evidence: Evidence) -> str:
    decision, p = plan.decision, plan.prediction
    states, checkpoints = _state_bytes(plan), _checkpoint_bytes(plan)
    budget, buffers = decision.host_budget_bytes, p.host_arena_bytes - evidence.resident_bytes
    gradients, gradient_host = _delayed_gradients(plan)
    saved_host, saved = evidence.saved.bytes_on.get("host", 0), sum(evidence.saved.bytes_on.values())
    own = "a rank's share of " if decision.shares > 1 else ""
    what = _listed(
        [
            f"{format_bytes(states)} of {own}parameters and optimizer states",
            f"{format_bytes(checkpoints)} of checkpoints",
            *([f"{format_bytes(saved)} of saved activations"] if saved else []),
            *([f"{format_bytes(gradients)} of delayed gradients"] if gradients else []),
        ]
    )
    all_of_it = states + saved + max(checkpoints, gradients)  # at the least: gradients may lie where checkpoints were
    there = "" if decision.unified_memory else _on_device(plan, evidence)
    if not p.ssd_bytes:
        left = format_bytes(budget - p.peak_host_bytes)
        room = f"the host budget of {format_bytes(budget)}"
        if _all_on_device(plan):
            return f"The ssd is not used: {there} stay on the device, which updates them."
        held = f", with {there} on the device" if there else ""
        return f"The ssd is not used: {what} fit in {room}{held}, and leave {left} of it."
    asked = [words for kind, words in _ON_HOST.items() if plan.asked.residency.get(kind, 1.0) < 1.0]
    if asked:
        whole = "" if len(asked) == len(_ON_HOST) else f" of the {_listed(asked)}"
        why = f"What stays on host{whole} was asked for"
    elif all_of_it > budget:
        why = f"{what} are more than the host budget of {format_bytes(budget)}"
    elif all_of_it + buffers > budget:
        beside = f"with the {format_bytes(buffers)} of buffers that this step needs"
        why = f"{what} are, {beside}, more than the host budget of {format_bytes(budget)}"
    else:
        why = f"{what} do not all stay on host"
    kept = [
        f"{_share_of(plan, 'parameters')} of the parameters",
        f"{_share_of(plan, 'optimizer')} of the optimizer states",
        f"{_percent((1.0 - decision.checkpoint_device) * decision.checkpoint_host)} of the checkpoints",
        *([f"{_percent(saved_host / saved)} of the saved activations"] if saved else []),
        *([f"{_percent(gradient_host / gradients)} of the delayed gradients"] if gradients else []),
    ]
    text = f"{why}, so {format_bytes(p.ssd_bytes)} live on ssd. On host stay {_listed(kept)}."
    text += f" The device keeps {there}." if there else ""
    shared = _on_host_bytes(plan) + saved_host - evidence.resident_bytes
    if gradients and shared >= 0.01 * gradients:
        text += f" {format_bytes(shared)} of the delayed gradients lie where checkpoints were."
    return text


def _on_device(plan: Plan, evidence: Evidence) -> str:
    """What the device keeps for the whole run or from a block's forward to its backward, in words: shares of all;
    empty where that is nothing."""
    saved = evidence.saved.bytes_on
    shares = {
        "parameters": _share_of(plan, "device"),
        "optimizer states": _share_of(plan, "updates"),
        "checkpoints": _percent(plan.decision.checkpoint_device),
        "saved activations": _percent(saved.get("device", 0) / max(sum(saved.values()), 1)),
    }
    return _listed([f"{share} of the {what}" for what, share in shares.items() if share != "none"])


def _all_on_device(plan: Plan) -> bool:
    """Whether all states stay on the device, which updates those that are trained."""
    return all(
        place.parameters_device == 1.0 and (place.frozen or place.optimizer_device == 1.0)
        for place in plan.decision.placement.values()
    )


def _on_host_bytes(plan: Plan) -> float:
    """What stays on host of parameters, optimizer states, checkpoints and delayed gradients, each by itself; saved
    activations come on top."""
    decision = plan.decision
    total = _checkpoint_bytes(plan) * (1.0 - decision.checkpoint_device) * decision.checkpoint_host
    for state in _owned(plan).states:
        place = decision.placement[state.state_class]
        there = (1.0 - place.parameters_device) * (place.parameters_prompt_host + place.parameters_delayed_host)
        each = decision.parameters_of(state).element_bytes * (there + place.parameters_device * decision.unified_memory)
        if not state.frozen:
            on_host = place.optimizer_prompt_host + place.optimizer_delayed_host
            updated = decision.formats_of(state).mean_bytes * on_host + GRADIENT_BYTES * place.delayed_gradient_host
            each += (1.0 - place.optimizer_device) * updated
        total += state.elements * each
    return total


def _delayed_gradients(plan: Plan) -> tuple[float, float]:
    """Bytes of the gradients that wait for the next step, and those of them on host."""
    whole = on_host = 0.0
    for state in _owned(plan).states:
        if not state.frozen:
            place = plan.decision.placement[state.state_class]
            each = GRADIENT_BYTES * state.elements * (1.0 - place.optimizer_device)
            on_host += each * place.delayed_gradient_host
            whole += each * (place.delayed_gradient_host + place.delayed_gradient_ssd)
    return whole, on_host


_ON_HOST = {"parameters": "parameters", "optimizer": "optimizer states", "checkpoints": "checkpoints"}
"""What can be asked to stay on host -> in words."""


def _share_of(plan: Plan, what: str) -> str:
    """How much of all states' `parameters` or `optimizer` states stays on host, of their parameters on `device`, or of
    their optimizer states there: `updates`."""
    kept = 0.0
    states = [state for state in plan.model.states if what not in ("optimizer", "updates") or not state.frozen]
    for state in states:
        place = plan.decision.placement[state.state_class]
        if what == "optimizer":
            share = (1.0 - place.optimizer_device) * (place.optimizer_prompt_host + place.optimizer_delayed_host)
        elif what == "updates":
            share = place.optimizer_device
        elif what == "device" or plan.decision.unified_memory:
            share = place.parameters_device
        else:
            on_host = place.parameters_prompt_host + place.parameters_delayed_host
            share = (1.0 - place.parameters_device) * on_host
        kept += share * state.elements
    return _percent(kept / sum(state.elements for state in states))


def _offloading(plan: Plan) -> str:
    """What training entirely in device memory would take at least, with this plan's micro-batch and recomputation."""
    decision = plan.decision
    if decision.unified_memory:
        return "Compute works on host memory itself: nothing is copied to a device and back."
    needed = device_alone_bytes(_owned(plan), decision.micro_batch_size, decision.formats)
    budget = format_bytes(decision.device_budget_bytes)
    if needed > decision.device_budget_bytes:
        all_stay = all(place.parameters_device == 1.0 for place in decision.placement.values())
        way = "its parameters stay there, and updates run on host" if all_stay else "layers pass through it"
        whose = "each rank's" if decision.ranks > 1 else "its"
        return (
            f"To train on the device alone would take at least {format_bytes(needed)} of {whose} memory, with "
            f"gradients; it has {budget}, so {way}."
        )
    if _all_on_device(plan):
        moved = plan.prediction.h2d_bytes
        rest = f"but {format_bytes(moved)} of activations a step" if moved else "but the step's tokens"
        return f"Everything is trained on the device, within its {budget}: nothing moves there {rest}."
    return (
        f"To train on the device alone would take about {format_bytes(needed)} of its memory, with gradients, and it "
        f"has {budget}: this model can be trained there without offloading."
    )


def _help(plan: Plan) -> str:
    rows = sorted(plan.sensitivity, key=lambda row: -row.throughput_gain)
    useful = [f"{row.words}: {_gain(row.throughput_gain)}" for row in rows if row.throughput_gain >= NOTHING]
    if useful:
        useful[0] += " tokens/s"
    useless = [row.words for row in rows if row.throughput_gain < NOTHING]
    if not rows:
        return ""
    parts = useful + ([f"nothing from {_listed(useless, 'or')}"] if useless else [])
    return f"At this batch, {'; '.join(parts)}."


def _gain(share: float) -> str:
    return f"+{100 * share:.2g}%" if share < 0.1 else f"+{share:.0%}"


def _wear(plan: Plan) -> str:
    p = plan.prediction
    found = wear(plan.machine, p.ssd_write_bytes, p.step_seconds)
    if found.days is None or found.volume is None or found.volume.endurance_bytes is None:
        return ""
    endurance = found.volume.endurance_bytes
    rated = f"{endurance / TB:,.0f} TB" if endurance >= TB else f"{endurance / 1e9:,.3g} GB"
    drives = len(plan.machine.volumes)
    together = f", to {'both' if drives == 2 else f'all {drives}'} drives together" if drives > 1 else ""
    return (
        f"{format_bytes(p.ssd_write_bytes)} written a step are {found.bytes_a_day / TB:.3g} TB a day{together}: "
        f"{drive_words(plan.machine, found.volume)} reaches its rated {rated} after {lifetime(found.days)} of training "
        "without a pause."
    )


# Figures and lists.


def _owned(plan: Plan) -> Model:
    return Shards(plan.decision.shares).owned(plan.model)


def _state_bytes(plan: Plan) -> int:
    model = _owned(plan)
    parameters = sum(plan.decision.parameters_of(state).bytes_of(state.elements) for state in model.states)
    return parameters + optimizer_bytes(model.states, model.precision, plan.decision.formats)


def _checkpoint_bytes(plan: Plan) -> int:
    blocks = checkpoint_layers(plan.model)
    kept = plan.decision.micro_batches if plan.decision.schedule == "vertical" else 1
    return blocks * kept * checkpoint_bytes(plan.model, plan.decision.micro_batch_size)


def _percent(share: float) -> str:
    return "all" if share >= 0.9995 else "none" if share < 0.0005 else f"{share:.1%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _largest(shares: dict[str, float]) -> list[tuple[str, float]]:
    """The largest few that are at least a percent."""
    return sorted(((n, s) for n, s in shares.items() if s >= 0.01), key=lambda entry: -entry[1])[:MANY]


def _listed(parts: Sequence[str], joined: str = "and") -> str:
    return f" {joined} ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
