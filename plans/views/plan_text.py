"""What a plan says, as plain text for a person.

Owns its sections and their words. Every figure comes from the document or its schedule; nothing is decided or
predicted here.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap

from rich.cells import cell_len, set_cell_size

from ..analysis.allocators import Blocks, blocks, by_class, needs, page_lock_waste, saved
from ..analysis.cache import Beside
from ..analysis.memory_usage import label, reserved, snapshot_store_bytes
from ..analysis.wear import Wear, drive_name, lifetime, wear
from ..analysis.work import RESOURCE_LABELS
from ..documents.plan import (
    Alternative,
    Compared,
    Decision,
    Placement,
    Plan,
    Reason,
    Sensitivity,
)
from ..documents.profile import Machine, Model
from ..documents.stripe_shares import room
from ..graph.contents import Role
from ..graph.ops import RESOURCES, Buffer, Region, Schedule, Tier
from ..schedule.homes import device_tier
from ..units import format_bytes, format_enough
from . import cache_text, decision_text, saved_text
from .quantities import amount, bar, count, decimal, duration, estimated, number, percent, signed, times, without_ssd
from .tables import COLUMNS, NAME_COLUMNS, Row, aligned, clean, facts, page, short, table, wrapped

LIVES: tuple[Tier, Tier] = ("host", "ssd")
BUSY_COLUMNS = 20
MOST_ROWS = 8
"""Alternatives shown of one micro-batch size; all are in plan.json."""
CAUSES = {
    **{resource: f"for {words}" for resource, words in RESOURCE_LABELS.items()},
    "host buffer": "for a free host buffer",
    "device buffer": "for a free device buffer",
    "no work": "without any work",
}
LEAST_SHARE = 0.005
"""Of a step: what is shorter is no cause worth a word."""


def describe_plan(plan: Plan, schedule: Schedule, cache: Beside | None = None) -> str:
    """What `plan` decides, predicts, and why. `schedule` is the plan's own, `cache` what its steady step finds in time,
    where somebody has simulated it."""
    model, prediction = plan.model, plan.prediction
    title = f"Plan: {short(model.name, 34)}, {count(model.parameters)} parameters, on {short(plan.machine.name, 34)}"
    found = blocks(schedule)
    bound = f"{duration(prediction.step_seconds)} a step, {number(prediction.tokens_per_second)} tokens/s."
    bound = without_ssd(plan) + bound
    return page(
        title,
        [*wrapped(bound), *wrapped(f"What bounds it: {clean(prediction.bound_by)}."), *estimated(plan.machine, model)],
        ("Why", _reasons(plan.reasons)),
        ("What it decides", [*decision_text.decided(plan, schedule), *_frozen(model)]),
        ("Where states live between their uses, in percent of the whole and in bytes", _residency(plan, schedule)),
        ("What it predicts of a steady step", _prediction(plan, schedule)),
        ("What a steady step finds in time, as predicted", cache_text.predicted_lines(cache) if cache else []),
        (f"The least budgets that {_split_of(plan.decision)} would still fit, each alone", _least(plan)),
        ("How busy each resource is, and what it waits for while it idles", _busy(plan)),
        ("The chain of operations that makes the step as long as it is", _critical_path(plan)),
        ("Host memory, by what it is reserved for", [*_split(schedule, "host"), *_beside(plan, "host")]),
        ("Host memory in slots, by what takes turns in them", _pools(found)),
        ("What this plan would take of host memory if its buffers were allocated otherwise", _otherwise(found)),
        ("Device memory, by what it is reserved for", _device(plan, schedule)),
        ("What else was looked at (* is this plan)", _alternatives(plan)),
        ("Schedules compared, at this batch", _schedules([row for row in plan.comparison if row.kind == "schedule"])),
        (
            "What each idea brings, from ZeRO-Infinity's way to this plan",
            _ideas([row for row in plan.comparison if row.kind == "idea"]),
        ),
        (f"What more of something would bring, at this batch{_of_whom(plan)}", _sensitivity(plan.sensitivity)),
    )


# A plan's parts.


def _reasons(reasons: Sequence[Reason]) -> list[str]:
    lines = []
    for reason in reasons:
        body = wrap(clean(reason.text), COLUMNS - 18) or [""]
        lines += _labelled(short(reason.topic, 14), body, 14)
    return lines


def _labelled(name: str, body: Sequence[str], columns: int) -> list[str]:
    """`body` beside a name that stands once."""
    return [f"  {set_cell_size(name if row == 0 else '', columns)}  {line}" for row, line in enumerate(body)]


def _frozen(model: Model) -> list[str]:
    """What of the model is not trained, if anything."""
    frozen = sum(state.elements for state in model.states if state.frozen)
    if not frozen:
        return []
    share = percent(frozen / sum(state.elements for state in model.states))
    patterns = f": {clean(' '.join(model.freeze))}" if model.freeze else ""
    below = f"no layer below {short(model.layers[model.first_trained].name, 40)} runs backward"
    return facts(
        ("frozen", short(f"{share} of all elements{patterns}", COLUMNS - 24)),
        *([("", below)] if model.first_trained else []),
    )


def _residency(plan: Plan, schedule: Schedule) -> list[str]:
    """One row a class and state; percentages are the decision's, bytes are the schedule's (whole pages)."""
    class_of = [state.state_class for state in plan.model.states]
    held: Counter[tuple[str, str, Tier]] = Counter()
    for home in schedule.homes:
        regions: dict[str, Region | None] = {"p": home.parameters, "o": home.optimizer, "g": home.gradient}
        for what, region in regions.items():
            if region:
                held[class_of[home.state], what, schedule.buffers[region.buffer].tier] += region.nbytes
    rows: list[Row] = []
    for name, states in Counter(class_of).items():
        title = short(name, 14) + (f" x{states}" if states > 1 else "")
        for what, words, shares in _shares(plan.decision.placement[name], unified=plan.decision.unified_memory):
            if any(shares):
                rows.append((title, words, *map(percent, shares), *(amount(held[name, what, t]) for t in LIVES)))
                title = ""
    kept: Counter[Tier] = Counter()
    for buffer in schedule.buffers:
        if buffer.role == Role.CHECKPOINTS:
            kept[buffer.tier] += buffer.nbytes
    others, on_host = 1.0 - plan.decision.checkpoint_device, plan.decision.checkpoint_host
    shares = (others * on_host, others * (1.0 - on_host), 0.0, 0.0) if kept else (0.0,) * 4
    if not plan.decision.zeroth_order and others:
        rows.append(("all blocks", "checkpoints", *map(percent, shares), *(amount(kept[tier]) for tier in LIVES)))
    activations = saved_text.kept_bytes(schedule)
    if activations["host"] or activations["ssd"]:
        rows.append(saved_text.residency(activations))
    if activations:
        kept += activations
    total = [kept[tier] + sum(nbytes for key, nbytes in held.items() if key[2] == tier) for tier in LIVES]
    rows.append(("all", "", "", "", "", "", *map(amount, total)))
    shared = total[0] - _covered(schedule)
    note = f"{format_bytes(shared)} of these on host count twice: delayed gradients lie where checkpoints were"
    heads: list[Row] = [("", "", "", "prompt", "", "delayed", "", ""), ("", "", *LIVES, *LIVES, "on host", "on ssd")]
    if not plan.decision.delay_ratio:
        rows, heads = [(*row[:4], *row[6:]) for row in rows], [(*heads[1][:4], *heads[1][6:])]
    body = table(heads, rows) if any(total) else ["  Nothing is kept on host or on ssd."]
    return [*body, *saved_text.on_device(activations), *([f"  {note}"] if shared > 0 else [])]


def _covered(schedule: Schedule) -> int:
    """Bytes of host memory that hold activations or something of a state between its uses, each byte counted once."""
    regions = [region for home in schedule.homes for region in (home.parameters, home.optimizer, home.gradient)]
    spans = [(buffer.offset, buffer.offset + buffer.nbytes) for buffer in schedule.buffers if _activations(buffer)]
    for region in regions:
        if region and (buffer := schedule.buffers[region.buffer]).tier == "host":
            spans.append((buffer.offset + region.start, buffer.offset + region.stop))
    covered = until = 0
    for start, stop in sorted(spans):
        covered += max(stop - max(start, until), 0)
        until = max(until, stop)
    return covered


def _activations(buffer: Buffer) -> bool:
    return (buffer.role == Role.CHECKPOINTS or saved_text.waits_in(buffer)) and buffer.tier == "host"


def _split_of(decision: Decision) -> str:
    """The micro-batches that make a plan's batch."""
    return f"{times(decision.micro_batches, 'micro-batch', 'micro-batches')} of {decision.micro_batch_size}"


