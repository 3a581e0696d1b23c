from __future__ import annotations
from typing import Any
def claim(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return None, settings
