"""The plans in plans/examples: the what-if command of each, and how they are made again.

    python -m tests.planner.examples

from the root of the project writes them all; test_examples.py compares them with what the planner finds now.
"""

from pathlib import Path

from ssdplan import cli

DIRECTORY = Path(__file__).parents[2] / "plans" / "examples"
ROWS = ("--sequence-length", "2048", "--micro-batch-sizes")
WORKSTATION = ("--gpu", "rtx-4090", "--host-memory", "64GiB", "--ssd", "samsung-990-pro*2")

EXAMPLES: dict[str, tuple[str, ...]] = {
    "llama-3.1-8b-rtx-4090-64gib": ("--model", "llama-3.1-8b", *WORKSTATION, *ROWS, "4"),
    "llama-3.1-70b-rtx-4090-64gib": ("--model", "llama-3.1-70b", *WORKSTATION, *ROWS, "2"),
    "gpt-175b-a100-40gb-400gb": (
        "--model", "gpt-175b", "--gpu", "a100-40gb", "--cpu", "xeon-8462y", "--host-memory", "400GB",
        "--ssd", "samsung-pm9a3", *ROWS, "2",
    ),
    "llama-3.2-1b-laptop": (
        "--model", "llama-3.2-1b", "--gpu", "none", "--host-memory", "6GiB", "--ssd", "samsung-980-pro:1TB",
        "--sequence-length", "1024", "--micro-batch-sizes", "1",
    ),
}  # fmt: skip


def file_of(name: str) -> Path:
    return DIRECTORY / f"{name}.json"


def main() -> None:
    """Write every example again."""
    for name, options in EXAMPLES.items():
        file_of(name).unlink(missing_ok=True)  # else it would be kept beside the new one
        code = cli.main(["solve", *options, "-o", str(file_of(name))])
        assert code == 0, f"{name}: exit {code}"


if __name__ == "__main__":
    main()
