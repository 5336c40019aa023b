"""The errors that native I/O raises, in a module of their own so that the extension module can import them."""

import errno


class IoError(OSError):
    """A failed open, read, write, flush or close.

    `errno`, `strerror` and `filename` are OSError's; `strerror` also names the action. `offset` and `nbytes` (bytes)
    are those of the block that failed, or 0 where the action has none. A read that met the end of its file has the
    errno ENODATA.
    """

    offset: int = 0
    nbytes: int = 0


class DriveError(IoError):
    """The drive, or the way to it, failed on these bytes (EIO and its like). Others of it may still be readable."""


class NoSpaceError(IoError):
    """No space is left, or a quota or a limit on the size of files is met."""


class LostVolumeError(IoError):
    """The volume is gone: unplugged, offline, or no longer exported. Nothing on it can be reached."""


class InvalidRequestError(IoError):
    """The drive or its file system cannot do what was asked, such as direct I/O, or in this alignment."""


_TYPES: dict[int, type[IoError]] = {
    **dict.fromkeys((errno.EIO, errno.EILSEQ, errno.ETIMEDOUT, errno.EBADMSG, errno.EUCLEAN), DriveError),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), NoSpaceError),
    **dict.fromkeys(
        (errno.ENODEV, errno.ENXIO, errno.ENOMEDIUM, errno.ENOLINK, errno.EREMOTEIO, errno.ESTALE, errno.ESHUTDOWN),
        LostVolumeError,
    ),
    **dict.fromkeys((errno.EINVAL, errno.EOPNOTSUPP), InvalidRequestError),
}


def io_error(code: int, message: str, path: str, offset: int, nbytes: int) -> IoError:
    """The error of an errno; of the type for it where there is one."""
    error = _TYPES.get(code, IoError)(code, message, path)
    error.offset, error.nbytes = offset, nbytes
    return error
