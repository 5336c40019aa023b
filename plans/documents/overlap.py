"""Overlap on the device: what it has of other layers while one runs.

Owns the choices, and with which other choices of a decision each can be. What it means for a step's buffers is
`schedule/vertical.py`'s.
"""

from typing import Literal, Protocol

Overlap = Literal["all", "parameters", "none"]


class Decided(Protocol):
    """`Decision` of `plan.py`: what decides whether the device can do with less."""

    @property
    def overlap(self) -> Overlap: ...
    @property
    def unified_memory(self) -> bool: ...
    @property
    def schedule(self) -> str: ...
    @property
    def exchange_behind(self) -> bool: ...
    @property
    def matrices_on_device(self) -> bool | None: ...


def unfit_overlap(decision: Decided) -> str:
    """Why a decision cannot have its overlap; empty where it can."""
    if decision.overlap == "all":
        return ""
    if decision.unified_memory or decision.schedule != "vertical":
        return f"overlap = {decision.overlap}: only with schedule vertical and a device"
    if decision.exchange_behind or decision.matrices_on_device:
        return f"overlap = {decision.overlap}: exchange_behind and matrices_on_device need gradients to stay; take all"
    return ""