def _shares(p: Placement, *, unified: bool) -> list[tuple[str, str, tuple[float, float, float, float]]]:
    """(key, words, (prompt on host, prompt on ssd, delayed on host, delayed on ssd)) of each state."""
    others, kept = 1.0 - p.parameters_device, p.parameters_device if unified else 0.0
    whole = (p.parameters_prompt_host + p.parameters_prompt_ssd, p.parameters_delayed_host + p.parameters_delayed_ssd)
    prompt = (others * p.parameters_prompt_host + kept * whole[0], others * p.parameters_prompt_ssd)
    delayed = (others * p.parameters_delayed_host + kept * whole[1], others * p.parameters_delayed_ssd)
    away = 1.0 - p.optimizer_device
    optimizer_prompt = (away * p.optimizer_prompt_host, away * p.optimizer_prompt_ssd)
    optimizer_delayed = (away * p.optimizer_delayed_host, away * p.optimizer_delayed_ssd)
    return [
        ("p", "parameters", prompt + delayed),
        ("o", "optimizer states", optimizer_prompt + optimizer_delayed),
        ("g", "delayed gradients", (0.0, 0.0, away * p.delayed_gradient_host, away * p.delayed_gradient_ssd)),
    ]


def _prediction(plan: Plan, schedule: Schedule) -> list[str]:
    p, d = plan.prediction, plan.decision
    estimate = f"the linear program, stage by stage, estimates {duration(p.program_seconds)}"
    free = room(plan.machine.volumes)
    volumes = times(len(plan.machine.volumes), "volume")
    worn = wear(plan.machine, p.ssd_write_bytes, p.step_seconds)
    a_day = decimal(worn.bytes_a_day)
    written = f"{format_bytes(p.ssd_write_bytes)}, or {a_day} a day" if p.ssd_write_bytes else "nothing"
    figures = facts(
        ("step", f"{duration(p.step_seconds)} ({estimate})"),
        ("throughput", f"{number(p.tokens_per_second)} tokens/s"),
        ("read from ssd", format_bytes(p.ssd_read_bytes) if p.ssd_read_bytes else "nothing"),
        ("written to ssd", written),
        *([("drive wear", _wear(plan.machine, worn))] if p.ssd_write_bytes else []),
        ("copied on host", format_bytes(p.d2h_bytes))
        if d.unified_memory
        else ("moved to device", f"{format_bytes(p.h2d_bytes)}, and {format_bytes(p.d2h_bytes)} back"),
        *([("whole process", format_enough(p.peak_process_bytes))] if p.peak_process_bytes is not None else []),
    )
    host, there = format_enough(p.peak_host_bytes), format_enough(p.peak_device_bytes)
    device = ("peak device memory", there, p.peak_device_bytes, d.device_budget_bytes, "budget")
    stored = ("store on ssd", format_bytes(p.ssd_bytes), p.ssd_bytes, free, f"free on {volumes}")
    budgets = [
        ("peak host memory", host, p.peak_host_bytes, d.host_budget_bytes, "budget"),
        *([] if d.unified_memory else [device]),
        *([stored] if p.ssd_bytes else []),
    ]
    two, one = (format_bytes(snapshot_store_bytes(schedule, keep=keep)) for keep in (2, 1))
    takes = f"the store takes {two}" if p.ssd_bytes else f"a store of {two}"
    kept = f"{takes} (run --snapshot-every N), {one} with --keep 1"
    bars = aligned(
        [
            (f"  {name}", f"{bar(used, most)} {told} of {format_bytes(most)} {words}")
            for name, told, used, most, words in budgets
        ],
        least=20,
    )
    last = ("to go on", decision_text.resuming(plan)) if d.zeroth_order else ("with snapshots", kept)
    return [*figures, *bars, *facts(last)]


