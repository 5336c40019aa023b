"""Keeps an old plan when a new one is written to the same file: beside it, under a number, and says so.

Owns where it goes. What may be replaced, `outputs.py` says; what is written is the command's business.
"""

from pathlib import Path

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import format_bytes

from .outputs import require_names

MOST_KEPT = 10_000


def require_name_to_keep(path: Path) -> None:
    """Refuse to replace a plan whose name is too long for a number behind it, before the work. Raises UsageError."""
    if path.is_file() and path.stat().st_size:
        require_names(path.parent, [_kept_name(path, MOST_KEPT - 1)], path, "-o")


def save_plan(plan: Plan, path: Path) -> str:
    """Write a plan; one that was there is kept first, as NAME-0, NAME-1 and so on, the first that is free.

    Returns what became of it, in words, or nothing. Raises UsageError where either cannot be written.
    """
    before = path.read_bytes() if path.is_file() else b""
    if not before or before == plan.text().encode():
        plan.save(path)
        return ""
    kept = _keep(before, path)
    plan.save(path)
    return f"replaced {path} ({_words(kept)}); the one before is {kept}"


def _keep(content: bytes, path: Path) -> Path:
    for number in range(MOST_KEPT):
        kept = path.with_name(_kept_name(path, number))
        try:
            with kept.open("xb") as file:
                file.write(content)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{kept}: cannot keep the plan that was {path}: {error.strerror}") from error
        return kept
    raise UsageError(f"{path}: {MOST_KEPT} plans were kept beside it; remove some, or name another file with -o")


def _kept_name(path: Path, number: int) -> str:
    return f"{path.stem}-{number}{path.suffix}"


def _words(kept: Path) -> str:
    """What a plan was asked for, as far as it can still be read."""
    try:
        plan = Plan.load(kept)
    except UsageError:
        return "of another version, or edited"
    decision = plan.decision
    batch = decision.micro_batch_size * decision.micro_batches
    return f"{plan.model.name}, {format_bytes(decision.host_budget_bytes)}, batch {batch}"
