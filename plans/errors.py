"""The errors that people see, each with the exit code that its command ends with.

Owns the meaning of exit codes (docs/architecture.md). Every message names the thing, the value and the way out; it
never carries a traceback's worth of detail. Broken invariants are asserts, not these.
"""


class SsdplanError(Exception):
    """Something the user can act on. `exit_code` is what the command returns."""

    exit_code = 1
    said = False
    """Whether another process has told the user, so that this one need not."""


class UsageError(SsdplanError, ValueError):
    """Wrong usage: an option, a file or a value that cannot be what was meant."""

    exit_code = 2


class WrongTypeError(UsageError, TypeError):
    """A value from Python whose type is none that an argument takes."""


class InfeasibleError(SsdplanError):
    """No plan satisfies the budgets; the message names the constraint and the least budget that would do."""

    exit_code = 3


class MemoryBudgetError(SsdplanError):
    """A memory budget cannot be kept on this machine."""

    exit_code = 4


class DiskFullError(SsdplanError):
    """A volume has no space for what must be written."""

    exit_code = 5


class IoFailure(SsdplanError):  # noqa: N818 - native.IoError is the engine's own
    """A read, write or flush failed, or a volume cannot do direct I/O."""

    exit_code = 6


class StallError(IoFailure):
    """No operation of a step ended for as long as the user allows."""

    left_open: object = None
    """What hangs still works on its memory and its volumes: they are kept with the error, and go with the process."""


class StoreError(SsdplanError):
    """A store that is corrupt, foreign, incomplete or in use by another run."""

    exit_code = 7


class MismatchError(SsdplanError):
    """A plan, profile, model or data that do not belong together, or a model that cannot be trained exactly."""

    exit_code = 8


class RankError(SsdplanError):
    """Another rank ended, does not answer, or is not as this one is."""

    exit_code = 9
    at = ""
    """Which rank waited at which operation, where it did."""


class NumericalError(SsdplanError):
    """A loss or gradient that is not finite: training cannot go on."""


INTERRUPTED = 130
"""What a command that was asked to end returns."""


class SaidInterruption(KeyboardInterrupt):
    """An interruption of which the user is told elsewhere."""


class StoppedWithSnapshot(SaidInterruption):
    """A run that was asked to end, and has: with a snapshot, and having said how it goes on. No error."""


def error_of(exit_code: int, message: str) -> SsdplanError:
    """The error that another of our processes ended with, said again here."""
    kinds = (
        UsageError, InfeasibleError, MemoryBudgetError, DiskFullError, IoFailure, StoreError, MismatchError, RankError
    )  # fmt: skip
    return next((kind for kind in kinds if kind.exit_code == exit_code), SsdplanError)(message)


def said_by_another(error: SsdplanError) -> SsdplanError:
    """The error, of which another process tells the user."""
    error.said = True
    return error


NO_MEMORY = (
    "can't allocate memory",
    "could not create a primitive",
    "std::bad_alloc",
    "can't start new thread",
    "Cannot allocate memory",
)
"""What torch's allocator, the oneDNN in it, products without oneDNN, Python, for the stack of a thread, and the C
library, whose words others repeat, say where an operating system gives no more."""


def says_no_memory(error: BaseException) -> bool:
    """Whether an error is that the operating system gives no more memory: torch's allocator has no error of its own."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    )


def first_line(error: BaseException) -> str:
    """What another library's error says, as a part of a line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
