"""Fill-in-the-middle prompts: what comes before and after the cursor, in the tokens of the model's family."""

from __future__ import annotations

from dataclasses import dataclass

from speculon.core.errors import InvalidParameter
from speculon.decoding.text.tokenizer import Tokenizer, check_text
from speculon.server.model import ServedModel

PROBE = "\u263a"  # a text that no tokenizer joins with what follows it, as the reference code of CodeLlama


@dataclass(frozen=True, slots=True)
class InfillForm:
    """The special tokens of one family, in the order of its prompts."""

    prefix: str
    suffix: str
    middle: str | None  # closes the prompt; none where the second part closes it
    suffix_first: bool = False
    end: str | None = None  # written at the end of the middle, beside the usual end of text


FORMS = (
    InfillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    InfillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    InfillForm("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", end="\u2581<EOT>"),  # CodeLlama
    InfillForm(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),  # DeepSeek-Coder
    InfillForm("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)


class Infill:
    """Makes prompts from the texts before a cursor; the text after it is the same for all of them.

    Raises `InvalidParameter` about `suffix` where the tokenizer has no form's tokens.
    """

    def __init__(self, model: ServedModel, suffix: str):
        form, ids = find_form(model.tokenizer, suffix)
        self._form, self._ids = form, ids
        self._opening = model.tokenizer.encode("")  # tokens that begin every prompt
        self._after = [ids[form.suffix], *continuation(model, suffix)]
        end = model.tokenizer.token_id(form.end) if form.end else None
        self.stops = (*ids.values(), *(() if end is None else (end,)))  # no middle has one of these tokens

    def prompt(self, before: list[int]) -> list[int]:
        """`before` are the tokens before the cursor, without those that begin every prompt."""
        form, parts = self._form, [[self._ids[self._form.prefix], *before], self._after]
        first, second = reversed(parts) if form.suffix_first else parts
        middle = [self._ids[form.middle]] if form.middle else []
        return [*self._opening, *first, *second, *middle]


def find_form(tokenizer: Tokenizer, suffix: str) -> tuple[InfillForm, dict[str, int]]:
    """The first form whose tokens the tokenizer has, and their ids."""
    for form in FORMS:
        known = {name: tokenizer.token_id(name) for name in (form.prefix, form.suffix, form.middle) if name}
        ids = {name: token for name, token in known.items() if token is not None}
        if len(ids) == len(known):
            return form, ids
    raise InvalidParameter(
        "suffix", suffix, "cannot be used: this model's tokenizer has no fill-in-the-middle tokens"
    )


def continuation(model: ServedModel, text: str) -> list[int]:
    """Token ids of a text that goes on inside a line: SentencePiece writes a space before a beginning."""
    check_text("suffix", text)
    probe = model.encode(PROBE, add_special_tokens=False)
    if not str(model.tokenizer.inner.convert_ids_to_tokens(probe[0])).startswith("\u2581"):
        return model.encode(text, add_special_tokens=False)
    return model.encode(PROBE + text, add_special_tokens=False)[len(probe) :]
