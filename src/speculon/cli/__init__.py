"""The command line: a module for each command. Importing them imports no torch."""

import gc

from speculon.cli import bench, chat, check, demo, generate, inspect, pull, serve, train
from speculon.cli.app import app

__all__ = ["app", "bench", "chat", "check", "demo", "generate", "inspect", "main", "pull", "serve", "train"]


def main() -> None:
    try:
        app()
    finally:
        gc.freeze()  # else Python's end looks through every object of torch and transformers: a second
