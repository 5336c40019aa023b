"""Draws docs/plan.svg, the README's picture of a plan: a step of a small model on a machine with a GPU, as simulated.

Run it from the repository's root when the schedule changes (`python -m docs.draw_plan`); a test compares the two.
"""

from pathlib import Path

from ssdplan.planner.simulator import simulate
from ssdplan.plans.build import build_schedule
from ssdplan.plans.schedule import Backward, Forward, Op, Resource, Update
from ssdplan.plans.timeline import Timeline
from tests.planner.made import made_machine, made_model, made_volume
from tests.plans.decided import decide

LANES: dict[Resource, str] = {
    "read": "ssd read",
    "write": "ssd write",
    "h2d": "to device",
    "d2h": "from device",
    "compute": "compute",
    "cpu": "cpu updates",
}
COLOURS = {
    "parameters": "#332288",
    "optimizer states": "#ddcc77",
    "hidden states": "#44aa99",
    "gradients": "#882255",
    "forward": "#88ccee",
    "backward": "#cc6677",
    "update": "#117733",
    "delayed update": "#999933",
}
WIDTH, LEFT, ROW, BAR = 960, 90, 34, 22


def timeline() -> Timeline:
    """Four blocks, three micro-batches, everything on ssd, a quarter of each update delayed."""
    model = made_model(blocks=4, hidden=512, vocab=4096, sequence=512, flops=2e12)
    machine = made_machine(link=6e9, update_rate=1.2e9, volumes=(made_volume(read=5e9, write=4e9),))
    decision = decide(model, alpha=0.25, micro_batches=3, chunk=1 << 20, lookahead=3)
    return simulate(build_schedule(model, decision).steady, model, machine, 1)


def kind(op: Op) -> str:
    """What an op is coloured by."""
    if isinstance(op, Forward | Backward):
        return type(op).__name__.lower()
    if isinstance(op, Update):
        return "delayed update" if op.delayed else "update"
    what = str(op)
    if "gradient" in what and "inter-layer" not in what:
        return "gradients"
    if "optimizer" in what:
        return "optimizer states"
    return "hidden states" if "hidden" in what or "checkpoint" in what or "inter-layer" in what else "parameters"


def draw(step: Timeline) -> str:
    """The picture as SVG."""
    height = 30 + ROW * len(LANES) + 40
    scale = (WIDTH - LEFT - 10) / step.seconds
    backward = min(start for op, start in zip(step.graph.ops, step.starts, strict=True) if isinstance(op, Backward))
    turn = LEFT + backward * scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{turn - 6:.1f}" y="18" text-anchor="end" fill="#555">forward</text>',
        f'<text x="{turn + 6:.1f}" y="18" fill="#555">backward</text>',
        f'<path d="M{turn:.1f} 8V{30 + ROW * len(LANES)}" stroke="#555" stroke-dasharray="2 2"/>',
    ]
    for row, (resource, name) in enumerate(LANES.items()):
        y = 30 + ROW * row
        lines.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{name}</text>')
        for op, start, end in zip(step.graph.ops, step.starts, step.ends, strict=True):
            if op.resource == resource:
                x, width = LEFT + start * scale, max((end - start) * scale - 0.3, 0.3)
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[kind(op)]}"/>'
                )
    x, y = LEFT, 30 + ROW * len(LANES) + 14
    for name, colour in COLOURS.items():
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 16}" y="{y + 11}">{name}</text>')
        x += 32 + 7 * len(name)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("plan.svg").write_text(draw(timeline()), encoding="utf-8")
