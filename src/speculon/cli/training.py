"""`speculon train`: one command for each form of drafter."""

from __future__ import annotations

import typer

from speculon.cli.app import PAGE, Json, app, command
from speculon.commands.options import Given, settings_from
from speculon.commands.sections import TRAIN, Commands
from speculon.train.settings import (
    DraftSettings,
    FlashSettings,
    HeadSettings,
    MtpSettings,
    SparkSettings,
    TrainSettings,
)

trainer = typer.Typer(
    cls=Commands,
    help="Train a drafter for your target, on your texts.",
    context_settings=PAGE,
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(trainer, name="train", rich_help_panel=TRAIN)


@command(TRAIN, trainer, "eagle3")
@settings_from(TrainSettings, HeadSettings)
def train_eagle3(as_json: Json = False, given: Given = {}) -> None:  # noqa: B006
    """Train an EAGLE-3 head, which drafts from the target's hidden states.

    After an interruption the same command resumes.
    """
    from speculon.commands.train import run

    run("eagle3", given, as_json)


@command(TRAIN, trainer, "draft")
@settings_from(TrainSettings, DraftSettings)
def train_draft(as_json: Json = False, given: Given = {}) -> None:  # noqa: B006
    """Distil a small language model that drafts for the target.

    After an interruption the same command resumes.
    """
    from speculon.commands.train import run

    run("draft", given, as_json)


@command(TRAIN, trainer, "dflash")
@settings_from(TrainSettings, FlashSettings)
def train_dflash(as_json: Json = False, given: Given = {}) -> None:  # noqa: B006
    """Train a DFlash block drafter, which drafts a block of tokens in one call.

    After an interruption the same command resumes.
    """
    from speculon.commands.train import run

    run("dflash", given, as_json)


@command(TRAIN, trainer, "dspark")
@settings_from(TrainSettings, SparkSettings)
def train_dspark(as_json: Json = False, given: Given = {}) -> None:  # noqa: B006
    """Train a DSpark block drafter: DFlash with a Markov and a confidence head.

    After an interruption the same command resumes.
    """
    from speculon.commands.train import run

    run("dspark", given, as_json)


@command(TRAIN, trainer, "mtp")
@settings_from(TrainSettings, MtpSettings)
def train_mtp(as_json: Json = False, given: Given = {}) -> None:  # noqa: B006
    """Train the MTP modules of the target's own checkpoint further.

    After an interruption the same command resumes.
    """
    from speculon.commands.train import run

    run("mtp", given, as_json)
