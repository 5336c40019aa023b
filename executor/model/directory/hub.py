"""Models by name: a directory as it is, anything else from the Hugging Face cache or hub.

Owns what is downloaded: safetensors, configuration and tokenizer, never a pickle and never code; and that a name is
looked up only where the user gave it. What a document names is a directory of this machine, or nothing.
"""

from pathlib import Path

from ssdplan.plans.errors import UsageError

WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def told_model(name: str, source: Path) -> Path:
    """The directory of the model that a plan or a run.json, `source`, names; the hub is not asked, for whoever wrote
    that document would choose the download. Raises UsageError when there is no such directory."""
    if not Path(name).is_dir():
        raise UsageError(
            f"{source}: its model is not at {name}; name it by --model DIR, or --model NAME for one of the hub"
        )
    return Path(name)


def find_model(name: str) -> Path:
    """The directory of a model that the user named. Raises UsageError when there is no such directory and no such
    model."""
    path = Path(name)
    if path.exists():
        return path
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise UsageError(f"{name}: no such directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(WANTED)))
    except (HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"{name}: neither a directory nor a model that can be had here: {first}") from error
