"""Structured output by llguidance: which tokens a schema, an expression, a choice or a grammar allows next.

A `Matcher` has the state of its sequence: it is fed with committed tokens only, so that drafts, faults and
preemption leave no trace in it. Masks of drafted rows are computed ahead of it and taken back within one
call.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculon.core.config import SamplingParams, Structured, Thinking
from speculon.core.errors import InvalidParameter
from speculon.core.types import Finish, ceil_div
from speculon.decoding.text.recursion import endless_references
from speculon.decoding.text.tokenizer import BYTE_PIECE

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from speculon.decoding.text.tokenizer import Tokenizer

FEATURE = "parameters.structured"  # in the capability table
MAX_COMPILED = 64  # compiled grammars; requests of one program ask for the same few
# llguidance allows 2,000, which an object of 500 optional keys exceeds; MAX_GRAMMAR has room for 7,000
MAX_ROW = 30_000
JSON_STYLE: Any = {"whitespace_flexible": False}
NO_LARK = " (grammars are in llguidance's form of Lark, not in EBNF)"
# the end, where neither model nor tokenizer has a token for it
END = "<|end of the structured text|>"
SPACE = "\u2581"  # how SentencePiece writes a space
# of bytes, since a token may be a part of a character; FF begins tokens that are no text in llguidance
WITHOUT_SPECIAL = r"(?s-u:[\x00-\xFE])*"
NOTHING_FITS = "no text fits it but the empty one; a rule that refers only to itself never ends"


class Matcher:
    """The state of one text in its grammar."""

    __slots__ = ("endless", "home", "inner")

    def __init__(self, home: Grammars, inner: LLMatcher, endless: bool):
        self.home, self.inner = home, inner
        self.endless = endless  # whether it ends only where nothing else is left

    def fork(self) -> Matcher:
        """One of its own, from here on."""
        return Matcher(self.home, self.inner.deep_copy(), self.endless)

    def consume(self, tokens: Seq[int]) -> bool:
        """Moves on over written tokens; False where the grammar does not allow them."""
        return not tokens or self.inner.consume_tokens(list(tokens))

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return self.inner.is_stopped()

    def allows(self, tokens: Seq[int]) -> int:
        """How many of `tokens` may follow, one after the other."""
        return self.inner.validate_tokens(list(tokens)) if tokens else 0

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow, as far as there is no choice."""
        return tuple(self.inner.compute_ff_tokens())

    def find_end(self, tokens: tuple[int, ...]) -> tuple[int, Finish] | None:
        """(index, how) of the token that completes the text or cannot follow; None while it goes on. Pure."""
        ends = self.home.ends
        body = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        taken = self.inner.try_consume_tokens(list(tokens[:body])) if body else 0
        whole, complete = self.inner.is_accepting(), self.complete
        if taken:
            self.inner.rollback(taken)
        if taken and whole and complete:
            return taken - 1, Finish("stop")
        if taken < len(tokens):  # an end, or a token that nobody allowed: no token could go on from there
            return taken, Finish("stop", tokens[taken]) if whole else Finish("error")
        return None


