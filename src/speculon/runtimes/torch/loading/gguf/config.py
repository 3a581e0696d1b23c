"""The config of a GGUF file, made of its metadata; and the tokens that end its texts."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from speculon.checkpoints.gguf.header import CONTROL, TEMPLATE, TOKENS, read_gguf
from speculon.checkpoints.gguf.metadata import Metadata
from speculon.checkpoints.locate import first_line
from speculon.core.errors import CorruptWeights, UnsupportedModel
from speculon.decoding.text.tokenizer import ends_of_turn
from speculon.runtimes.torch.loading.gguf.architectures import architecture_of

TOKEN_TYPES = "tokenizer.ggml.token_type"


def read_config(path: Path) -> PreTrainedConfig:
    """Raises `UnsupportedModel` for what speculon does not know, `CorruptWeights` for impossible values."""
    header = read_gguf(path)
    architecture, values = architecture_of(header), Metadata(header)
    try:
        fields = architecture.fields(values)
    except (ArithmeticError, IndexError) as error:
        raise CorruptWeights(f"{path}: its metadata has impossible values ({error})") from error
    values.refuse_unread()
    model_type = fields.pop("model_type")
    try:
        return CONFIG_MAPPING[model_type](**fields)
    except Exception as error:  # of its class, which checks some values
        raise UnsupportedModel(f"{path}: {first_line(error.__cause__ or error)}") from error


def set_ends(path: Path, model: PreTrainedModel) -> None:
    """Sets the tokens that end a sequence: those of the metadata, and those that end a turn of the template.

    Many files name only the token that ends a document.
    """
    header = read_gguf(path, lists=frozenset({TOKENS}))
    tokens, types = header.metadata.get(TOKENS), header.metadata.get(TOKEN_TYPES)
    ids = set(header.end_ids)
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        controls = {token: i for i, (token, of) in pairs if of == CONTROL}
        for key, template in header.metadata.items():
            if key.startswith(TEMPLATE):  # the default one, or one by its name
                ids |= ends_of_turn(controls.get, str(template))
    if ids and model.generation_config is not None:
        model.generation_config.eos_token_id = sorted(ids)
