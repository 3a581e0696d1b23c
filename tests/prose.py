"""Prose of documents: sentences of markdown, and the private words that no text or name may use."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_WORDS = 35
MAX_COLUMNS = 110
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
BLOCK = re.compile(r"^\s*(?:[-*+]|\d+\.|>|#+)\s+|^\s*\|")
SENTENCE_END = re.compile(r"(?<=[.!?])[\")*]*\s+(?=[\"(*\[]*[`A-Z0-9$])")


def wide_lines(document: str) -> list[str]:
    """Lines of text, Python and commands beyond the width; tables, links and recorded output may be wider."""
    shown = FENCE.sub(
        lambda fence: fence[0] if re.match(r" *```(python|bash|toml)", fence[0]) else "", document
    )
    return [
        line
        for line in shown.splitlines()
        if len(line) > MAX_COLUMNS
        and not line.lstrip().startswith("|")
        and not re.search(r"\]\([^)]|https?:", line)
    ]


def blocks(document: str) -> Iterator[str]:
    """Paragraphs, headings, list items and table cells, each on one line; code is left out."""
    text = COMMENT.sub("", FRONT_MATTER.sub("", FENCE.sub("\n", document)))
    block = ""
    for line in [*text.splitlines(), ""]:
        if not line.strip() or BLOCK.match(line):
            yield from cells(block)
            block = ""
        block = f"{block} {line.strip()}"


def cells(block: str) -> Iterator[str]:
    plain = re.sub(r"`[^`]*`", "Code", block)  # one word, and a bar within it ends no cell
    for part in plain.split("|") if plain.strip().startswith("|") else [plain]:
        if part.strip(" -:>#*"):
            yield part.strip()


def words_of(sentence: str) -> list[str]:
    """Words and numbers; links count by their text, and a sign by itself is no word."""
    shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
    return [word for word in shown.split() if re.search(r"[^\W_]", word)]


def long_sentences(document: str) -> list[str]:
    """What is longer than a reader keeps in mind."""
    return [
        sentence
        for block in blocks(document)
        for sentence in SENTENCE_END.split(block)
        if len(words_of(sentence)) > MAX_WORDS
    ]


# The field's term stands behind each. Ordinary English and other projects' names must not match.
PRIVATE = {
    "guess": r"(?<!# )\bguess(?:es|ed|ing)?\b",  # draft; `# guess` marks a constant without a measurement
    "stands, fell": r"\b(?:draft|token)s? (?:stands?|stood|fell|falls?)\b",  # accepted, rejected
    "crowd": r"\bcrowds?\b",  # batch
    "texts at once": r"\btexts? at once\b|\brunning texts?\b|\btexts? (?:is|are) (?:being )?written\b",
    "luck": r"\b(?:un)?luck(?:y|ily)?\b",  # sampling noise
    "hope": r"\bhop(?:e|es|ed|ing|eful)\b",  # optimism, prior
    "promise": r"\bpromis(?:e|es|ed|ing)\b|\bforgiven\b",  # memory estimate; calibration
    "awake, rest": r"\bawake\b|\bseldom\b|\brest(?:s|ed|ing)\b|\b(?:may|must|to) rest\b",  # back-off
    "rehearsal": r"\b_?rehears(?:e|es|ed|al|als|ing)\b",  # warm-up
    # one word for each of its meanings; a layer has a kind, and so has a parameter in Python and NumPy
    "kind": r"\bkinds?\s*=(?!=|\"stable\"|inspect\.)|\.kind\b(?!\()|[\"`]kind[\"`]",
    "trust, doubt": r"\b(?:trust|doubts?|apart)\s*=(?!=)|\.(?:trust|doubts?|apart)\b|\bdoubts\b",
    "worth, wanted, came": r"\.(?:worth|wanted|came)\b|\b(?:worth|wanted|came)\s*=(?!=)",  # token gain
    "grade": r"\bgrades?\b|\bclass (?:Own|Others)\b",  # confidence bucket
    "join": r"--(?:no-)?join\b|\bjoin\s*=(?!=)|[\"`]join[\"`]|\bgo(?:es|ne)? on (?:with|where)\b",
    "sheet, dialect": r"\b[Ss]heets?\b|\b[Dd]ialects?\b",  # drafter config, checkpoint format
    "course, student": r"(?<!of )\bcourses?\b|\b[Ss]tudents?\b",  # trainer, drafter
    "door, house": r"\b[Dd]oors?\b|\bhouse\b",  # middleware, admission, app state
    "wire, pulse, news": r"\bwire\b|\bpulse\b|\bnews\b",  # messages, statistics, outputs
    "prove, race": (  # load check, autotune; not the exponential race of sampling
        r"\bprov(?:e|es|en|ing)\b|(?<!data )(?<!exponential )\brac(?:e|es|ed|ing)\b(?! condition|\()"
    ),
    "scout": r"\bscouts?\b",  # look-ahead matcher
    "said, told, asked": r"\b(?:said|told|asked)\s*=(?!=)|\b(?:said|told|asked)[.\[]\w",  # payload, requested
    "carried": r"\b(?:is|are|be|not|and|what|which) carried\b|\bcarried or refused\b",  # supported
    "look-up": r"\blook-ups?\b",  # lookup
}


def private_words(text: str, allowed: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """(line, rule) of each private word of a text."""
    return [
        (number, rule)
        for number, line in enumerate(text.splitlines(), 1)
        for rule, pattern in PRIVATE.items()
        if rule not in allowed and re.search(pattern, line, re.IGNORECASE)
    ]
