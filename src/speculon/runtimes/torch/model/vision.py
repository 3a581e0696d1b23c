"""The vision tower of a target: features of images, and the places that they take in a forward."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from speculon.core.errors import EngineError, InvalidParameter, SpeculonError, UnsupportedModel
from speculon.core.images import ImageInput, PromptImages
from speculon.runtimes.torch.batch import ImageRows

log = logging.getLogger("speculon")

KEPT_BYTES = 256 << 20  # of features of recent images, for the chunks of a prompt and the turns of a chat

PlacedFeatures = tuple[tuple[Tensor, Tensor], ...]  # rows of the flat batch [n], their features [n, D]

_placed: ContextVar[PlacedFeatures] = ContextVar("speculon_placed", default=())


class Vision:
    """Of a vision-language model. Features replace the embeddings of placeholder tokens.

    Raises `UnsupportedModel` for a model whose images do more than that.
    """

    def __init__(self, model: PreTrainedModel):
        self.base: Any = model.base_model
        self.dtype, self.device = model.dtype, model.device
        config, name = model.config, type(model).__name__
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        self.token: int = -1 if token is None else token
        embedding = model.get_input_embeddings()
        if not 0 <= self.token < len(embedding.weight):
            raise UnsupportedModel(f"{name} has no placeholder token of images in its vocabulary")
        if getattr(config.vision_config, "deepstack_visual_indexes", None):
            raise UnsupportedModel(f"{name} adds features of images to several layers")
        if getattr(config.get_text_config(), "use_bidirectional_attention", None):
            raise UnsupportedModel(f"{name} sets attention in both directions by its config")
        self.has_axes = hasattr(self.base, "get_rope_index")
        # of each token whether it is of an image: where a model asks for it, images see themselves in whole
        self.both = "token_type_ids" in inspect.signature(model.forward).parameters
        self._arguments = inspect.signature(self.base.get_image_features).parameters
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        embedding.register_forward_hook(put_features)

    def read(self, prompt: Sequence[int], images: Sequence[ImageInput]) -> PromptImages:
        """The images of a prompt with their positions and blocks. Raises `InvalidParameter`."""
        for image in images:
            check_input(image)
        rows = [row for image in images for row in image.rows]
        places = [i for i, token in enumerate(prompt) if token == self.token]
        if rows != places:
            counts = f"{len(rows)} rows of images, and {len(places)} placeholder tokens in the prompt"
            raise InvalidParameter("images", len(images), counts)
        for image in images:
            if unknown := image.inputs.keys() - self._arguments.keys():
                raise InvalidParameter("images", sorted(unknown), "are no inputs of this vision tower")
        try:
            positions = self._positions(prompt, images) if self.has_axes else None
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidParameter("images", len(images), f"positions cannot be made: {error!r}") from error
        blocks = tuple(runs_of(rows)) if self.both else ()
        if blocks and blocks[-1].stop == len(prompt):
            raise InvalidParameter("images", len(images), "the prompt must go on after its last image")
        return PromptImages(tuple(images), positions, blocks)

    def _positions(self, prompt: Sequence[int], images: Sequence[ImageInput]) -> np.ndarray:
        """On three axes, by the model's own code; [3, n]."""
        ids = torch.tensor([list(prompt)])
        grids = torch.cat([torch.from_numpy(image.inputs["image_grid_thw"]) for image in images])
        of_image = (ids == self.token).int()
        positions, _ = self.base.get_rope_index(ids, mm_token_type_ids=of_image, image_grid_thw=grids)
        return positions[:, 0].numpy()

    def fault(self, image: ImageInput) -> SpeculonError | None:
        """Why an image has no features; they are kept for the forward that follows."""
        try:
            self.features(image)
        except SpeculonError as error:
            return error
        except Exception as error:  # of any model code, or a lack of memory
            log.exception("no features of the image %s", image.digest)
            return EngineError(f"the vision tower failed: {type(error).__name__}")
        return None

    @torch.inference_mode()
    def features(self, image: ImageInput) -> Tensor:  # [n, D]
        """Of one image, a row for each placeholder. Raises `InvalidParameter` where the numbers differ."""
        kept = self._kept.pop(image.digest, None)
        if kept is None:
            out = self.base.get_image_features(**dict(self.inputs(image)), return_dict=True).pooler_output
            parts = out if isinstance(out, (list, tuple)) else [out]
            kept = torch.cat([part.flatten(0, -2) for part in parts])
            if not torch.isfinite(kept).all():
                raise InvalidParameter("images", image.digest, "its features are not finite")
        self._kept[image.digest] = kept
        if len(kept) != len(image.rows):
            counts = f"{len(kept)} features for {len(image.rows)} placeholder tokens"
            raise InvalidParameter("images", image.digest, counts)
        return kept

    def forget_old(self) -> None:
        """After a step: what it needs stays until its end."""
        while len(self._kept) > 1 and sum(x.nbytes for x in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)

    def inputs(self, image: ImageInput) -> Iterator[tuple[str, Tensor]]:
        """What the tower reads, by argument."""
        for name, values in image.inputs.items():
            tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    @contextmanager
    def placed(self, images: Sequence[ImageRows]) -> Iterator[None]:
        """Within the context, these rows of the forward that runs take features of images."""
        at = tuple(
            (torch.tensor(rows, device=self.device), self.features(image)[which.start : which.stop])
            for image, which, rows in images
        )
        token = _placed.set(at)
        try:
            yield
        finally:
            _placed.reset(token)
            self.forget_old()


def check_input(image: Any) -> None:
    """Raises `InvalidParameter` for what is no input."""
    if not isinstance(image, ImageInput):
        raise InvalidParameter("images", type(image).__name__, "must be ImageInput")
    if not image.rows or not all(type(row) is int for row in image.rows):
        raise InvalidParameter("images", image.rows, "rows must be positions in the prompt, at least one")
    if not image.digest or not all(isinstance(values, np.ndarray) for values in image.inputs.values()):
        raise InvalidParameter("images", image.digest, "needs a digest, and arrays as inputs")


def put_features(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """A hook of the embedding [1, T, D]."""
    for rows, features in _placed.get():
        out = out.index_copy(1, rows, features.to(out.dtype)[None])
    return out


def runs_of(rows: Sequence[int]) -> Iterator[range]:
    """Runs of consecutive numbers."""
    cuts = [i + 1 for i, (a, b) in enumerate(pairwise(rows)) if b != a + 1]
    for first, last in pairwise([0, *cuts, len(rows)]) if rows else ():
        yield range(rows[first], rows[last - 1] + 1)


def vision_of(model: PreTrainedModel) -> tuple[Vision | None, str]:
    """The vision tower of a model, or None, and why it takes no images."""
    if not hasattr(model.base_model, "get_image_features"):
        return None, "a text model"
    try:
        return Vision(model), ""
    except UnsupportedModel as error:
        return None, str(error)
