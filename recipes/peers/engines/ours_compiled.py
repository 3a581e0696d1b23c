"""speculon with its operations compiled."""

from __future__ import annotations

from ours import Speculon
from worker import serve


class Compiled(Speculon):
    compile = "now"


if __name__ == "__main__":
    serve(Compiled)
