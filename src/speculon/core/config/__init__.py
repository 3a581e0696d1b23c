"""Everything a user can set, described once: the same fields feed Python, flags, environment and file.

Precedence: request > keyword or flag > environment (`SPECULON_*`) > the model's settings (`config.models`) >
file (`speculon.toml`, or `SPECULON_CONFIG`) > default.
"""

from speculon.core.config.engine import EngineConfig
from speculon.core.config.file import MODELS, VARIABLE, settings_file
from speculon.core.config.sampling import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_GRAMMAR,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOPS,
    SamplingParams,
    Structured,
    Thinking,
)
from speculon.core.config.serve import ServeConfig
from speculon.core.config.speculation import (
    GIVEN_DRAFTS,
    MAX_DRAFTS,
    MAX_PREDICTION,
    USUAL_DRAFTS,
    Acceptance,
    AdaptiveConfig,
    ModelObject,
    PolicyName,
    RequestSpeculation,
    SpeculationConfig,
)

__all__ = [
    "GIVEN_DRAFTS",
    "MAX_BAD_WORDS",
    "MAX_BIASES",
    "MAX_DRAFTS",
    "MAX_GRAMMAR",
    "MAX_LOGPROBS",
    "MAX_PREDICTION",
    "MAX_SAMPLES",
    "MAX_STOPS",
    "MODELS",
    "USUAL_DRAFTS",
    "VARIABLE",
    "Acceptance",
    "AdaptiveConfig",
    "EngineConfig",
    "ModelObject",
    "PolicyName",
    "RequestSpeculation",
    "SamplingParams",
    "ServeConfig",
    "SpeculationConfig",
    "Structured",
    "Thinking",
    "settings_file",
]
