"""A draft model's checkpoint: refused where it does not fit, its memory estimated from its headers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speculon.core.errors import ModelError
from speculon.runtimes.torch.loading.memory import expected_layers, model_needs
from tests.tiny.conftest import TINY, tiny_model, tiny_target
from tests.tiny.scripted import make_engine


@pytest.mark.parametrize("name", TINY)
def test_the_estimate_of_a_checkpoint_is_what_it_takes(name: str, tmp_path: Path) -> None:
    """From the config and the file's header alone; windows are found later and change no size."""
    tiny_model(name).save_pretrained(tmp_path)
    target = tiny_target(name)
    needs = model_needs(tmp_path, torch.float32, torch.device("cpu"), rows=7, scored=5)
    if name != "gpt_neox":  # whose config here names key-value heads that the model does not have
        assert [layer.bytes_per_token for layer in needs.layers] == [
            layer.bytes_per_token for layer in target.layers
        ]
    assert needs.bytes_fixed == pytest.approx(target.num_bytes, rel=1e-3), "files hold buffers, too"
    assert needs.bytes_scratch == target.needs(7, 5).bytes_scratch > 0
    assert len(expected_layers(target.model.config, torch.float32)) == len(target.layers)


def test_a_missing_draft_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        make_engine(tiny_target("llama"), speculation={"draft": str(tmp_path / "nowhere")})
