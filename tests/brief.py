"""A profile that takes seconds, for tests that use one and look at none of its figures.

Owns what such a profile leaves out and how short its measurements are; for a process that does nothing else.
"""

from ssdplan.profiler import contention, layer_bench, profile

WINDOW_SECONDS = 0.02
"""Of compute and drive beside each other."""

_measure_model = profile.measure_model


def measure_little() -> None:
    """From here on a profile of this process has nothing of what could be kept of activations, looks once at what the
    process grows by, and measures in short windows. That is most of its time."""
    profile.measure_model = lambda *given, **more: _measure_model(*given, **{**more, "activations": None})
    layer_bench.GROWING_ROUNDS = layer_bench.GROWING_RUNS = 1
    contention.SHORTEST_WINDOW_SECONDS = WINDOW_SECONDS
