"""Why a file could not be written for lack of space: a full disk, a quota, or a limit on the size of files.

Owns which errors of the operating system mean that, and their words.
"""

import errno
import resource

from .units import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def file_size_limit() -> int | None:
    """Bytes that this process may write into one file (RLIMIT_FSIZE, `ulimit -f`); None: any."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def no_room(error: OSError) -> str:
    """What there is too little of, as part of a line; empty where `error` is about something else."""
    if error.errno == errno.ENOSPC:
        return "no space left"
    if error.errno == errno.EDQUOT:
        return "this user's disk quota is used up"
    if error.errno != errno.EFBIG:
        return ""
    limit = file_size_limit()
    if limit is None:
        return "larger than any file may be on this file system"
    return f"larger than a file may be: its size is limited to {format_bytes(limit)} (ulimit -f); raise that limit"
