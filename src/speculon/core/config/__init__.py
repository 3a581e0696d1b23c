"""Everything a user can set, described once: the same fields feed Python, flags, environment and file.

Precedence: request > keyword or flag > environment (`SPECULON_*`) > the model's settings (`config.models`) >
file (`speculon.toml`, or `SPECULON_CONFIG`) > default.
"""

from speculon.core.config.engine import EngineConfig as EngineConfig
from speculon.core.config.file import MODELS as MODELS
from speculon.core.config.file import VARIABLE as VARIABLE
from speculon.core.config.file import settings_file as settings_file
from speculon.core.config.sampling import IN_PYTHON as IN_PYTHON
from speculon.core.config.sampling import MAX_BIASES as MAX_BIASES
from speculon.core.config.sampling import MAX_GRAMMAR as MAX_GRAMMAR
from speculon.core.config.sampling import MAX_LOGPROBS as MAX_LOGPROBS
from speculon.core.config.sampling import MAX_SAMPLES as MAX_SAMPLES
from speculon.core.config.sampling import LogitsProcessor as LogitsProcessor
from speculon.core.config.sampling import SamplingParams as SamplingParams
from speculon.core.config.sampling import Structured as Structured
from speculon.core.config.sampling import Thinking as Thinking
from speculon.core.config.serve import ServeConfig as ServeConfig
from speculon.core.config.speculation import GIVEN_DRAFTS as GIVEN_DRAFTS
from speculon.core.config.speculation import MAX_DRAFTS as MAX_DRAFTS
from speculon.core.config.speculation import MAX_PREDICTION as MAX_PREDICTION
from speculon.core.config.speculation import USUAL_DRAFTS as USUAL_DRAFTS
from speculon.core.config.speculation import AcceptanceSetting as AcceptanceSetting
from speculon.core.config.speculation import AdaptiveConfig as AdaptiveConfig
from speculon.core.config.speculation import ModelObject as ModelObject
from speculon.core.config.speculation import RequestSpeculation as RequestSpeculation
from speculon.core.config.speculation import SpeculationConfig as SpeculationConfig
