"""`ssdplan train`: profile, solve and run in one command, with everything chosen that nobody gives.

Owns what is chosen, what of an earlier try is still valid, and what is said of both. The three commands do the work, a
process each: what a profile or a solver leaves in memory is not the run's.
"""

from .entry import command

__all__ = ["command"]
