"""Keeps an old plan when a new one is written to the same file: beside it, under a number, and says so.

Owns what may be replaced, and where it goes. What is written is the command's business.
"""

from pathlib import Path

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import format_bytes

from .options import document_at

MOST_KEPT = 10_000


def require_plan(path: Path) -> None:
    """Refuse to write a plan over what is none, before the work; a file without a byte can be replaced by anything.
    Raises UsageError."""
    if document_at(path) != "plan" and path.is_file() and path.stat().st_size:
        raise UsageError(f"{path}: exists and is not a plan; name another file with -o")


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
        kept = path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            with kept.open("xb") as file:
                file.write(content)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{kept}: cannot keep the plan that was {path}: {error.strerror}") from error
        return kept
    raise UsageError(f"{path}: {MOST_KEPT} plans were kept beside it; remove some, or name another file with -o")


def _words(kept: Path) -> str:
    """What a plan was asked for, as far as it can still be read."""
    try:
        plan = Plan.load(kept)
    except UsageError:
        return "of another version, or edited"
    decision = plan.decision
    batch = decision.micro_batch_size * decision.micro_batches
    return f"{plan.model.name}, {format_bytes(decision.host_budget_bytes)}, batch {batch}"
