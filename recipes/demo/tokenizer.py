"""The byte-level BPE tokenizer of the demo models.

Identifiers are words without a leading space, since keywords and punctuation take the spaces on both sides.
A name is then the same tokens everywhere, so that a small model can copy and rename it.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIALS = (END_OF_TEXT, IM_START, IM_END)

_KEYWORDS = (
    "and as assert async await class def del elif else except for from global if import in is lambda"
    " nonlocal not or raise return while with yield"
).split()
WORD_PATTERN = "|".join(
    (
        r"[ \t]*(?:\n[ \t]*)+",  # line ends with the indentation that follows
        rf" ?\b(?:{'|'.join(_KEYWORDS)})\b ?",
        r" ?[^\s\w]+ ?",
        r" ?[^\W\d]\w*",
        r" ?\d{1,3}",
        r"\s+",
    )
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE over `texts`; the special tokens take the ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers reads, chat template included."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def chat_prompt(user: str) -> str:
    """One question as the chat template renders it, up to where the answer begins."""
    return f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n"


def chat_answer(assistant: str) -> str:
    """What follows `chat_prompt`."""
    return f"{assistant}{IM_END}"
