"""What the tokens of two tokenizers spell, and which of them are the same: a draft model may have another
tokenizer than its target.

Each token is a row of bytes, however its vocabulary writes them: byte-level (GPT-2: `Ġthe`) or as
SentencePiece does (`▁the`, and `<0x0A>` for a byte). Tokens of equal bytes are partners, one to one. So a
position of the draft model is a position of the target, and its probabilities are those of target tokens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from speculon.checkpoints.headers import read_json
from speculon.core.errors import CorruptWeights, WrongPair
from speculon.decoding.text.tokenizer import BYTE_PIECE, Tokenizer, byte_alphabet

SPACE = "\u2581"  # how SentencePiece writes a space
LEAST_SHARE = 0.5  # guess: with fewer partners nearly every draft would end at a token that has none
SAMPLE = (
    "The committee met on Tuesday, 14 March 2023, and decided that the old bridge should be repaired before "
    "winter. Most people who live nearby had asked for it; some of them wanted a new one instead.\n\n"
    "def mean(values: list[float]) -> float:\n"
    '    """The average of some numbers."""\n'
    "    if not values:\n        raise ValueError('no values')\n"
    "    return sum(values) / len(values)\n"
)

SpelledToken = tuple[bool, bytes]  # whether a token is special, and what it spells


@dataclass(frozen=True)
class Spelling:
    """What each token of a tokenizer spells, by id. Tokens whose bytes are unknown are left out."""

    keys: Mapping[int, SpelledToken]
    single: frozenset[int]  # tokens of one byte that exist beside a token for the same character
    size: int  # tokens, with those that are left out

    @cached_property
    def by_key(self) -> dict[SpelledToken, list[int]]:
        """The ids that spell the same; those that a text is made of come first."""
        ids: dict[SpelledToken, list[int]] = defaultdict(list)
        for token in sorted(self.keys, key=lambda token: (token in self.single, token)):
            ids[self.keys[token]].append(token)
        return dict(ids)

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str) -> Spelling:
        """Of a loaded tokenizer, which is that of `name`. Raises `WrongPair` as `read` does."""
        if (spell := getattr(tokenizer.inner, "spell", None)) is not None:  # it knows the bytes itself
            keys, single = spell()
            return cls(keys, single, len(keys))
        backend = getattr(tokenizer.inner, "backend_tokenizer", None)
        if backend is None:
            class_name = type(tokenizer.inner).__name__
            raise WrongPair(
                f"{name}: its tokenizer differs from the other model's, and drafts cannot be translated, "
                "because the "
                f"bytes of its tokens are not known ({class_name})"
            )
        return cls.read(json.loads(backend.to_str()), name)

    @classmethod
    def read(cls, file: Any, name: str) -> Spelling:
        """From the parsed tokenizer.json of `name`.

        Raises `WrongPair` where its tokens' bytes are not known.
        """
        try:
            spell = speller(file, name)
            added = {
                entry["id"]: (bool(entry["special"]), entry["content"])
                for entry in file.get("added_tokens") or ()
            }
            pieces = {token: piece for piece, token in entries(file["model"]["vocab"]) if token not in added}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise CorruptWeights(f"{name}: its tokenizer.json has no usable vocabulary") from None
        keys = {token: (special, content.encode()) for token, (special, content) in added.items()}
        for token, piece in pieces.items():
            spelt = spell(piece)
            if spelt is not None:
                keys[token] = (False, spelt)
        single = frozenset(token for token, piece in pieces.items() if BYTE_PIECE.fullmatch(piece))
        return cls(keys, single, len(added) + len(pieces))


@dataclass(frozen=True)
class Overlap:
    """Which tokens of a target a draft model with another tokenizer has."""

    partners: Mapping[int, int]  # target id -> draft id, one to one
    other: int  # the draft id for what no draft token spells
    share: float  # of the target's tokens, those that have a partner; special ones do not count
    of_text: float  # the same of the tokens of a sample text
    # target id without a partner -> the draft id that spells most of its end
    find_ending: Callable[[int], int | None] = lambda token: None

    @classmethod
    def of(
        cls,
        target: Spelling,
        draft: Spelling,
        sample: Seq[int],
        roles: Iterable[tuple[int | None, int | None]] = (),
        other: int = 0,
    ) -> Overlap:
        """`sample` are the target's ids of `SAMPLE`; `roles` are pairs of special ids of one meaning."""
        partners = {
            mine: theirs
            for key, ids in target.by_key.items()
            for mine, theirs in zip(ids, draft.by_key.get(key, ()), strict=False)
        }
        special = {token for token, key in target.keys.items() if key[0]}
        share = len(partners.keys() - special) / max(1, target.size - len(special))
        of_text = sum(token in partners for token in sample) / max(1, len(sample))
        for mine, theirs in roles:
            if mine is not None and theirs is not None and theirs not in partners.values():
                partners.setdefault(mine, theirs)
        return cls(partners, other, share, of_text, partial(ending, target, draft))

    def __str__(self) -> str:
        return (
            f"{self.of_text:.0%} of the tokens of a sample text and {self.share:.0%} of the vocabulary have "
            f"a partner of equal bytes"
        )

    def read_as(self, token: int) -> int:
        """The draft id for a target's token where the draft model reads it."""
        partner = self.partners.get(token)
        if partner is None:
            partner = self.find_ending(token)
        return self.other if partner is None else partner

    def check(self, draft: str | Path, target: str | Path) -> Overlap:
        """Itself. Raises `WrongPair` where too few tokens have a partner."""
        if self.of_text < LEAST_SHARE:
            raise WrongPair(
                f"different tokenizers: {self} in {draft} for {target}; a draft model needs at least "
                f"{LEAST_SHARE:.0%} of the text"
            )
        return self


