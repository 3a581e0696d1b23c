"""What can be trained, by the name that the command line gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from speculon.train.draft import SmallDraft
from speculon.train.eagle3 import Eagle3
from speculon.train.run import Kind

KINDS: Mapping[str, Callable[[Any], Kind]] = {"eagle3": Eagle3, "draft": SmallDraft}
