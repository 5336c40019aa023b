"""Plots: pictures (PNG) of plans, runs, sweeps and profiles. All need matplotlib: import one when it is asked for."""
