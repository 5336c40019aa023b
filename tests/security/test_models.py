"""Model directories that came from somebody else: what an export takes of them."""

import pytest
import torch

from ssdplan.executor.model.directory.export import TensorEntry, copy_model, export_model, require_copyable
from ssdplan.plans.errors import UsageError
from tests.made.models import make_model, make_tokenizer


@pytest.fixture
def source(tmp_path):
    make_model("llama", tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    (tmp_path / "secret").write_text("a key")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["merges.txt", "additional_chat_templates/x.jinja", "generation_config.json"])
def test_a_link_that_leads_out_of_the_model_is_not_published(source, tmp_path, name):
    entries = [TensorEntry("w", (2,), torch.float32)]
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "secret")
    for export in (
        lambda to: copy_model(to, source),
        lambda to: export_model(to, source=source, entries=entries, tensors=iter([("w", torch.ones(2))])),
    ):
        with pytest.raises(UsageError, match=rf"{name}: is a link that leads out of the model.*secret"):
            export(tmp_path / "exported")
        assert not (tmp_path / "exported").exists()
    with pytest.raises(UsageError, match="leads out of the model"):  # and a run says so before its first step
        require_copyable(source)


def test_links_within_a_hubs_cache_are_followed(source, tmp_path):
    """Its snapshots are links to blobs beside them."""
    snapshot = tmp_path / "models--someone--repo" / "snapshots" / "abc"
    blobs = tmp_path / "models--someone--repo" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in source.iterdir():
        (blobs / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    copy_model(tmp_path / "exported", snapshot)
    exported = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    assert exported == {path.name: path.read_bytes() for path in source.iterdir()}
