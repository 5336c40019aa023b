"""Errors of reading JSON, in words for users: those of Python name settings of Python, which are no user's business."""

import sys


def json_reason(error: Exception) -> str:
    """Why `json.loads` refused a text, in one line. Python reads no integer of more than some thousand digits."""
    if "set_int_max_str_digits" in str(error):
        return f"a number in it has more than {sys.get_int_max_str_digits():,} digits"
    return str(error)
