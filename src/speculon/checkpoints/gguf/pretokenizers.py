r"""How byte-level vocabularies cut a text into words before merging, by the value of `tokenizer.ggml.pre`.

A GGUF file names the rule alone. What each name stands for is llama.cpp's list (src/llama-vocab.cpp), and the
rules here yield its ids. Where its expressions know less than the model's own tokenizer did, for example
which letters beyond ASCII are capitals, ids are still those of llama.cpp.

The expressions are those of Oniguruma: `\x{4E00}` is a code point, `&&` an intersection of classes. It knows
the characters of Unicode 16, where llama.cpp's tables end with 15.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The expressions that cut a text, one after the other: each match is a piece, and so is what lies
    between two matches.
    """

    splits: tuple[str, ...]
    whole_words: bool = False  # a word that the vocabulary has is one token, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise


# parts of expressions
LETTER, MARK = r"\p{L}", r"\p{M}"
DIGIT, UP_TO_THREE = r"\p{N}", r"\p{N}{1,3}"
CONTRACTION = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
SPACES = r"\s+(?!\S)|\s+"  # the last space of a run belongs to the word that follows
LINES = rf"\s*[\r\n]+|{SPACES}"
SIGNS = r" ?[^\s\p{L}\p{N}]+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
KANA = r"\x{3040}-\x{309F}\x{30A0}-\x{30FF}"
HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}"
    r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
EAST = (  # Han to Hangul, Thai, Lao, Khmer and Burmese
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}"
    r"\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}"
    r"\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}"
)
ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
# cased letters without those of younger or rarer scripts
OLD_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}"
    r"\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DFFF}]]"
)
# Groups of three digits that end with the last one of a number; the first group stays with what precedes it.
# The rest of a text is matched, too: each of its characters would be tried in vain as a beginning.
THREE_FROM_THE_RIGHT = r"(?>\P{N}*)\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\P{N}+\z"


def cased(letters: str) -> str:
    """Words whose capitals stand at their beginning; letters beyond ASCII pass for capitals and for small."""
    before, capital, small = r"[^\r\n\p{L}\p{N}]?", f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    return f"{before}{capital}*{small}+|{before}{capital}+{small}*"


def words(digits: str = DIGIT, word: str = WORD, after_signs: str = r"[\r\n]*", lines: str = LINES) -> str:
    return rf"{CONTRACTION}|{word}|{digits}|{SIGNS}{after_signs}|{lines}"


def words_with_contraction(word: str, digits: str) -> str:
    """Words that a contraction belongs to."""
    return rf"(?:{word})(?:{CONTRACTION})?|{digits}|{SIGNS}[\r\n/]*|{LINES}"


GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{SIGNS}|{SPACES}"
LLAMA3, QWEN2 = words(UP_TO_THREE), words()
MARKED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[{LETTER}{MARK}]+"
DEEPSEEK_WORDS = rf"{ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[{LETTER}{MARK}]+| ?[\p{{P}}\p{{S}}]+"
DEEPSEEK3 = rf"{DEEPSEEK_WORDS}[\r\n]*|{LINES}"
HAN_OR_KANA = rf"[\x{{4E00}}-\x{{9FA5}}{KANA}]+"
# from the Samaritan letters up to Han, and Hangul
OLD_EAST = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}&&\S]+"
BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
LINE_OR_BREAKS = r"[^\n]+|\n+"
THREE_DIGITS = "[0-9]{3}"

FAMILIES: dict[str, PreTokenizer] = {  # by the names that stand for one rule
    "gpt-2 phi-2 jina-es jina-de gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4 "
    "jina-v1-en roberta-bpe": PreTokenizer((GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((DIGIT, GPT2)),
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", THREE_DIGITS)),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2, THREE_DIGITS)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (LLAMA3,), whole_words=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((LLAMA3,)),
    "glm4 glm5": PreTokenizer((LLAMA3,), whole_words=True),
    "minicpm5": PreTokenizer((UP_TO_THREE, words(r"\p{N}+")), whole_words=True),
    "jais-2": PreTokenizer(
        (
            words(
                UP_TO_THREE,
                lines=r"\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)"
                r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s",
            ),
        )
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2 bailingmoe bailingmoe2 "
    "llada-moe": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer(
        (rf"{CONTRACTION}|{MARKED_WORD}|{DIGIT}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}",)
    ),
    "ufakzeka": PreTokenizer((rf"{WORD}|{DIGIT}|{SIGNS}[\r\n]*|{LINES}",)),
    "laguna": PreTokenizer((LINE_OR_BREAKS, QWEN2)),
    "seed-coder": PreTokenizer((rf"{CONTRACTION}|{WORD}|{DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}",)),
    "exaone-moe": PreTokenizer(
        (
            words(
                word=r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                after_signs=r"[\r\n/]?",
            ),
        )
    ),
    "tekken": PreTokenizer(
        (rf"{cased(LETTER)}|{DIGIT}|{SIGNS}[\r\n/]*|{LINES}",), whole_words=True, add_bos=True
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer(
        (words_with_contraction(cased(LETTER), UP_TO_THREE),)
    ),
    "granite-embed-multi-97m": PreTokenizer(
        (words_with_contraction(cased(LETTER + MARK), UP_TO_THREE),), whole_words=True
    ),
    "tiny_aya cohere2moe": PreTokenizer(
        (THREE_FROM_THE_RIGHT, words_with_contraction(MARKED_WORD, UP_TO_THREE))
    ),
    "kimi-k2": PreTokenizer(
        (
            rf"[{HAN}]+|[^\r\n\p{{L}}\p{{N}}{HAN}]?[\p{{L}}&&[^{HAN}]]+(?:{CONTRACTION})?|{UP_TO_THREE}"
            rf"|{SIGNS}[\r\n]*|{LINES}",
        )
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{OLD_CASED}+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]+",
            r"\s+\z",
            OLD_EAST,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", OLD_EAST, DIGIT)),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": PreTokenizer((UP_TO_THREE, HAN_OR_KANA, DEEPSEEK3)),
    "spark2_5": PreTokenizer((UP_TO_THREE, HAN_OR_KANA, rf"{DEEPSEEK_WORDS}|[\r\n]|{SPACES}", DIGIT)),
    "afmoe": PreTokenizer((THREE_FROM_THE_RIGHT, rf"[{EAST}]+", DEEPSEEK3)),
    "youtu": PreTokenizer(
        (
            r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
            r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}"
            r"\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
            rf"|[\x{{3105}}-\x{{312F}}]+|{HAN_OR_KANA}",
            words_with_contraction(MARKED_WORD, DIGIT),
        ),
        whole_words=True,
    ),
    "bloom poro-chat gpt3-finnish": PreTokenizer((BLOOM,)),
    "viking": PreTokenizer((BLOOM, DIGIT)),
    "superbpe": PreTokenizer(
        # a piece goes on until three, six, ... digits follow that end a number
        (r"\p{N}+", r"[\s\S](?:(?!(?:[0-9]{3})+(?![0-9]))[\s\S])*")
    ),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        add_bos=True,
    ),
}
PRE_TOKENIZERS = {name: family for names, family in FAMILIES.items() for name in names.split()}
