"""How people call the projects that publish drafters, and the dtypes of weights."""

from __future__ import annotations

AUTHORS = {
    "safeailab": "SafeAILab",
    "specforge": "SpecForge",
    "modelopt": "ModelOpt",
    "angelslim": "AngelSlim",
    "nebius": "nebius",
    "speculators": "speculators",
    "z-lab": "z-lab",
    "deepspec": "DeepSpec",
    "meta": "Meta",
}
DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
