"""Settings of each model, in one file that people and the server write.

Precedence: request > flag > environment > the model's settings > `speculon.toml` > default.
"""

from speculon.core.config.models.fields import HOMES as HOMES
from speculon.core.config.models.fields import PoolSettings as PoolSettings
from speculon.core.config.models.fields import needs_new_worker as needs_new_worker
from speculon.core.config.models.merge import Methods as Methods
from speculon.core.config.models.merge import ModelSettings as ModelSettings
from speculon.core.config.models.store import FILE as FILE
from speculon.core.config.models.store import ModelSettingsFile as ModelSettingsFile
from speculon.core.config.models.store import models_file as models_file
