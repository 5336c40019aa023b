"""Models by name: a directory as it is, anything else from the Hugging Face cache or hub.

Owns what is downloaded: safetensors, configuration and tokenizer, never a pickle and never code.
"""

from pathlib import Path

from ssdplan.plans.errors import UsageError

WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def find_model(name: str) -> Path:
    """The directory of a model. Raises UsageError when there is no such directory and no such model."""
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
