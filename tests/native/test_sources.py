"""What the native sources may use of C++: nothing that lies in several C++ libraries at once."""

import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "native" / "src"
STREAMS = ("fstream", "sstream", "iostream", "istream", "ostream", "iomanip", "locale", "regex", "filesystem")


def test_no_source_uses_streams():
    """Streams crashed on a machine with a GPU, beside PyTorch's libraries, which export parts of a C++ library."""
    found = [
        (path.name, header)
        for path in SOURCES.iterdir()
        for header in re.findall(r"#include <(?:pybind11/stl/)?(\w+)(?:\.h)?>", path.read_text("utf-8"))
        if header in STREAMS
    ]
    assert not found