def _wear(machine: Machine, found: Wear) -> str:
    if found.days is None or found.volume is None or found.volume.endurance_bytes is None:
        return "a profile with --endurance SIZE, the drive's rating, lets plans say how long it lasts"
    rated = decimal(found.volume.endurance_bytes)
    rest = f"; {times(found.unrated, 'other volume')} without a rating" if found.unrated else ""
    name = short(drive_name(machine, found.volume), 24)
    return f"{lifetime(found.days)} without a pause, to the {rated} of {name}{rest}"


def _least(plan: Plan) -> list[str]:
    rows: list[Row] = [
        (row.budget, format_enough(row.least_bytes), f"about {number(row.tokens_per_second)} tokens/s")
        for row in plan.least
    ]
    if not rows:
        return []
    own = number(plan.decision.tokens / plan.prediction.program_seconds) if plan.prediction.program_seconds else "?"
    return [
        *table([], rows, left=(0, 2)),
        f"  by the linear program, stage by stage, which estimates {own} tokens/s for this plan itself;",
        "  in so little memory a step may take much longer than it says",
    ]


def _busy(plan: Plan) -> list[str]:
    busy, step = plan.prediction.busy, plan.prediction.explained_seconds
    names = [*(name for name in RESOURCES if name in busy), *sorted(set(busy) - set(RESOURCES))]
    lines = []
    for name in names:
        share = f"{bar(busy[name], 1, BUSY_COLUMNS)} {busy[name]:4.0%}"
        causes = wrap(_idle(plan.prediction.idle.get(name, {}), step), COLUMNS - 24 - cell_len(share)) or [""]
        rows = [f"{share if row == 0 else ' ' * cell_len(share)}  {line}" for row, line in enumerate(causes)]
        lines += _labelled(short(RESOURCE_LABELS.get(name, name), 18), rows, 18)
    return [*lines, *_of_which_step(plan)]