class Grammars:
    """Compiles grammars for one tokenizer and a model with V logits, and keeps them."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Iterable[int], threads: int | None = None
    ):
        self.tokenizer, self._vocab_size, self._threads = tokenizer, vocab_size, threads
        self.ends = frozenset(token for token in eos_ids if token < vocab_size)
        self.compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._inner: LLTokenizer | None = None
        self._executor: LLExecutor
        self._not_text: list[int] = []  # tokens that llguidance takes for bytes, and the tokenizer does not
        self._no_token: int | None = None  # the id of END, and of all beyond it, where END is needed

    def refusal(self) -> str:
        """Why no grammar can be followed with this tokenizer; empty where any can."""
        try:
            self._read_tokenizer("structured", None)
        except InvalidParameter as error:
            return error.limit
        return ""

    def matcher(self, params: SamplingParams, written: Seq[int] = ()) -> Matcher | None:
        """The matcher of a sequence with output `written`, if any. Raises `InvalidParameter`."""
        form = params.structured
        if form is None:
            return None
        compiled = self._compile(form)  # refused by itself: after a thinking anything may fit
        if params.thinking is not None:
            compiled = self._compile(form, params.thinking)
        matcher = Matcher(self, compiled.deep_copy(), params.ignore_eos)
        if not matcher.consume(written):
            raise InvalidParameter("structured", written, "the text so far does not follow this grammar")
        return matcher

    def _compile(self, form: Structured, thinking: Thinking | None = None) -> LLMatcher:
        name, value = form.constraint
        key = f"{name}{json.dumps(value)}{thinking}"
        if key in self.compiled:
            self.compiled.move_to_end(key)
            return self.compiled[key]
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._read_tokenizer(f"structured.{name}", value)
        limits = LLParserLimits(max_items_in_row=MAX_ROW, verbose_errors=False)
        try:
            text = source(name, value)
            if thinking is not None:
                text = after_thinking(text, thinking, self.tokenizer, self.ends)
            compiled = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"structured.{name}", value, first_line(str(error))) from None
        if compiled.is_error():
            why = first_line(compiled.get_error())
            why += NO_LARK * (name == "grammar" and "JSON schema" not in why)
            raise InvalidParameter(f"structured.{name}", value, why)
        start = compiled.deep_copy()
        opening = self.allowed([(Matcher(self, start, False), ())])[0]
        opening[[token for token in self.ends if token < self._vocab_size]] = False
        # Of what must follow, too: a reference that is endless, and not found in the schema, forces more than
        # llguidance can follow.
        if not opening.any() or not start.consume_tokens(start.compute_ff_tokens()):
            raise InvalidParameter(f"structured.{name}", value, NOTHING_FITS)
        self.compiled[key] = compiled
        if len(self.compiled) > MAX_COMPILED:
            self.compiled.popitem(last=False)
        return compiled

    def _read_tokenizer(self, name: str, value: Any) -> LLTokenizer:
        """The tokenizer as llguidance reads it, which takes a second: once. Errors are about `name`."""
        if self._inner is not None:
            return self._inner
        from llguidance import LLExecutor, LLTokenizer
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders

        inner = self.tokenizer and self.tokenizer.inner
        if (read := getattr(inner, "lltokenizer", None)) is not None:  # it reads itself
            if not self.ends:
                self._no_token = self._vocab_size
                self.ends = frozenset([self._no_token])
            self._inner = read(max(self._vocab_size, max(self.ends) + 1), sorted(self.ends))
            self._executor = LLExecutor(self._threads)
            return self._inner
        known = getattr(inner, "backend_tokenizer", None)
        if not isinstance(known, Backend):
            own = "none" if self.tokenizer is None else type(self.tokenizer.inner).__name__
            limit = f"needs a tokenizer of the tokenizers library (a fast one), this is {own}"
            raise InvalidParameter(name, value, limit).about(FEATURE)
        backend = Backend.from_str(known.to_str())
        backend.no_padding()
        backend.no_truncation()
        if writes_spaces_as_letters(backend.decoder):
            if "ByteFallback(" not in repr(backend.decoder):
                vocabulary = backend.get_vocab().items()
                self._not_text = [token for piece, token in vocabulary if BYTE_PIECE.fullmatch(piece)]
            steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
            backend.decoder = decoders.Sequence(steps)
        self.ends = frozenset(token for token in self.ends if token < backend.get_vocab_size())
        if not self.ends:
            backend.add_special_tokens([END])
            self._no_token = backend.get_vocab_size() - 1
            self.ends = frozenset([self._no_token])
        size = max(self._vocab_size, backend.get_vocab_size())
        try:
            self._inner = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=sorted(self.ends))
        except ValueError as error:
            own = type(self.tokenizer.inner).__name__ if self.tokenizer else "none"
            limit = "llguidance reads byte-level and SentencePiece tokenizers, not "
            limit += f"{own} with its {type(backend.decoder).__name__} decoder"
            raise InvalidParameter(name, value, limit).about(FEATURE) from error
        self._executor = LLExecutor(self._threads)
        return self._inner

    def allowed(self, drafted: list[tuple[Matcher, tuple[int, ...]]]) -> Tensor:
        """Which tokens may stand at each matcher's place and after each of its drafts, end to end, bool [R,
        V].

        Nothing is allowed after a draft that is not, and after an end.
        """
        assert self._inner is not None
        width = ceil_div(self._inner.vocab_size, 32)
        rows = sum(len(draft) + 1 for _, draft in drafted)
        masks = torch.zeros(rows, width, dtype=torch.int32)  # a bit per token
        plain: list[tuple[LLMatcher, int]] = []
        ahead: list[tuple[LLMatcher, int, list[int]]] = []
        row = 0
        for matcher, draft in drafted:
            if draft:
                ahead.append((matcher.inner, row, list(draft)))
            else:
                plain.append((matcher.inner, row))
            row += len(draft) + 1
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, masks.data_ptr(), 4 * width, rows)
        if ahead:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(ahead, masks.data_ptr(), 4 * width, rows)
        bits = masks.view(torch.uint8)[:, :, None] >> torch.arange(8, dtype=torch.uint8)  # [R, bytes, 8]
        allowed = (bits & 1).bool().flatten(1)[:, : self._vocab_size]
        if self._no_token is not None:
            allowed[:, self._no_token :] = False
        if self._not_text:
            allowed[:, self._not_text] = False
        return allowed


def forbid(drafted: list[tuple[Matcher, tuple[int, ...]]], device: torch.device) -> Tensor:
    """What each row must not be, bool [R, V]: those of [last token, d_1..d_K] of each text, end to end.

    A row that no token could follow forbids nothing: its token is dropped (`Matcher.find_end`).
    """
    home = drafted[0][0].home
    allowed = home.allowed(drafted)
    ends = torch.tensor([token for token in home.ends if token < allowed.shape[-1]], dtype=torch.long)
    row = 0
    for matcher, draft in drafted:
        rows = allowed[row : row + len(draft) + 1]
        if matcher.endless:
            onward = rows.index_fill(1, ends, False)
            rows.copy_(torch.where(onward.any(-1, keepdim=True), onward, rows))
        row += len(draft) + 1
    return (~allowed & allowed.any(-1, keepdim=True)).to(device)


def writes_spaces_as_letters(decoder: Any) -> bool:
    """Whether a decoder is one of SentencePiece's kind in a form that llguidance does not know as such."""
    parts = repr(decoder)
    known = "ByteFallback(" in parts and "Replace(" in parts
    return SPACE in parts and not known


