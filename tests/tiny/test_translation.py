"""A draft model with another tokenizer: no token changes, and its drafts are what it means by them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.checkpoints.reading import load_tokenizer
from speculon.checkpoints.spelling import Overlap
from speculon.core.config import SamplingParams
from speculon.core.errors import WrongPair
from speculon.core.types import Draft, Reason, Stop
from speculon.decoding.sampling import NEVER
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.runtimes.torch.drafters.draft_model.proposer import DraftModel
from speculon.speculation.proposers.translation import Translation, tokenizer_overlap
from tests.tiny.checkpoint import write_stranger
from tests.tiny.conftest import VOCAB
from tests.tiny.language_drafts import (
    asking,
    byte_level,
    characters,
    drafted,
    engine_of,
    off,
    sentencepiece,
    shuffled,
    some,
    write,
    write_draft,
    write_same,
)
from tests.tiny.requests import plain, requests_of
from tests.tiny.scripted import Request, proposer_of, texts_of

LACKING = 8
STYLES = {"byte-level": byte_level, "SentencePiece": sentencepiece}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights under other ids, of all its tokens or of most; a model that knows nothing."""
    home = tmp_path_factory.mktemp("other-tokenizers")
    for style, make in STYLES.items():
        write_same(home / style, whole := shuffled(more=5), make(whole))
    write_same(home / "lacking", part := shuffled(lacking=LACKING, more=5), byte_level(part))
    write_draft(home / "random", byte_level(part), 7)
    return home


def drafts(folder: Path, method: str = "draft_model") -> dict[str, Any]:
    return {method: str(folder)}


@cache
def overlap(folder: Path) -> Overlap | None:
    return tokenizer_overlap(Tokenizer(load_tokenizer(folder)), characters(), str(folder))


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("style", STYLES)
def test_the_same_weights_under_other_ids_are_always_right(style: str, mode: str, home: Path) -> None:
    """The noise belongs to target ids, so sampled drafts are the target's tokens, too."""
    results = write(engine_of(drafts(home / style)), asking(mode, 5, "draft_model")[:4])
    drafted_tokens, accepted = drafted(results)
    assert texts_of(results) == some(mode, results) and drafted_tokens == accepted > 100


def test_a_map_shifted_by_one_is_seen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Translation.logits
    monkeypatch.setattr(Translation, "logits", lambda self, logits: real(self, logits.roll(1, -1)))
    results = write(engine_of(drafts(home / "byte-level")), asking("greedy", 5, "draft_model")[:3])
    drafted_tokens, accepted = drafted(results)
    assert texts_of(results) == some("greedy", results) and accepted < drafted_tokens / 4


def test_tokens_that_are_read_under_their_own_ids_are_seen(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Translation, "read", lambda self, tokens: tokens)
    results = write(engine_of(drafts(home / "byte-level")), asking("greedy", 5, "draft_model")[:3])
    drafted_tokens, accepted = drafted(results)
    assert texts_of(results) == some("greedy", results) and accepted < drafted_tokens / 4


def test_a_pard_model_may_have_another_tokenizer(tmp_path: Path) -> None:
    pieces = shuffled(more=5)
    mask = {"pard_token": len(pieces) - 1}
    folder = write_same(tmp_path, pieces, byte_level(pieces), **mask)
    results = write(engine_of(drafts(folder, "pard")), asking("greedy", 3, "pard"))
    first = sum(result.stats.accepted_at[0] for result in results.values())
    rounds = sum(result.stats.rounds for result in results.values())
    assert texts_of(results) == plain("greedy") and first > rounds * 0.8, (
        "the first draft is the target's own"
    )


def test_drafts_under_rejection_are_reproducible(home: Path) -> None:
    by_rejection = {"method": "draft_model", "acceptance": "rejection", "num_speculative_tokens": 3}
    requests = [replace(r, speculation=by_rejection) for r in requests_of("sampled")[:3]]
    first, again = (
        texts_of(write(engine_of(drafts(home / "random")), order)) for order in (requests, requests[::-1])
    )
    assert first == again and first != {key: plain("sampled")[key] for key in first}


def test_a_grammar_of_tokens_that_it_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digit can be drafted: there the draft ends, since no q is over nothing."""
    made: list[Draft] = []
    propose = DraftModel.propose

    def noted(self: DraftModel, *arguments: Any) -> list[Draft]:
        made.extend(propose(self, *arguments))
        return made[-len(arguments[0]) :]

    monkeypatch.setattr(DraftModel, "propose", noted)
    pieces = [piece for piece in shuffled(more=5) if not piece.isdigit()]
    engine = engine_of(drafts(write_same(tmp_path, pieces, byte_level(pieces))))
    requests = []
    for i, settings in enumerate(({"temperature": 0.0}, {"seed": 4}, {})):
        params = SamplingParams(max_tokens=24, structured={"regex": "[a-c]{3}[0-9]{5}[a-c]{3}"}, **settings)
        requests.append(Request([5, 6, 7], params, {"method": "draft_model"}, f"q{i}"))
    results = write(engine, requests)
    for result in results.values():
        assert re.fullmatch("[a-c]{3}[0-9]{5}[a-c]{3}", characters().decode(result.tokens))
        assert result.stats.rounds and not result.stats.reasons[Reason.ERROR]
    with_q = [draft.probs for draft in made if draft.probs is not None]
    assert with_q and all(q.isfinite().all() for q in with_q)
    assert {draft.stop for draft in made if not draft.tokens} == {Stop.GRAMMAR}
    assert {key: texts_of(results)[key] for key in list(results)[:2]} == off(requests[:2])


# the map


def test_columns_without_partner_are_never_drafted(home: Path) -> None:
    pairs = overlap(home / "lacking")
    assert pairs is not None
    translation = Translation(pairs, VOCAB, 93, torch.device("cpu"))
    logits = torch.arange(93.0)[None] + torch.tensor([[0.0], [100.0]])
    found: Tensor = translation.logits(logits)
    assert found.shape == (2, VOCAB) and (found[0] == NEVER).sum() == LACKING
    for token in range(VOCAB):
        expected = logits[:, pairs.partners[token]] if token in pairs.partners else torch.full((2,), NEVER)
        assert torch.equal(found[:, token], expected)
    assert translation.read([*pairs.partners]) == [*pairs.partners.values()]


def test_ids_beyond_either_model_have_no_partner() -> None:
    pairs = Overlap({0: 5, 1: 1, 9: 2}, 1, 1.0, 1.0, {2: 7, 3: 0}.get)
    translation = Translation(pairs, 4, 4, torch.device("cpu"))
    assert translation.read([0, 1, 2, 3]) == [1, 1, 1, 0]
    assert translation.logits(torch.arange(6.0)[None]).tolist() == [[NEVER, 1.0, NEVER, NEVER]]


def test_too_small_an_overlap_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_stranger(tmp_path / "stranger")
    monkeypatch.setattr(
        "speculon.runtimes.torch.drafters.draft_model.model_drafter.load_target",
        lambda *_, **__: pytest.fail("loaded"),
    )
    with pytest.raises(WrongPair, match="different tokenizers: 0% of the tokens of a sample text"):
        engine_of(drafts(folder))


def test_equal_ids_need_no_map(tmp_path: Path) -> None:
    folder = write_draft(tmp_path, characters().inner, 1)
    engine = engine_of(drafts(folder))
    drafter: Any = proposer_of(engine, "draft_model")
    assert drafter.translation is None and overlap(folder) is None