def _of_which_step(plan: Plan) -> list[str]:
    """Where steps differ, which one is explained."""
    zeroth_order = plan.decision.zeroth_order
    if zeroth_order is None or zeroth_order.written_every == 1:
        return []
    one_in, seconds = zeroth_order.written_every, duration(plan.prediction.explained_seconds)
    return [f"  of a step in which parameters go back to where they live, one in {one_in}: {seconds}"]


def _idle(causes: Mapping[str, float], step: float) -> str:
    """Where a resource's idle seconds go, the most first, in percent of the step."""
    shares = {name: seconds / step for name, seconds in causes.items() if seconds >= LEAST_SHARE * step}
    ends = [shares.pop(name) for name in ("fill", "drain") if name in shares]
    parts = [(share, CAUSES.get(name, f"for {short(name, NAME_COLUMNS)}")) for name, share in shares.items()]
    if ends:
        parts.append((sum(ends), "fill and drain"))
    words = ", ".join(f"{share:.0%} {words}" for share, words in sorted(parts, reverse=True))
    return f"idles {words}" if words else ""


def _critical_path(plan: Plan) -> list[str]:
    prediction = plan.prediction
    totals = {resource: sum(kinds.values()) for resource, kinds in prediction.critical_path.items()}
    rows: list[Row] = []
    for resource in sorted(totals, key=lambda name: -totals[name]):
        kinds = sorted(prediction.critical_path[resource].items(), key=lambda entry: -entry[1])
        told = ", ".join(f"{short(kind, NAME_COLUMNS)} {duration(seconds)}" for kind, seconds in kinds)
        share = f"{totals[resource] / prediction.explained_seconds:.0%}"
        rows.append((short(RESOURCE_LABELS.get(resource, resource), 18), duration(totals[resource]), share, told))
    return [*table([], rows, left=(0, 3)), *(_of_which_step(plan) if rows else [])]


def _split(schedule: Schedule, tier: Tier) -> list[str]:
    split = reserved(schedule)[tier]
    arena = schedule.arenas[tier]
    rows = [
        (label(*roles), format_bytes(nbytes), percent(nbytes / arena))
        for roles, nbytes in sorted(split.items(), key=lambda entry: (-entry[1], label(*entry[0])))
    ]
    return table([], [*rows, ("all", format_bytes(arena), "")], left=(0,)) if arena else []


