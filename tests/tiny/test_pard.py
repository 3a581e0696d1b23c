"""PARD models change no token, and each of their rows is the formula's, whatever happens to their pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.core.errors import ConfigError, ModelError, UnsupportedModel
from speculon.core.types import Reason
from speculon.runtimes.torch.drafters.draft_model.pard import Pard
from speculon.runtimes.torch.drafters.families import family_of
from speculon.runtimes.torch.kv.draft_pages import DraftPages, TokenRange
from tests.tiny.conftest import VOCAB, build, tiny_target
from tests.tiny.language_drafts import (
    MASK,
    asking,
    characters,
    engine_of,
    some,
    watch_pard,
    write,
    write_draft,
    write_pard,
    wrong_blocks,
)
from tests.tiny.requests import accepted_lengths, plain, requests_of
from tests.tiny.scripted import Request, run, texts_of

SETTINGS: dict[str, dict[str, Any]] = {
    "prompts in chunks": {"max_batch_tokens": 7},
    "a page each token": {"block_size": 1},
    "a small pool": {"num_blocks": 40, "max_num_seqs": 8},
    "no prefix cache": {"prefix_cache": False},
    "stock layers": {"fuse": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pard(tmp_path_factory.mktemp("pard"))


def drafts(folder: Path) -> dict[str, Any]:
    return {"pard": str(folder)}


@pytest.mark.parametrize("k", [1, 3, 7])
def test_no_token_changes_and_every_row_is_the_formulas(k: int, folder: Path) -> None:
    watch = watch_pard(plain("greedy"))
    results = write(engine_of(drafts(folder)), asking("greedy", k, "pard"))
    assert texts_of(results) == plain("greedy")
    assert accepted_lengths(results) >= set(range(k + 1))
    assert not wrong_blocks(watch)
    assert len(watch.blocks) > 20 and max(len(rows) for _, rows in watch.blocks) == k


@pytest.mark.parametrize("setting", SETTINGS)
def test_whatever_happens_to_its_pages(setting: str, folder: Path) -> None:
    watch = watch_pard(plain("greedy"))
    results = write(engine_of(drafts(folder), **SETTINGS[setting]), asking("greedy", 5, "pard"))
    assert texts_of(results) == plain("greedy") and not wrong_blocks(watch)


def test_each_row_has_its_own_q(folder: Path) -> None:
    """Rejection sampling with drafts of one forward: reproducible, and some are accepted."""
    judged = {"method": "pard", "acceptance": "rejection", "num_speculative_tokens": 4}
    requests = [replace(r, speculation=judged) for r in requests_of("sampled")[:3]]
    first, again = (texts_of(write(engine_of(drafts(folder)), order)) for order in (requests, requests[::-1]))
    assert first == again != {key: plain("sampled")[key] for key in first}


def test_methods_switch_within_a_batch(folder: Path, tmp_path: Path) -> None:
    other = write_draft(tmp_path, characters().inner, 2)
    engine = engine_of({**drafts(folder), "draft_model": str(other)}, num_blocks=60, max_num_seqs=8)
    results = write(engine, asking("greedy", 3, "pard", "draft_model", "off", "auto", "suffix"))
    assert texts_of(results) == plain("greedy")
    used = {name for result in results.values() for name in result.stats.speculation().by_source}
    assert used >= {"pard", "draft_model"}


def test_beyond_its_context_rounds_are_plain(tmp_path: Path) -> None:
    folder = write_pard(tmp_path, max_position_embeddings=40)
    watch = watch_pard(plain("greedy"))
    results = write(engine_of(drafts(folder)), asking("greedy", 7, "pard"))
    assert texts_of(results) == plain("greedy")
    assert any(result.stats.reasons[Reason.CONTEXT_LIMIT] for result in results.values())
    assert max(len(tokens) + len(rows) for tokens, rows in watch.blocks) == 40


def test_a_model_in_memory() -> None:
    model = build("llama", 1, vocab_size=VOCAB + 1, pard_token=MASK)
    watch = watch_pard()
    results = write(engine_of({"pard": model}), asking("greedy", 3, "pard")[:3])
    assert texts_of(results) == some("greedy", results) and watch.blocks and not wrong_blocks(watch)


# what a folder is


def test_a_folder_is_recognised_by_its_mask_token(folder: Path, tmp_path: Path) -> None:
    assert family_of(folder).method == "pard"
    assert "PARD language model LlamaForCausalLM: 2 layers" in family_of(folder).summary
    assert family_of(write_draft(tmp_path / "plain", characters().inner, 1)).method == "draft_model"
    other = write_draft(tmp_path / "alias", characters().inner, 1, spd_type="pard", mask_token_id=MASK)
    assert family_of(other).method == "pard"


@pytest.mark.parametrize("token", [None, VOCAB + 1, -1, "x"])
def test_a_model_without_a_mask_token_is_refused(token: Any, tmp_path: Path) -> None:
    folder = write_pard(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pard_token": token}))
    with pytest.raises(ModelError, match="needs a mask token .* below 97 in its config"):
        engine_of(drafts(folder))


def test_a_recurrent_model_is_refused() -> None:
    class Recurrent:
        name, recurrent = "recurrent", True

    with pytest.raises(UnsupportedModel, match="would have seen mask tokens"):
        Pard.take(object.__new__(Pard), Recurrent())  # type: ignore[arg-type]


def test_the_method_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="pard needs draft = a checkpoint"):
        Pard.build(engine_of({}).config.speculation, None)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=3, temperature=0)
    results = run(tiny_target("llama"), [Request([5, 6], params, {"method": "pard"})])
    assert results["r", 0].stats.reasons == {Reason.NO_DRAFTER: 2}


# planted errors


def test_mask_positions_off_by_one_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_rows = Pard._run

    def early(self: Pard, ranges: list[TokenRange], ids: Any, scored: list[int]) -> Tensor:
        return run_rows(self, ranges, ids, [max(0, row - 1) for row in scored])

    monkeypatch.setattr(Pard, "_run", early)
    watch = watch_pard(plain("greedy"))
    results = write(engine_of(drafts(folder)), asking("greedy", 3, "pard"))
    assert texts_of(results) == plain("greedy") and wrong_blocks(watch)


def test_masks_that_are_counted_as_tokens_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = DraftPages.mark

    def more(self: DraftPages, ranges: list[TokenRange]) -> None:
        mark(self, [(seq, start, end + 2) for seq, start, end in ranges])

    monkeypatch.setattr(DraftPages, "mark", more)
    watch = watch_pard(plain("greedy"))
    results = write(engine_of(drafts(folder)), asking("greedy", 3, "pard"))
    assert texts_of(results) == plain("greedy") and wrong_blocks(watch)
