"""Fill-in-the-middle prompts: each family's tokens, in its order, with the texts between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from speculon.core.config.serve import ServeConfig
from speculon.core.errors import InvalidParameter, InvalidRequest
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.server import infill
from speculon.server.completions import read_completion
from speculon.server.infill import FORMS, InfillForm
from speculon.server.model import ServedModel
from speculon.server.schemas import CompletionRequest
from tests.server.inside import served

BEFORE, AFTER = "def f(x):\n    return ", "\n\nprint(f(1))"
QWEN, STARCODER, LLAMA, DEEPSEEK, CODESTRAL = FORMS


def specials(form: InfillForm) -> list[str]:
    return [name for name in (form.prefix, form.suffix, form.middle, form.end) if name]


def byte_level(form: InfillForm) -> Tokenizer:
    """Bytes, and the tokens of a family; no token begins a prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials(form))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def sentence_piece(form: InfillForm) -> Tokenizer:
    """Bytes, a space before every beginning, and a token that begins every prompt, as Llama's."""
    pieces = {"<unk>": 0, "<s>": 1, "\u2581": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    backend = Backend(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(specials(form))
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


def read(tokenizer: Tokenizer, **body: Any) -> Any:
    model = ServedModel("m", tokenizer, 4096, tokenizer.vocab_size, "off", ServeConfig())
    return read_completion(CompletionRequest.model_validate(body), model)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The special tokens, and the text between them."""
    names, found = {tokenizer.token_id(name): name for form in FORMS for name in specials(form)}, [""]
    names.pop(None, None)
    text: list[int] = []
    for token in ids:
        if token in names:
            found += [found.pop() + tokenizer.decode(text, False), names[token], ""]
            text = []
        else:
            text.append(token)
    return [part for part in [*found[:-1], tokenizer.decode(text, False)] if part]


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        pytest.param(byte_level(QWEN), [QWEN.prefix, BEFORE, QWEN.suffix, AFTER, QWEN.middle], id="Qwen"),
        pytest.param(
            byte_level(STARCODER),
            [STARCODER.prefix, BEFORE, STARCODER.suffix, AFTER, STARCODER.middle],
            id="StarCoder",
        ),
        pytest.param(
            byte_level(DEEPSEEK),
            [DEEPSEEK.prefix, BEFORE, DEEPSEEK.suffix, AFTER, DEEPSEEK.middle],
            id="DeepSeek",
        ),
        pytest.param(
            sentence_piece(LLAMA),
            ["<s>", LLAMA.prefix, " " + BEFORE, LLAMA.suffix, AFTER, LLAMA.middle],
            id="CodeLlama",
        ),
        pytest.param(
            sentence_piece(CODESTRAL),
            ["<s>", CODESTRAL.suffix, AFTER, CODESTRAL.prefix, " " + BEFORE],
            id="Codestral",
        ),
    ],
)
def test_the_prompt_of_each_family(tokenizer: Tokenizer, expected: list[str]) -> None:
    (prompt,) = read(tokenizer, prompt=BEFORE, suffix=AFTER).prompts
    assert pieces(tokenizer, prompt) == expected


def test_a_space_that_the_text_does_not_have_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the suffix encoded as a beginning."""
    encode = partial(ServedModel.encode, add_special_tokens=False)
    monkeypatch.setattr(infill, "continuation", encode)
    tokenizer = sentence_piece(LLAMA)
    (prompt,) = read(tokenizer, prompt=BEFORE, suffix=AFTER).prompts
    assert " " + AFTER in pieces(tokenizer, prompt)


def test_the_middle_ends_at_the_tokens_of_its_form() -> None:
    tokenizer = sentence_piece(LLAMA)
    params = read(tokenizer, prompt=BEFORE, suffix=AFTER, stop_token_ids=[5]).params
    assert params.stop_token_ids[0] == 5
    assert {*params.stop_token_ids[1:]} == {tokenizer.token_id(name) for name in specials(LLAMA)}


def test_several_prompts_and_token_ids() -> None:
    tokenizer = byte_level(QWEN)
    ids = tokenizer.encode(BEFORE)
    texts = read(tokenizer, prompt=[BEFORE, "x"], suffix=AFTER).prompts
    assert read(tokenizer, prompt_token_ids=ids, suffix=AFTER).prompts == texts[:1]
    assert pieces(tokenizer, texts[1])[1] == "x"


def test_an_empty_suffix_is_none() -> None:
    tokenizer = byte_level(QWEN)
    assert read(tokenizer, prompt=BEFORE, suffix="").prompts == read(tokenizer, prompt=BEFORE).prompts


def test_no_echo_beside_a_suffix() -> None:
    with pytest.raises(InvalidParameter, match="echo"):
        read(byte_level(QWEN), prompt=BEFORE, suffix=AFTER, echo=True)


@pytest.mark.parametrize(("suffix", "name"), [("\ud800", "suffix"), ("x" * 40_000, "40000 characters")])
def test_a_bad_suffix_is_refused_by_name(suffix: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        read(byte_level(QWEN), prompt=BEFORE, suffix=suffix)


def test_half_of_a_form_is_none() -> None:
    incomplete = byte_level(InfillForm(QWEN.prefix, QWEN.suffix, None))
    with pytest.raises(InvalidParameter, match="no fill-in-the-middle tokens"):
        read(incomplete, prompt=BEFORE, suffix=AFTER)


def test_a_model_without_the_tokens_says_so() -> None:
    with served() as inside:
        response = inside.post("completions", prompt="x", suffix="y")
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "suffix"
        assert "this model's tokenizer has no fill-in-the-middle tokens" in error["message"]
        assert inside.post("completions", prompt="x", suffix="").status_code == 200