def _pools(found: Blocks) -> list[str]:
    rows: list[Row] = [
        (label(*pool.roles), f"{pool.slots:,}", format_bytes(pool.slot_bytes), format_bytes(pool.nbytes))
        for pool in found.pools
    ]
    left_out = len(rows) - MOST_ROWS
    rest = [f"  and {left_out} smaller sizes"] if left_out > 0 else []
    if not rows:
        return []
    total = [("all", f"{sum(pool.slots for pool in found.pools):,}", "", format_bytes(by_class(found.pools)))]
    need = needs(found)
    if need.planned.slots < need.by_class.slots:
        saving = format_bytes(need.by_class.slots - need.planned.slots)
        total.append(("less what is never used at once", "", "", f"-{saving}"))
    return [*table([("", "slots", "each", "together")], [*rows[:MOST_ROWS], *total], left=(0,)), *rest]


def _otherwise(found: Blocks) -> list[str]:
    """What the two habits that MemAscend finds would cost; what is saved is in percent of the row's own bytes."""
    need = needs(found)
    if not need.planned.total:
        return []
    ways = (
        ("as planned: one arena, shared over time", need.planned),
        ("slots by size, each its own", need.by_class),
        ("slots of one size for each role", need.one_size_each_role),
        ("slots of one size for all", need.one_size),
        ("each block a power of two", need.powers_of_two),
        ("one size for all, powers of two", need.both),
    )
    rows: list[Row] = [("", "slots", "saved", "", "all of host", "saved", "")]
    for words, way in ways:
        row = [words]
        for planned, nbytes in ((need.planned.slots, way.slots), (need.planned.total, way.total)):
            row += [amount(nbytes), amount(nbytes - planned), percent(saved(planned, nbytes))]
        rows.append(row)
    beyond = format_bytes(page_lock_waste(need.planned.total))
    return [*table([], rows, left=(0,)), f"  page-locking the arena as it is takes {beyond} beyond it"]


def _device(plan: Plan, schedule: Schedule) -> list[str]:
    return [*_split(schedule, "device"), *_beside(plan, "device")] if schedule.arenas["device"] else []


def _beside(plan: Plan, tier: Tier) -> list[str]:
    """What compute takes beside the arena of the tier on which it works."""
    p = plan.prediction
    if tier != device_tier(plan.decision):
        return []
    extra = p.peak_host_bytes - p.host_arena_bytes if tier == "host" else p.peak_device_bytes - p.device_arena_bytes
    lines = [f"  and for compute itself (its workspace, masks and tables, at most): {format_bytes(extra)}"]
    margin = plan.model.workspace_margin
    if margin:
        context = plan.decision.micro_batches * plan.model.context_bytes[plan.decision.micro_batch_size]
        assumed = round((extra - context) * margin / (1 + margin))
        lines.append(f"  of which margin for the allocator's fragmentation, assumed: {format_bytes(assumed)}")
    return lines


def _alternatives(plan: Plan) -> list[str]:
    """Throughput against n. Of each micro-batch size at most MOST_ROWS, the plan's own among them."""
    most = max((entry.tokens_per_second for entry in plan.alternatives), default=1.0)
    sizes = sorted({entry.micro_batch_size for entry in plan.alternatives})
    rows: list[Row] = []
    left_out = 0
    for size in sizes[-MOST_ROWS:]:
        mine = sorted((e for e in plan.alternatives if e.micro_batch_size == size), key=lambda e: e.micro_batches)
        shown = _spread(mine, [is_chosen(plan, entry) for entry in mine])
        left_out += len(mine) - len(shown)
        rows += [_alternative(plan, entry, most) for entry in shown]
    left_out += sum(entry.micro_batch_size in sizes[:-MOST_ROWS] for entry in plan.alternatives)
    if not rows:
        return []
    head = ("", "size", "n", "tokens/s", "", "alpha", "if only compute", "if only I/O", "")
    rest = [f"  and {left_out} more, in plan.json"] if left_out else []
    return [*table([head], rows, left=(4, 8)), *rest]


def is_chosen(plan: Plan, entry: Alternative) -> bool:
    """Whether `entry` is the candidate that the plan is for."""
    decision = plan.decision
    return (entry.micro_batch_size, entry.micro_batches) == (decision.micro_batch_size, decision.micro_batches)


