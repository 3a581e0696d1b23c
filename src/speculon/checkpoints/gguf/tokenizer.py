"""The tokenizer of a GGUF file, put together from its header. Token ids are those of llama.cpp.

Two kinds are read: byte-level BPE (`gpt2`), whose words are cut as `tokenizer.ggml.pre` says, and the BPE of
SentencePiece (`llama`), which merges whatever has the highest score. Others are refused by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from speculon.checkpoints.gguf.header import CONTROL, TOKENS, GgufHeader, chat_template, read_gguf
from speculon.checkpoints.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from speculon.core.errors import CorruptWeights, UnsupportedModel
from speculon.decoding.text.tokenizer import byte_alphabet

log = logging.getLogger("speculon")

KEY = "tokenizer.ggml"
LISTS = frozenset({TOKENS, f"{KEY}.merges"})
NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4  # types of tokens
EMBEDDINGS = "token_embd.weight"
ELSEWHERE = "take the model's safetensors files, or LLM(..., tokenizer=None) for token ids alone"
# Texts that llama.cpp takes for control tokens, whatever type the file gives them.
ENDS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>
    <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
    <｜end▁of▁sentence｜> [e~[ <|channel|> <|message|> <|start|> <|constrain|>
"""
INFILL = {  # where the file does not name the token of that role
    "pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "sep": "<|file_sep|>",
}
# Phi-3's control tokens take the white space that follows them, but for these.
PHI3, PLAIN_IN_PHI3 = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
SPACE = "\u2581"  # how SentencePiece writes one


