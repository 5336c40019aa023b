"""The page's colours: those of `analysis/work.py`; in the dark, lighter ones of the same hue where they would drown."""

from ...analysis.work import OTHER_COLOUR, ROLE_COLOURS, SIZE_COLOURS, WORK_COLOURS

DARK_GROUND = "#191b1f"
"""What the drawings lie on in the dark; page.css has it as --plot."""
LEAST_CONTRAST = 2.6


def colour_class(colour: str) -> str:
    """The class that fills with `colour`; its outline is of `line-` and that."""
    return "c" + colour.lstrip("#").lower()


def style_of_colours() -> str:
    """Custom properties and classes for every colour: `--c332288`, `.c332288`, `.line-c332288`."""
    used = [*WORK_COLOURS.values(), *ROLE_COLOURS.values(), *SIZE_COLOURS, OTHER_COLOUR]
    names = {colour_class(colour): colour for colour in used}
    light = "".join(f"--{name}:{colour};" for name, colour in names.items())
    dark = "".join(f"--{name}:{on_dark(colour)};" for name, colour in names.items())
    classes = "".join(f".{name}{{fill:var(--{name})}}.line-{name}{{stroke:var(--{name})}}" for name in names)
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}{classes}\n"


def on_dark(colour: str) -> str:
    """`colour`, mixed with as much white as it takes to be seen on a dark ground."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    for step in range(21):
        mixed = [round(part + (255 - part) * step / 20) for part in parts]
        if contrast(mixed) >= LEAST_CONTRAST:
            break
    return "#" + "".join(f"{part:02x}" for part in mixed)


def contrast(parts: list[int]) -> float:
    """The contrast ratio of WCAG 2 between a colour's red, green and blue and the dark ground."""
    ground = [int(DARK_GROUND[at : at + 2], 16) for at in (1, 3, 5)]
    lighter, darker = sorted((_luminance(parts), _luminance(ground)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(parts: list[int]) -> float:
    linear = [(part / 255 / 12.92) if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
