"""Memory that drafters will take, from the headers of their files."""

from __future__ import annotations

from speculon.checkpoints.headers import read_checkpoint
from speculon.checkpoints.locate import locate
from speculon.core.config import EngineConfig
from speculon.runtimes.torch.drafters.families import DRAFT_MODEL, PARD
from speculon.runtimes.torch.drafters.mtp.tensors import MTP, mtp_of
from speculon.runtimes.torch.loading.memory import LargestStep, model_needs, weight_bytes
from speculon.runtimes.torch.needs import Needs

LANGUAGE_MODELS = (DRAFT_MODEL, PARD)


def drafter_needs(config: EngineConfig, step: LargestStep) -> list[Needs]:
    """The needs of every drafter that `config` names, beside a target with this largest step."""
    return [needs_of(method, path, config, step) for method, path in config.speculation.drafts.items()]


def needs_of(method: str, path: object, config: EngineConfig, step: LargestStep) -> Needs:
    assert isinstance(path, str), "a server has no model objects"
    if method in LANGUAGE_MODELS:
        bits = config.speculation.draft_quantization
        return model_needs(path, *step, config.fuse, config.compile == "now", bits)
    if method == MTP:
        return Needs(bytes_fixed=mtp_of(locate(path)).num_parameters * step.dtype.itemsize)
    return Needs(bytes_fixed=weight_bytes(read_checkpoint(locate(path)), step.dtype))
