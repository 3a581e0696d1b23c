"""Names become proposers: the table, this process, installed packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculon.core.config import SpeculationConfig
from speculon.core.errors import UnknownMethod
from speculon.core.types import NO_DRAFT, Reason
from speculon.decoding.rounds import Drafted
from speculon.runtimes.torch.drafters import table
from speculon.speculation.proposers.base import TargetFacts
from speculon.speculation.proposers.compose import Proposers
from speculon.speculation.proposers.registry import has_weights, known_methods
from tests.builders import draft_once, make_sequence

FACTS = TargetFacts(vocab_size=10, max_context=100)

PLUGIN = """
from speculon.core.types import Draft, Limits

class Constant:
    limits = Limits()
    log = []
    def __init__(self, config, target):
        self.token = config.options.get("token", 3)
    def admit(self, seq):
        self.log.append(("admit", seq.id))
    def propose(self, seqs, budgets):
        return [Draft((self.token,) * (k + 2), ("constant",) * (k + 2)) for k in budgets]
    def observe(self, seqs, verdicts):
        pass
    def release(self, seq):
        self.log.append(("release", seq.id))
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package whose entry point names a proposer."""
    (tmp_path / "constant_plugin.py").write_text(PLUGIN)
    info = tmp_path / "constant_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: constant-plugin\nVersion: 1.0\n")
    points = "[speculon.proposers]\nconstant = constant_plugin:Constant\n"
    points += "[speculon.drafters]\nheavy = constant_plugin:Constant\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)


def propose(proposers: Proposers, method: str, k: int = 4) -> Drafted:
    seq = make_sequence([1, 2, 3], methods=(method,))
    drafted, _ = draft_once(proposers, seq, {method: k})
    proposers.release(seq)
    return drafted


def test_an_installed_package_adds_a_method_by_its_entry_point(plugin: None):
    assert "constant" in known_methods()
    proposers = Proposers(SpeculationConfig(options={"token": 7}), FACTS)
    assert proposers.lacking("constant") is None
    drafted = propose(proposers, "constant")
    assert drafted.draft.tokens == (7, 7, 7, 7), "a draft beyond its budget is cut"
    assert drafted.asked and drafted.reason is None
    import constant_plugin  # type: ignore[import-not-found]

    assert [what for what, _ in constant_plugin.Constant.log] == ["admit", "release"]


def test_a_package_adds_a_drafter_with_weights_for_the_runtime_to_make(plugin: None):
    assert "heavy" in known_methods() and has_weights("heavy") and not has_weights("constant")
    assert Proposers(SpeculationConfig(), FACTS).lacking("heavy") is Reason.NO_DRAFTER
    import constant_plugin  # type: ignore[import-not-found]

    assert table.find("heavy") is constant_plugin.Constant
    made = constant_plugin.Constant(SpeculationConfig(), FACTS)
    assert Proposers(SpeculationConfig(draft={"heavy": "x"}), FACTS, {"heavy": made}).find("heavy") is made


def test_a_draft_outside_the_vocabulary_costs_its_sequence_the_speculation_and_nothing_else(
    plugin: None, caplog: pytest.LogCaptureFixture
):
    proposers = Proposers(SpeculationConfig(options={"token": 10}), FACTS)
    proposers.lacking("constant")
    drafted = propose(proposers, "constant")
    assert drafted.draft == NO_DRAFT and drafted.reason is Reason.ERROR
    assert "outside of the target's vocabulary of 10" in caplog.text


def test_names_resolve_to_methods():
    proposers = Proposers(SpeculationConfig(), FACTS)
    assert [proposers.chain(name) for name in ("off", "auto", "ngram")] == [(), ("suffix",), ("ngram",)]
    assert [proposers.lacking(name) for name in ("auto", "ngram", "draft_model")] == [
        None,
        None,
        Reason.NO_DRAFTER,
    ]
    known = "off, auto, dflash, draft_model, eagle3, gemma4_assistant, grammar, mtp, ngram, pard, prediction"
    known += ", suffix, synthetic"
    with pytest.raises(UnknownMethod, match=f"method = 'eagle9': must be one of {known}"):
        proposers.lacking("eagle9")


def test_a_draft_for_an_unknown_method_is_refused():
    with pytest.raises(UnknownMethod, match="method = 'eagle9': must be one of"):
        Proposers(SpeculationConfig(draft={"eagle9": "somewhere"}), FACTS)
