"""A checkpoint's image processor, as transformers has it, on Pillow alone: torchvision is not needed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from speculon.checkpoints.gguf.header import is_gguf
from speculon.checkpoints.locate import first_line, locate
from speculon.core.config import EngineConfig
from speculon.core.errors import ModelError
from speculon.core.media.files import ImageLimits
from speculon.core.media.prompts import Images, Processor

# where the class of a processor may be named, the first that has one counts
FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
IMAGE_TOKENS = ("image_token_id", "image_token_index")  # of a config


def images_of(config: EngineConfig, *, files: bool) -> Images:
    """The images of prompts to a model; with `files` also from files, which no client may name."""
    load = partial(load_processor, config.model, trust_remote_code=config.trust_remote_code)
    return Images(load, ImageLimits.of(config.serve, files=files))


def load_processor(path: str | Path, *, trust_remote_code: bool = False) -> Processor:
    """The processor in a model's folder. Raises `ModelError` where it has none, with the reason.

    Only its image processor and its tokenizer are loaded; videos and sounds are not read.
    """
    from speculon.checkpoints.reading import quiet  # with transformers, which takes seconds

    folder = locate(path, trust_remote_code=trust_remote_code)
    if is_gguf(folder):
        raise ModelError("a GGUF file has no image processor")
    with quiet():
        image_id = placeholder_id(folder, trust_remote_code)
        try:
            inner = build(processor_class(folder, trust_remote_code), folder, trust_remote_code)
        except ModelError:
            raise
        except Exception as error:  # files that lack something, a package that is not installed
            raise ModelError(f"its processor cannot be loaded: {reason(error, folder)}") from error
    if not getattr(inner, "image_token", None):
        raise ModelError(f"{type(inner).__name__} has no placeholder of an image")
    return Processor(inner, image_id)


def reason(error: Exception, folder: Path) -> str:
    """Without the place of the folder, which clients do not learn."""
    return first_line(ModelError(str(error).replace(str(folder), folder.name)))


def placeholder_id(folder: Path, trust_remote_code: bool) -> int:
    """The token whose rows the model replaces by features of images."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise ModelError(f"its config cannot be read: {reason(error, folder)}") from error
    found = (getattr(config, name, None) for name in IMAGE_TOKENS)
    token = next((token for token in found if token is not None), None)
    if getattr(config, "vision_config", None) is None or token is None:
        raise ModelError(f"{config.model_type} is a model of text alone")
    return int(token)


def processor_class(folder: Path, trust_remote_code: bool) -> type[Any]:
    """That its files name, else the usual one of its config."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

    files = [folder / name for name in FILES if (folder / name).is_file()]
    if not files[:1] or files == [folder / FILES[-1]]:
        raise ModelError("its folder has no processor_config.json and no preprocessor_config.json")
    names = (json.loads(file.read_text(encoding="utf-8")).get("processor_class") for file in files)
    if name := next(filter(None, names), None):
        found = processor_class_from_name(name)
    else:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        found = PROCESSOR_MAPPING.get(type(config), None)
    if found is None:
        raise ModelError(f"transformers has no processor {name or ''} for it")
    return found


def build(base: type[Any], folder: Path, trust_remote_code: bool) -> Any:
    """A processor without the parts for videos and sounds, which need torchvision and more."""
    from transformers import AutoImageProcessor, AutoTokenizer

    class OfImages(base):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return argument and super().check_argument_for_proper_class(argument_name, argument)

    OfImages.__name__ = base.__name__
    settings, _ = base.get_processor_dict(folder, local_files_only=True)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    parts: list[Any] = []
    for name in base.get_attributes():
        if name == "tokenizer":
            parts.append(AutoTokenizer.from_pretrained(folder, **options))
        elif name == "image_processor":
            parts.append(AutoImageProcessor.from_pretrained(folder, backend="pil", **options))
        else:
            parts.append(None)
    return OfImages.from_args_and_dict(parts, settings)