def ending(target: Spelling, draft: Spelling, token: int) -> int | None:
    """The draft token that spells the longest end of a target's token; None where none does."""
    special, spelt = target.keys.get(token, (True, b""))
    candidates = (draft.by_key.get((False, spelt[start:])) for start in range(0 if special else len(spelt)))
    return next((ids[0] for ids in candidates if ids), None)


def compare(draft: Path, target: Path) -> Overlap | None:
    """The overlap of two folders' tokenizers; None where every token of the target has the same id.

    Raises `WrongPair` where one has no tokenizer.json, or where the bytes of its tokens are not known.
    """
    files = [tokenizer_file(folder) for folder in (draft, target)]
    if same_ids(*(vocabulary(file, folder) for file, folder in zip(files, (draft, target), strict=True))):
        return None
    mine, theirs = (
        Spelling.read(file, str(folder)) for file, folder in zip(files, (draft, target), strict=True)
    )
    return Overlap.of(theirs, mine, encoded(SAMPLE, target))


def encoded(text: str, folder: Path) -> list[int]:
    """The text in tokens of the tokenizer.json in a folder."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library has no error of its own
        raise CorruptWeights(f"{folder / 'tokenizer.json'}: not readable as a tokenizer ({error})") from error
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def same_ids(draft: Mapping[str, int], target: Mapping[str, int]) -> bool:
    """Whether every token of the target has the same id in the draft model, which may have more tokens."""
    return all(draft.get(token) == i for token, i in target.items())


def tokenizer_file(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WrongPair(f"{folder}: it has no tokenizer.json, so the tokenizers cannot be compared")
    return read_json(path, CorruptWeights)


def vocabulary(file: Any, folder: Path) -> dict[str, int]:
    """Token -> id, from a parsed tokenizer.json."""
    try:
        added = {entry["content"]: entry["id"] for entry in file.get("added_tokens") or ()}
        return dict(entries(file["model"]["vocab"])) | added
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CorruptWeights(f"{folder / 'tokenizer.json'}: it has no usable vocabulary") from None


def entries(vocab: Any) -> Iterator[tuple[str, int]]:
    """(token, id): of a table, or of a list with scores."""
    yield from (
        vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
    )


def speller(file: Any, name: str) -> Callable[[str], bytes | None]:
    """How this tokenizer writes bytes. Raises `ModelError` for ways that are not known here."""
    model, around = file["model"], [file.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    if "ByteLevel" in set(strings_in(around)):
        return spell_byte_level
    if model.get("byte_fallback") or "Metaspace" in strings_in(around) or SPACE in strings_in(around):
        return spell_sentencepiece
    model_type = model.get("type") or "unknown"
    raise WrongPair(
        f"{name}: its tokenizer differs from the other model's, and drafts cannot be translated, because the "
        f"bytes of its tokens are not known (a {model_type} model, neither byte-level nor SentencePiece's)"
    )


def strings_in(part: Any) -> Iterator[str]:
    """All texts in nested tables and lists."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from strings_in(inner)


def spell_byte_level(piece: str) -> bytes | None:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in piece])
    except KeyError:
        return None


def spell_sentencepiece(piece: str) -> bytes | None:
    if BYTE_PIECE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()
