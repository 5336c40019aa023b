"""Writes what the what-ifs in the documents print, as they print it now.

Owns which blocks these are: indented ones that begin with `ssdplan solve --model`, and have output behind the command.
Run `python -m docs.printed` in the repository's root when plans change, and look at the difference.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(__file__).parent
INDENT = "    "
BLOCK = re.compile(
    rf"(?:^{INDENT}ssdplan solve --model .*\n(?:{INDENT} .*\n)*)\n(?P<printed>(?:^(?:{INDENT}.*)?\n)+)", re.M
)


def printed(command: str, first: str) -> str:
    """What `command` prints from the line `first` on, its indentation aside. Raises AssertionError where it fails or
    prints no such line."""
    words = shlex.split(command.replace("\\\n", ""))
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    lines = done.stdout.rstrip().splitlines()
    begins = [number for number, line in enumerate(lines) if line.split() == first.split()]
    assert begins, f"{command}: prints no line {first.strip()!r}"
    return "".join(f"{INDENT}{line}".rstrip() + "\n" for line in lines[begins[0] :])


def renewed(text: str) -> tuple[str, int]:
    """A document with what its commands print, and how many of them have anything printed."""
    found = 0

    def write(match: re.Match[str]) -> str:
        nonlocal found
        before = match["printed"]
        if before.lstrip("\n").lstrip().startswith("ssdplan "):
            return match[0]
        found += 1
        command = match[0].removesuffix(before)
        return command + printed(command, before.strip("\n").splitlines()[0]) + "\n"

    return BLOCK.sub(write, text), found


def main() -> None:
    """Write them all again, and say which documents have changed."""
    for path in sorted((*DIRECTORY.glob("*.md"), DIRECTORY.parent / "README.md")):
        before = path.read_text(encoding="utf-8")
        text, found = renewed(before)
        path.write_text(text, encoding="utf-8")
        if found:
            print(f"{path.name}: {found} commands, {'changed' if text != before else 'as before'}")


if __name__ == "__main__":
    main()
