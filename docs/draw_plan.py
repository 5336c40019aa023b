"""Draws docs/plan.svg, the README's picture of a plan: one training step, in which one layer can be followed.

Owns the example and its drawing. The step is simulated: a small model on a machine with a GPU. One layer has colours
and labels; all other work is grey. Run `python -m docs.draw_plan` in the repository's root when the schedule changes; a
test compares the picture with the code.
"""

from collections.abc import Iterator
from pathlib import Path

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.graph.ops import Backward, Forward, Op, Resource, Update
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from tests.made.decisions import decide
from tests.made.profiles import made_machine, made_model, made_volume

LANES: dict[Resource, tuple[str, str]] = {
    "read": ("SSD reads", "into DRAM"),
    "h2d": ("to the GPU", "from DRAM"),
    "compute": ("GPU", "computes layers"),
    "d2h": ("from the GPU", "into DRAM"),
    "cpu": ("CPU", "updates weights"),
    "write": ("SSD writes", "from DRAM"),
}
COLOURS = {"weights": "#4477aa", "Adam states": "#ccaa33", "compute": "#228833", "gradients": "#aa3377"}
BLOCK = 1
"""The block that is followed, from 0; as a layer and as a state it is one more, behind the embedding."""
WIDTH, LEFT, TOP, ROW, BAR = 1000, 130, 66, 46, 20
TICK_MILLISECONDS = 20
STYLE = (
    "text{fill:#24292f}.soft{fill:#57606a;font-size:11px}.title{font-size:16px;font-weight:bold}"
    ".other{fill:#d0d7de}.line{stroke:#afb8c1}.page{fill:#ffffff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.other{fill:#3d444d}"
    ".line{stroke:#656c76}.page{fill:#0d1117}}"
)


def timeline() -> Timeline:
    """Four blocks, three micro-batches, everything on ssd, a quarter of each update delayed."""
    model = made_model(blocks=4, hidden=512, vocab=4096, sequence=512, flops=2e12)
    machine = made_machine(link=6e9, update_rate=1.2e9, volumes=(made_volume(read=5e9, write=4e9),))
    decision = decide(model, alpha=0.25, micro_batches=3, chunk=1 << 20, lookahead=3)
    return simulate(build_schedule(model, decision).steady, model, machine, 1)


def kind(op: Op) -> str:
    """What an operation of the followed layer is coloured by; empty for all others."""
    if isinstance(op, Forward | Backward):
        return "compute" if op.layer == BLOCK + 1 else ""
    if isinstance(op, Update):
        return "Adam states" if op.state == BLOCK + 1 else ""
    words = str(op)
    if not words.endswith(f"block.{BLOCK}"):
        return ""
    return "Adam states" if "optimizer" in words else "gradients" if "gradient" in words else "weights"


def label(op: Op, *, again: bool) -> str:
    """What stands above the first of some operations of the followed layer. `again`: it comes after its forward."""
    if isinstance(op, Forward | Backward):
        return type(op).__name__.lower()
    if isinstance(op, Update):
        return "delayed update" if op.delayed else "update"
    if op.resource == "write":
        return "new Adam states and weights" if again else "the updated quarter"
    return f"{kind(op)} again" if again and kind(op) == "weights" else kind(op)


def draw(step: Timeline) -> str:
    """The picture as SVG."""
    bottom = TOP + ROW * len(LANES)
    scale = (WIDTH - LEFT - 16) / step.seconds
    backward = min(start for op, start in zip(step.graph.ops, step.starts, strict=True) if isinstance(op, Backward))
    turn = LEFT + backward * scale
    followed = (op for op in step.graph.ops if isinstance(op, Forward) and kind(op))
    forward_end = max(step.ends[op.index] for op in followed)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 70}" '
        f'viewBox="0 0 {WIDTH} {bottom + 70}" font-family="sans-serif" font-size="12">',
        f"<style>{STYLE}</style>",
        '<rect class="page" width="100%" height="100%" rx="6"/>',
        '<text class="title" x="16" y="26">One training step: while the GPU works on one layer, the SSD already moves '
        "the next ones</text>",
        f'<text x="{turn - 8:.1f}" y="52" text-anchor="end">forward pass</text>',
        f'<text x="{turn + 8:.1f}" y="52">backward pass, and updates</text>',
        f'<path class="line" d="M{turn:.1f} 40V{bottom}" stroke-dasharray="3 3"/>',
    ]
    for row, (resource, (name, about)) in enumerate(LANES.items()):
        y = TOP + ROW * row
        lines.append(f'<text x="{LEFT - 12}" y="{y + 26}" text-anchor="end">{name}</text>')
        lines.append(f'<text class="soft" x="{LEFT - 12}" y="{y + 39}" text-anchor="end">{about}</text>')
        lines += _lane(step, resource, y, scale, forward_end)
    lines += _axis(step, bottom, scale)
    lines.append(
        f'<text class="soft" x="16" y="{bottom + 40}">Coloured: one of four layers. Grey: all other work. Predicted '
        "for a small model whose weights and Adam states all live on the SSD.</text>"
    )
    lines.append(
        f'<text class="soft" x="16" y="{bottom + 56}">A quarter of each update waits for the next step, so the SSD '
        "also has work in the forward pass; the results are the same.</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


def _lane(step: Timeline, resource: Resource, y: int, scale: float, forward_end: float) -> Iterator[str]:
    """The bars of a resource: the followed layer over the others, with a label where each of its bursts begins."""
    coloured: list[str] = []
    told = ""
    for op, start, end in zip(step.graph.ops, step.starts, step.ends, strict=True):
        if op.resource != resource:
            continue
        x, width = LEFT + start * scale, max((end - start) * scale - 0.3, 0.5)
        bar = f'x="{x:.1f}" y="{y + 20}" width="{width:.1f}" height="{BAR}"'
        if not kind(op):
            yield f'<rect class="other" {bar}/>'
            continue
        coloured.append(f'<rect {bar} fill="{COLOURS[kind(op)]}"/>')
        words = label(op, again=start > forward_end)
        if words != told:
            coloured.append(f'<text x="{x:.1f}" y="{y + 14}">{words}</text>')
            told = words
    yield from coloured


def _axis(step: Timeline, y: int, scale: float) -> Iterator[str]:
    yield f'<path class="line" d="M{LEFT} {y + 4}H{LEFT + step.seconds * scale:.1f}"/>'
    for milliseconds in range(0, int(step.seconds * 1e3) + 1, TICK_MILLISECONDS):
        x = LEFT + milliseconds / 1e3 * scale
        yield f'<path class="line" d="M{x:.1f} {y + 4}v4"/>'
        unit = " ms" if milliseconds else ""
        yield f'<text class="soft" x="{x:.1f}" y="{y + 20}" text-anchor="middle">{milliseconds}{unit}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("plan.svg").write_text(draw(timeline()), encoding="utf-8")
