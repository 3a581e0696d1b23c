"""The command line.

A command's module under `commands` is imported when the command runs; these modules never import torch.
"""

import gc

from speculon.cli import measuring, training, writing
from speculon.cli.app import app

__all__ = ["app", "main", "measuring", "training", "writing"]


def main() -> None:
    try:
        app()
    finally:
        gc.freeze()  # else Python's end looks through every object of torch and transformers: a second
