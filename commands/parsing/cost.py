"""What a training costs: its options, for the commands that know a plan. Owns how amounts are written, and which
options belong together."""

import re
from dataclasses import dataclass

import click

from ssdplan.plans.analysis.cost import Price, Training
from ssdplan.plans.errors import UsageError

from .types import Value, positive

MOST_TOKENS = 10**18
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Costed:
    """The values of these options."""

    tokens: int | None
    price: tuple[Price, ...] | None
    power: tuple[float, ...] | None
    power_price: float | None


def cost_options() -> tuple[click.Option, ...]:
    """In the order in which help shows them."""
    return (
        click.Option(
            ["--tokens"],
            type=Value("tokens", tokens),
            metavar="N",
            help="also print the hours to train on so many tokens, such as 300M, 1B (10^9) or 2.5T; steps alone, "
            "without a pause; and how much of the drive's life that takes [none]",
        ),
        click.Option(
            ["--price"],
            type=Value("price", prices),
            metavar="X|X/h",
            help="with --tokens, also print the cost: X is the price of all that trains, such as 2500, X/h that of an "
            "hour of it, such as 0.79/h, in any currency; of a sweep one for all values or X,Y,... for each [none]",
        ),
        click.Option(
            ["--power"],
            type=Value("power", watts),
            metavar="XW",
            help="with --tokens, also print the kWh: the watts that all that trains draws, such as 450W or 1.2kW; of a "
            "sweep as --price [none]",
        ),
        click.Option(
            ["--power-price"],
            type=Value("power price", power_price),
            metavar="X/kWh",
            help="with --power, also print what that costs: the price of a kilowatt-hour, such as 0.30/kWh, in the "
            "currency of --price [none]",
        ),
    )


def trainings_of(options: Costed, points: int = 1) -> tuple[Training, ...]:
    """What is asked of each of `points` plans; empty where nothing is. Raises UsageError."""
    if options.tokens is None:
        given = {"--price": options.price, "--power": options.power, "--power-price": options.power_price}
        if alone := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{alone[0]}: is of a training; say how long it is with --tokens N")
        return ()
    if options.power_price is not None and options.power is None:
        raise UsageError("--power-price: is of what the machine draws; say that with --power, such as 450W")
    for name, several in (("--price", options.price), ("--power", options.power)):
        if several is not None and len(several) not in (1, points):
            there = f"the sweep has {points} values" if points > 1 else "there is one plan"
            raise UsageError(
                f"{name}: {len(several)} are given, and {there}; give one, or one for each value of a sweep"
            )
    every_price, every_power = options.price or (None,), options.power or (None,)
    return tuple(
        Training(
            options.tokens,
            every_price[point % len(every_price)],
            every_power[point % len(every_power)],
            options.power_price,
        )
        for point in range(points)
    )


def tokens(text: str) -> int:
    """`300M`, `1B`, `2.5T`, `1e9`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    value = round(float(match[1]) * _SCALE[match[2]]) if match else 0
    if not 0 < value <= MOST_TOKENS:
        raise UsageError(f"{text!r} is no number of tokens; write 300M, 1B or 2.5T, or all digits")
    return value


def prices(text: str) -> tuple[Price, ...]:
    """`0.79/h`, `2500`, or several. Raises UsageError."""
    return tuple(_price(part.strip()) for part in text.split(","))


def _price(text: str) -> Price:
    amount, slash, unit = text.partition("/")
    if slash and unit.strip() != "h":
        raise UsageError(f"{text!r} is no price; write 0.79/h for an hour, or 2500 for the machine")
    return Price(positive(amount), hourly=bool(slash))


def watts(text: str) -> tuple[float, ...]:
    """`450W`, `1.2kW`, or several, in watts. Raises UsageError."""
    return tuple(_watts(part.strip()) for part in text.split(","))


def _watts(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) *(k?)w", text.lower())
    if not match:
        raise UsageError(f"{text!r} is no power; write watts or kilowatts: 450W, 1.2kW")
    return positive(match[1]) * (1000 if match[2] else 1)


def power_price(text: str) -> float:
    """`0.30/kWh`. Raises UsageError."""
    amount, _, unit = text.partition("/")
    if unit.strip().lower() != "kwh":
        raise UsageError(f"{text!r} is no price of energy; write that of a kilowatt-hour: 0.30/kWh")
    return positive(amount)
