"""What a profile says, as plain text for a person.

Owns its sections and their words. Every figure comes from the document.
"""

from collections import Counter
from collections.abc import Sequence

from ..documents.profile import Machine, Model, Network, Profile, Volume
from ..documents.state_layout import GRADIENT_BYTES, USUAL, parameters_bytes, training_bytes
from ..units import format_bytes, format_seconds
from .quantities import count, duration, estimated, number, percent, rate, times
from .sublayers_text import sections_of_activations
from .tables import NAME_COLUMNS, Row, clean, facts, page, short, table, wrapped


def suggested_host_memory(profile: Profile) -> str:
    """A budget to begin with, as `solve` takes it: what the training state and its gradients take, or a half of what
    was free where that is less; in steps of a sixteenth to an eighth."""
    trained = sum(state.elements for state in profile.model.states if not state.frozen)
    wanted = training_bytes(profile.model.states, profile.model.precision) + GRADIENT_BYTES * trained
    budget = max(min(wanted, profile.machine.host_available_bytes // 2), _LEAST_BUDGET)
    budget -= budget % (1 << (budget.bit_length() - 4))
    return f"{budget / (1 << 30):g}GiB" if budget >= 1 << 30 else f"{budget >> 20}MiB"


_LEAST_BUDGET = 64 << 20


def describe_profile(profile: Profile) -> str:
    """What was measured of a machine and of a model."""
    model, machine, seconds = profile.model, profile.machine, profile.measuring_seconds
    took = f", in {format_seconds(seconds)}" if seconds else ""
    title = f"Profile: {short(model.name, 34)}, {count(model.parameters)} parameters, on {short(machine.name, 34)}"
    return page(
        title,
        estimated(machine, model) or [f"Measured {short(profile.created, 60)}{took}."],
        ("Machine", _machine(machine)),
        ("Drives, in bytes a second: alone, and both at once", _volumes(machine.volumes)),
        ("Model", _model(model)),
        ("Layers", _layers(model)),
        ("One layer, one micro-batch", _timings(model)),
        *sections_of_activations(profile),
        ("Notes", [line for note in profile.notes for line in wrapped(clean(note))]),
    )


def _network(network: Network | None) -> list[tuple[str, str]]:
    if network is None:
        return []
    gathered, exchanged = (format_bytes(each) for each in (network.gather_bandwidth, network.exchange_bandwidth))
    words = f"{network.ranks} ranks; each receives {gathered}/s of parameters, {exchanged}/s of gradients"
    found = [("network", words)]
    for what, theirs, its in (
        ("layers that compute", network.compute_kept, network.kept_beside_compute),
        ("copies to the device", network.copies_kept, network.kept_beside_copies),
    ):
        if theirs and its:
            found.append(("", f"{percent(its)} of that beside {what}, which then keep {percent(theirs)} of their own"))
    return found


def _machine(machine: Machine) -> list[str]:
    share = ", a share of host memory" if machine.device == "cpu" else ""
    cores = "compute, updates and copies share them" if machine.compute_shares_cpu else "for updates"
    device = f"{short(machine.device_name, 40)} ({machine.device}), {format_bytes(machine.device_memory_bytes)}"
    host = f"{format_bytes(machine.host_memory_bytes)}, {format_bytes(machine.host_available_bytes)} available"
    return facts(
        ("cores", f"{machine.cores} ({cores})"),
        ("host memory", host),
        *_network(machine.network),
        *(
            [("process", f"{format_bytes(machine.process_bytes)} before a plan's first byte")]
            if machine.process_bytes
            else []
        ),
        ("device", device + share),
        ("host to device", f"{rate(machine.h2d_bandwidth)}, back {rate(machine.d2h_bandwidth)}"),
        ("optimizer update", f"{number(machine.update_rate)} elements/s on {times(machine.update_threads, 'thread')}"),
        *([("", f"{number(machine.update_rate_bf16)} with states in bf16")] if machine.update_rate_bf16 else []),
        *([("", f"{number(machine.update_rate_int8)} with states in int8")] if machine.update_rate_int8 else []),
        *([("", f"{rate(machine.checksum_rate)} of states are summed in passing")] if machine.checksum_rate else []),
        *(
            [
                (
                    "",
                    f"{percent(machine.updates_beside_compute)} of its rate beside compute, "
                    f"which keeps {percent(machine.compute_beside_updates)} of its own",
                )
            ]
            if machine.updates_beside_compute and machine.compute_beside_updates
            else []
        ),
    )


def _volumes(volumes: Sequence[Volume]) -> list[str]:
    lines = []
    for volume in volumes:
        alone = f"reads {rate(volume.frontier[0].read)}, writes {rate(volume.frontier[-1].write)}"
        mixes = [f"{rate(point.read)} and {rate(point.write)}" for point in volume.frontier[1:-1]]
        shown = mixes[len(mixes) // 2] if mixes else "no faster than in turns"
        lines.append(f"  {short(volume.path, 70)}")
        lines.append(f"    {format_bytes(volume.free_bytes)} free, {volume.engine}; {alone}; together {shown}")
    return lines


def _model(model: Model) -> list[str]:
    elements = sum(state.elements for state in model.states)
    wide = sum(state.elements for state in model.states if state.precision)
    trained = sum(state.elements for state in model.states if not state.frozen)
    whole = training_bytes(model.states, model.precision)
    share = f", {percent(1 - trained / elements)} of them frozen" if trained < elements else ""
    chunk = model.head_chunk_tokens
    return facts(
        ("architecture", short(model.architecture, 60)),
        ("directory", short(model.path, 70) if model.path else "none, a what-if"),
        ("parameters", f"{model.parameters:,} in {model.precision}{share}"),
        *([("kept in fp32", f"{percent(wide / elements)} of all elements")] if wide else []),
        *([("frozen", short(" ".join(model.freeze), 70))] if model.freeze else []),
        ("hidden size", f"{model.hidden_size:,}; vocabulary {model.vocab_size:,}"),
        ("sequence length", f"{model.sequence_length:,} tokens"),
        ("logits", "of a whole micro-batch at once" if chunk is None else f"of {chunk:,} tokens at a time"),
        ("training state", f"{format_bytes(whole)}, and {format_bytes(trained * GRADIENT_BYTES)} of fp32 gradients"),
    )


def _layers(model: Model) -> list[str]:
    counts = Counter(layer.layer_class for layer in model.layers)
    first = {layer.layer_class: layer for layer in reversed(model.layers)}
    rows: list[Row] = []
    for entry in model.classes:
        if entry.name in first:
            states = [model.states[index] for index in first[entry.name].states]
            elements = sum(state.elements for state in states)
            trained = sum(state.elements for state in states if not state.frozen)
            shared = any(len(model.uses(index)) > 1 for index in first[entry.name].states)
            rows.append(
                (
                    short(entry.name, NAME_COLUMNS),
                    f"{counts[entry.name]:,}",
                    f"{elements:,}",
                    format_bytes(parameters_bytes(states, model.precision)),
                    format_bytes(USUAL.range_bytes(trained)) if trained else "frozen",
                    "tied" if shared else "",
                )
            )
    return table([("", "layers", "elements each", "parameters", "optimizer states", "")], rows, left=(0, 5))


def _timings(model: Model) -> list[str]:
    rows: list[Row] = []
    for entry in model.classes:
        for index, timing in enumerate(entry.timings):
            rows.append(
                (
                    short(entry.name, NAME_COLUMNS) if index == 0 else "",
                    str(timing.micro_batch_size),
                    duration(timing.forward_seconds),
                    duration(timing.backward_seconds) if timing.backward_seconds else "none",
                    format_bytes(max(timing.forward_workspace_bytes, timing.backward_workspace_bytes)),
                    format_bytes(timing.saved_activation_bytes),
                )
            )
    return table([("", "size", "forward", "backward", "workspace", "activations")], rows, left=(0,))
