"""The error that native I/O raises. It stands alone so that the extension module can import it."""


class IoError(OSError):
    """A failed open, read, write, flush or close.

    `errno`, `strerror` and `filename` are OSError's; `strerror` also names the action. `offset` and `nbytes` (bytes)
    are those of the block that failed, or 0 where the action has none. A read that met the end of its file has the
    errno ENODATA.
    """

    offset: int = 0
    nbytes: int = 0
