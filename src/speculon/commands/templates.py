"""Chats with a checkpoint that has no chat template are refused before it is loaded."""

from __future__ import annotations

from speculon.checkpoints.headers import lacks_chat_template
from speculon.checkpoints.locate import locate
from speculon.config import EngineConfig
from speculon.errors import InvalidRequest, ModelError


def refuse_chat(config: EngineConfig, advice: str) -> None:
    """Raises `InvalidRequest` where the checkpoint has no template."""
    if lacks_template(config):
        raise InvalidRequest(f"{config.model} has no chat template: {advice}")


def lacks_template(config: EngineConfig) -> bool:
    """False where there is no checkpoint: loading it tells why."""
    try:
        return lacks_chat_template(locate(config.model, trust_remote_code=config.trust_remote_code))
    except ModelError:
        return False