def load_gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer that the header of the file describes, with its chat templates.

    Raises `UnsupportedModel` for a kind that is not known here, or whose ids would not be those of the file,
    and `CorruptWeights` for a vocabulary that contradicts itself.
    """
    vocabulary = Vocabulary(read_gguf(path, lists=LISTS))
    kind = vocabulary.setting("model")
    if kind not in KINDS:
        known = " and ".join(KINDS)
        raise vocabulary.unsupported(f"its tokenizer is of type {kind!r}, and only {known} are supported")
    vocabulary.check()
    tokenizer, defaults = KINDS[kind](vocabulary)
    tokenizer.add_tokens([*vocabulary.added()])
    vocabulary.check_added(tokenizer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template(vocabulary.header.metadata),
        **vocabulary.special_tokens(defaults),
    )


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where the file does not say it."""

    add_bos: bool
    ids: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Vocabulary:
    """The tokens of a file with their ids, types and scores."""

    header: GgufHeader

    def setting(self, name: str) -> Any:
        return self.header.metadata.get(f"{KEY}.{name}")

    def listed(self, name: str, kind: type | tuple[type, ...]) -> list[Any]:
        """A list of the file, empty where it has none. Raises `CorruptWeights` for anything else."""
        values = self.setting(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.corrupt(f"its {KEY}.{name} is no list of {'texts' if kind is str else 'numbers'}")
        return values

    @cached_property
    def tokens(self) -> list[str]:
        tokens = self.listed("tokens", str)
        if not tokens:
            raise self.unsupported("it has no vocabulary")
        return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @cached_property
    def types(self) -> list[int]:
        return self.listed("token_type", int) or [NORMAL] * len(self.tokens)

    @cached_property
    def control_names(self) -> frozenset[str]:
        """Texts that are control tokens in any case."""
        infill = [names for key, names in INFILL.items() if self.setting(f"fim_{key}_token_id") is None]
        return frozenset(" ".join([ENDS, *infill]).split())

    @cached_property
    def cut_out(self) -> dict[int, str]:
        """The tokens that are found in a text before anything else, and the rest of the text around them."""
        kinds, names = (UNKNOWN, CONTROL, USER_DEFINED), self.control_names
        both = enumerate(zip(self.tokens, self.types, strict=False))
        return {i: token for i, (token, kind) in both if kind in kinds or token in names}

    def added(self) -> Iterator[AddedToken]:
        name = str(self.header.metadata.get("general.name", "")).lower()
        phi3 = any(part in name for part in PHI3)
        for i, token in self.cut_out.items():
            rstrip = phi3 and token not in PLAIN_IN_PHI3
            special = self.types[i] != USER_DEFINED
            yield AddedToken(token, rstrip=rstrip, normalized=False, special=special)

    def check(self) -> None:
        """Raises `CorruptWeights` where the vocabulary contradicts itself or the model."""
        size = len(self.tokens)
        if len(self.types) < size:
            raise self.corrupt(f"{size} tokens, but only {len(self.types)} types of tokens")
        if len(self.ids) < size:
            token, i = next((token, i) for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise self.corrupt(f"its token {token!r} has two ids, {i} and {self.ids[token]}")
        rows = [tensor.shape[0] for tensor in self.header.tensors if tensor.name == EMBEDDINGS]
        if rows and size > rows[0]:
            raise self.corrupt(f"its tokenizer has {size} tokens, but the model only {rows[0]}")

    def check_added(self, tokenizer: Tokenizer) -> None:
        """Raises `UnsupportedModel` where a control or user-defined token is not one id, its own."""
        for i, token in self.cut_out.items():
            if (ids := tokenizer.encode(token, add_special_tokens=False).ids) != [i]:
                raise self.unsupported(f"its token {token!r} is read as the ids {ids[:8]} and not as {i}")

    def special_tokens(self, defaults: Defaults) -> dict[str, Any]:
        """The tokens with a role, and which of them stand around a prompt."""
        tokens = {f"{name}_token": self.role(key, defaults.ids.get(name)) for name, key in ROLES.items()}
        add_bos, add_eos = self.setting("add_bos_token"), self.setting("add_eos_token")
        adds = {"bos": defaults.add_bos if add_bos is None else add_bos, "eos": bool(add_eos)}
        for name, added in adds.items():
            if added and tokens[f"{name}_token"] is None:
                raise self.unsupported(f"prompts get a {name} token, but {KEY}.{name}_token_id names none")
        return {**tokens, **{f"add_{name}_token": added for name, added in adds.items()}}

    def role(self, key: str, default: int | None) -> str | None:
        """The token with this role. An id beyond the vocabulary counts as none."""
        token = self.setting(f"{key}_token_id")
        known = [i for i in (token, default) if isinstance(i, int) and 0 <= i < len(self.tokens)]
        return self.tokens[known[0]] if known else None

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.header.path}: {what}; {ELSEWHERE}")

    def corrupt(self, what: str) -> CorruptWeights:
        return CorruptWeights(f"{self.header.path}: {what}")


def byte_level(vocabulary: Vocabulary) -> tuple[Tokenizer, Defaults]:
    """BPE over the bytes of words, as GPT-2 has it."""
    rule = pre_tokenizer(vocabulary)
    model = BPE(vocabulary.ids, merges_of(vocabulary), ignore_merges=rule.whole_words)
    tokenizer = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in rule.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    literal, to_text = [*literal_tokens(vocabulary)], decoders.ByteLevel()
    tokenizer.decoder = decoders.Sequence([*literal, to_text]) if literal else to_text
    return tokenizer, Defaults(rule.add_bos)


def literal_tokens(vocabulary: Vocabulary) -> Iterator[decoders.Decoder]:
    """Control and user-defined tokens are text and no bytes: each whose letters could be either is decoded
    as the bytes of its text.
    """
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    for token in vocabulary.cut_out.values():
        if not token.isascii() and set(token) <= set(letters.values()):
            in_bytes = "".join(letters[byte] for byte in token.encode())
            yield decoders.Replace(Regex(rf"\A{re.escape(token)}\z"), in_bytes)


def pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    name = vocabulary.setting("pre")
    if not name:
        path = vocabulary.header.path
        log.warning(
            "%s: it does not say how words are cut (tokenizer.ggml.pre); llama.cpp's default is taken, which "
            "may not be what the model was trained with",
            path,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise vocabulary.unsupported(f"its pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported")
    return PRE_TOKENIZERS[name]


def merges_of(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges in their order; of two equal ones the first counts."""
    if vocabulary.setting("merges") is None:
        raise vocabulary.unsupported("it has no merges")
    pairs: dict[tuple[str, str], None] = {}
    ids = vocabulary.ids
    for merge in vocabulary.listed("merges", str):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if left not in ids or right not in ids or left + right not in ids:
            raise vocabulary.corrupt(f"its merge {merge!r} is not of tokens of the vocabulary")
        pairs[left, right] = None
    return [*pairs]


def sentence_piece(vocabulary: Vocabulary) -> tuple[Tokenizer, Defaults]:
    """BPE over the characters of a whole text, which merges the pair that makes the best token."""
    unknown = vocabulary.role("unknown", SENTENCE_PIECE.ids["unk"])
    merges = merges_by_score(vocabulary)
    model = BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = vocabulary.setting("add_space_prefix") is not False
    before = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*to_text, *after])
    return tokenizer, SENTENCE_PIECE


def merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best one first."""
    scores = vocabulary.listed("scores", (int, float)) or [0.0] * len(vocabulary.tokens)
    if len(scores) < len(vocabulary.tokens):
        raise vocabulary.corrupt(f"{len(vocabulary.tokens)} tokens, but only {len(scores)} scores")
    made: dict[str, list[tuple[str, str]]] = {}
    for i, token in enumerate(vocabulary.tokens):
        # between the tokens that are cut out no text has one of them, unless as spaces
        if i not in vocabulary.cut_out or SPACE in token:
            made[token] = pairs_of(vocabulary, token)
    best = sorted(made, key=lambda token: -scores[vocabulary.ids[token]])
    for _, equal in groupby(best, key=lambda token: scores[vocabulary.ids[token]]):
        refuse_rivals(vocabulary, {token: made[token] for token in equal})
    return [pair for token in best for pair in made[token]]


def pairs_of(vocabulary: Vocabulary, token: str) -> list[tuple[str, str]]:
    """The pairs of tokens that make this one. llama.cpp merges letters, too, that are no tokens."""
    ids, pairs = vocabulary.ids, []
    for n in range(1, len(token)):
        left, right = token[:n], token[n:]
        if left in ids and right in ids:
            pairs.append((left, right))
        elif (left in ids or n == 1) and (right in ids or n == len(token) - 1):
            raise vocabulary.unsupported(f"its token {token!r} is made of letters that are no tokens")
    return pairs


def refuse_rivals(vocabulary: Vocabulary, made: Mapping[str, list[tuple[str, str]]]) -> None:
    """Raises `UnsupportedModel` where two tokens of one score want the same part: then llama.cpp merges
    from the left, which a list of merges cannot say.
    """
    if len(made) == 1:
        return
    by_left: dict[str, set[str]] = {}
    for token, pairs in made.items():
        for left, _ in pairs:
            by_left.setdefault(left, set()).add(token)
    for token, pairs in made.items():
        if rivals := {rival for _, right in pairs for rival in by_left.get(right, ())} - {token}:
            raise vocabulary.unsupported(
                f"its tokens {token!r} and {min(rivals)!r} have one score, so their order is not known"
            )


SENTENCE_PIECE = Defaults(True, {"bos": 1, "eos": 2, "unk": 0})
KINDS = {"gpt2": byte_level, "llama": sentence_piece}
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # as the file names them
