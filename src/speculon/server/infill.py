"""Fill-in-the-middle prompts: what comes before and after the cursor, in the tokens of the model's family."""

from __future__ import annotations

from dataclasses import dataclass

from speculon.errors import InvalidParameter
from speculon.text import Tokenizer

PROBE = "\u263a"  # a text that no tokenizer joins with what follows it, as the reference code of CodeLlama


@dataclass(frozen=True, slots=True)
class Form:
    """The special tokens of one family, in the order of its prompts."""

    prefix: str
    suffix: str
    middle: str | None  # closes the prompt; none where the second part closes it
    suffix_first: bool = False
    end: str | None = None  # written at the end of the middle, beside the usual end of text


FORMS = (
    Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    Form("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", end="\u2581<EOT>"),  # CodeLlama
    Form(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),  # DeepSeek-Coder
    Form("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class Infill:
    """Makes the prompts of one model from texts before and after a cursor."""

    tokenizer: Tokenizer
    form: Form
    ids: dict[str, int]  # of the form's tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, suffix: str) -> Infill:
        """Raises `InvalidParameter` about `suffix` where the tokenizer has no form's tokens."""
        for form in FORMS:
            known = {name: tokenizer.token_id(name) for name in tokens_of(form)}
            ids = {name: token for name, token in known.items() if token is not None}
            if len(ids) == len(known):
                return cls(tokenizer, form, ids)
        raise InvalidParameter("suffix", suffix, "this model's tokenizer has no fill-in-the-middle tokens")

    def prompt(self, before: list[int], after: str) -> list[int]:
        """`before` are the tokens before the cursor, without those that begin every prompt."""
        form = self.form
        parts = [[self.ids[form.prefix], *before], [self.ids[form.suffix], *self._continuation(after)]]
        if form.suffix_first:
            parts.reverse()
        middle = [self.ids[form.middle]] if form.middle else []
        return [*self.tokenizer.encode(""), *parts[0], *parts[1], *middle]

    @property
    def stops(self) -> tuple[int, ...]:
        """No middle has one of these tokens."""
        end = self.tokenizer.token_id(self.form.end) if self.form.end else None
        return (*self.ids.values(), *(() if end is None else (end,)))

    def _continuation(self, text: str) -> list[int]:
        """Token ids of a text that goes on inside a line: SentencePiece writes a space before a beginning."""
        encode, probe = self.tokenizer.encode, self.tokenizer.encode(PROBE, add_special_tokens=False)
        if not str(self.tokenizer.inner.convert_ids_to_tokens(probe[0])).startswith("\u2581"):
            return encode(text, add_special_tokens=False, name="suffix")
        return encode(PROBE + text, add_special_tokens=False, name="suffix")[len(probe) :]


def tokens_of(form: Form) -> list[str]:
    """Those that a tokenizer must have."""
    return [name for name in (form.prefix, form.suffix, form.middle) if name]