def _alternative(plan: Plan, entry: Alternative, most: float) -> Row:
    return (
        "*" if is_chosen(plan, entry) else "",
        str(entry.micro_batch_size),
        str(entry.micro_batches),
        number(entry.tokens_per_second),
        bar(entry.tokens_per_second, most, 16),
        f"{entry.delay_ratio:.3g}",
        number(entry.compute_tokens_per_second),
        number(entry.io_tokens_per_second),
        "simulated" if entry.simulated else "estimated",
    )


def _spread(entries: list[Alternative], chosen: list[bool]) -> list[Alternative]:
    """At most MOST_ROWS of `entries`: both ends, what is chosen, and the rest evenly between."""
    if len(entries) <= MOST_ROWS:
        return entries
    picks = MOST_ROWS - 1
    wanted = {round(i * (len(entries) - 1) / (picks - 1)) for i in range(picks)}
    if True in chosen:
        wanted.add(chosen.index(True))
    return [entries[index] for index in sorted(wanted)]


def _of_whom(plan: Plan) -> str:
    """Whose bytes and bandwidths the rows name, where there are two machines."""
    return ": sizes there, seconds here" if plan.machine.emulation else ""


def _sensitivity(rows: Sequence[Sensitivity]) -> list[str]:
    changes: list[Row] = []
    for row in sorted(rows, key=lambda row: -row.throughput_gain):
        change, step = "nothing", ""
        if abs(row.throughput_gain) >= 5e-4:
            change = f"{signed(100 * row.throughput_gain)}% tokens/s"
            longer = "shorter" if row.throughput_gain > 0 else "longer"
            step = f"a step {duration(abs(row.seconds_per_unit))} {longer}"
        changes.append((short(change_of(row), 46), change, step))
    return table([], changes, left=(0, 1, 2))


def change_of(row: Sensitivity) -> str:
    """What one more unit is, in words."""
    unit = row.unit if row.unit[:1].isdigit() else f"1 {row.unit}"
    return row.words or f"{unit} more of {row.resource}"


def _schedules(compared: Sequence[Compared]) -> list[str]:
    head = ("", "host", "device", "ssd read", "written", "step", "tokens/s", "fits")
    rows: list[Row] = [
        (
            short(row.name, 28),
            _figure(row.host_bytes, format_bytes),
            _figure(row.device_bytes, format_bytes),
            _figure(row.ssd_read_bytes, format_bytes),
            _figure(row.ssd_write_bytes, format_bytes),
            _figure(row.step_seconds, duration),
            _figure(row.tokens_per_second, number),
            "yes" if row.fits else "no",
        )
        for row in compared
    ]
    words = "estimates but for this plan: placed by the program, simulated on shortened models"
    return [*table([head], rows, left=(0,)), f"  {words}", *_notes(compared)] if rows else []


def _ideas(compared: Sequence[Compared]) -> list[str]:
    """Rungs with what each gains over the one before it."""
    before = [None, *(row.tokens_per_second for row in compared)][: len(compared)]
    head = ("", "host", "ssd read", "written", "step", "tokens/s", "gain", "fits")
    rows: list[Row] = [
        (
            short(row.name, 36),
            _figure(row.host_bytes, format_bytes),
            _figure(row.ssd_read_bytes, format_bytes),
            _figure(row.ssd_write_bytes, format_bytes),
            _figure(row.step_seconds, duration),
            _figure(row.tokens_per_second, number),
            f"{row.tokens_per_second / last - 1:+.1%}" if row.tokens_per_second and last else "",
            "yes" if row.fits else "no",
        )
        for row, last in zip(compared, before, strict=True)
    ]
    words = "estimates but for the last: what is left of the budget goes to parameters first, as a rule"
    return [*table([head], rows, left=(0,)), f"  {words}", *_notes(compared)] if rows else []


def _figure(value: float | None, written: Callable[[float], str]) -> str:
    return "?" if value is None else written(value) if value else "-"


def _notes(compared: Sequence[Compared]) -> list[str]:
    told = [f"{row.name}: {row.note}" for row in compared if row.note]
    return [
        line for note in told for line in wrap(clean(note), COLUMNS - 4, initial_indent="  ", subsequent_indent="    ")
    ]