class LookAheadMatchers:
    """Follow the drafts of a round, for drafters that sample; the sequences' own matchers do not move."""

    def __init__(self, matchers: Iterable[Matcher | None]):
        self._ahead = {i: matcher.fork() for i, matcher in enumerate(matchers) if matcher is not None}

    def forbid(self, which: Iterable[int], device: torch.device) -> dict[int, Tensor]:
        """By index, what the next draft must not be, [V]; no entry without a grammar."""
        bound = [i for i in which if i in self._ahead]
        if not bound:
            return {}
        return dict(zip(bound, forbid([(self._ahead[i], ()) for i in bound], device), strict=True))

    def go_on(self, i: int, token: int) -> bool:
        """Moves on over a draft; whether anything can follow it."""
        matcher = self._ahead.get(i)
        return matcher is None or (matcher.consume([token]) and not matcher.complete)


def after_thinking(form: str, thinking: Thinking, tokenizer: Tokenizer | None, ends: frozenset[int]) -> str:
    """llguidance's form of a grammar that begins after a thinking, which may be any text but an end."""
    assert tokenizer is not None
    special = sorted(tokenizer.special_ids - ends)
    # to llguidance a special token is no text, so it is named by its id
    start, end = (tokenizer.token_id(tag) for tag in (thinking.start, thinking.end))
    closed = f"(head | TEXT <[{end}]>)" if end in special else "head"
    opened = f"(opening | <[{start}]>)" if start in special else "opening"
    others = ",".join(str(token) for token in special if token != end)
    text = f"(TEXT <[{others}]>)* " if others else ""
    lark = (
        '%llguidance {"allow_invalid_utf8": true}\n'
        f"start: {'thinking' if thinking.opened else f'({opened} thinking)?'} @form\n"
        f"thinking: {text}{closed} BLANKS\nTEXT: /{WITHOUT_SPECIAL}/\nBLANKS: /\\n{{0,2}}/\n"
        f"head[lazy]: TEXT {json.dumps(thinking.end)}\nopening[lazy]: {json.dumps(thinking.start)}\n"
    )
    forms = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**forms[0], "name": "form"}, *forms[1:]]})


def first_line(error: str) -> str:
    """What llguidance says is wrong, without its drawing of the place."""
    fault = re.search(r"^error: (.+)$", error, re.MULTILINE)
    return fault[1] if fault else error.strip().partition("\n")[0]


def source(kind: str, value: Any) -> str:
    """llguidance's own form of a grammar. Raises ValueError."""
    from llguidance import LLMatcher

    match kind:
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
        case "grammar":
            return LLMatcher.grammar_from_lark(value)
    schema = {"type": "object"} if kind == "json_object" else {} if value is True else value
    if endless := endless_references(schema):
        raise ValueError(f"no value of {endless[0]} can ever end, because each must contain another one")
    return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
