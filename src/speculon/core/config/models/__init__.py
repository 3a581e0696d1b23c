"""Settings of each model, in one file that people and the server write.

Precedence: request > flag > environment > the model's settings > `speculon.toml` > default.
"""

from speculon.core.config.models.fields import HOMES, PoolSettings, needs_new_worker
from speculon.core.config.models.merge import Methods, ModelSettings
from speculon.core.config.models.store import FILE, ModelSettingsFile, models_file

__all__ = [
    "FILE",
    "HOMES",
    "Methods",
    "ModelSettings",
    "ModelSettingsFile",
    "PoolSettings",
    "models_file",
    "needs_new_worker",
]
