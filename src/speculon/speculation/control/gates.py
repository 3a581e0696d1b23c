"""Whether a prompt looks as if its answer repeats it, read once, before anything is known of drafts."""

from __future__ import annotations

import re

from speculon.core.types import PromptShape

NO_SIGNAL = "no_signal"

# what is mostly quoted, edited or written in a fixed form; the first row that is found is the reason
STRONG: tuple[tuple[str, str], ...] = (
    (
        "json",
        r"```json\b|\bjson[ -]schema\b|\b(?:return|output|answer in) (?:only )?(?:valid )?json\b"
        r"|\btool calls?\b",
    ),
    ("diff", r"^diff --git |^@@ |^--- a/"),
    ("fenced_code", r"^[ \t]*(?:```|~~~)"),
    ("stack_trace", r"\btraceback\b|\bstack ?trace\b"),
    ("compiler_error", r"\berror(?:\[\w+\])?:"),
    ("test_output", r"\btests? failed\b|\bassertion ?(?:failed|error)\b|\b\d{1,6} failed\b"),
    ("tool_output", r"\bexit (?:code|status)\b"),
    ("xml", r"</[a-z]"),
    ("sql", r"\bselect\b[^;.?!]{1,200}?\bfrom\b|\binsert into\b|\bcreate table\b"),
)
# one of these alone is in many a prompt, two different ones are a sign; searched for in words
WEAK: tuple[tuple[str, str], ...] = (
    ("compiler_warning", r"^warning:$"),
    (
        "path",
        r"\.(?:rs|tsx?|jsx?|py|go|java|c|h|cc|cpp|hpp|rb|cs|sql|ya?ml|toml)$|(?:^|/)(?:src|crates|tests|lib)/",
    ),
)
# a name with its folders is one: `src/app.tsx` is no `src/`, `.ts` and `.tsx`
WORD = re.compile(r"[\w./-]+:?")
ENOUGH = 2

STRONG_PATTERNS = [(reason, re.compile(pattern, re.MULTILINE)) for reason, pattern in STRONG]
WEAK_PATTERNS = [(reason, re.compile(pattern)) for reason, pattern in WEAK]


def prompt_shape(text: str) -> tuple[bool, str]:
    """(Whether the answer to a prompt is likely to repeat it, the marker that says so).

    One strong marker is enough, or two different weak ones; the reason is then the second one's.

    >>> prompt_shape("Rename `a` in src/app.tsx and src/main.py")
    (True, 'path')
    >>> prompt_shape("Tell me about src/app.tsx")
    (False, 'no_signal')
    """
    text = text.lower()
    for reason, pattern in STRONG_PATTERNS:
        if pattern.search(text):
            return True, reason
    words = dict.fromkeys(weakly(word) for word in WORD.findall(text))
    markers = [(reason, word) for reason, word in words if reason]
    return (True, markers[ENOUGH - 1][0]) if len(markers) >= ENOUGH else (False, NO_SIGNAL)


def classify_prompt(greedy: bool, prompt: str) -> PromptShape:
    """The class of a request's prompt; drafts are believed to fare alike in sequences of one class.

    >>> classify_prompt(True, "Repeat:\n```\nx = 1\n```").name
    'greedy, repeating'
    """
    repeating, marker = prompt_shape(prompt)
    return PromptShape(("greedy" if greedy else "sampled") + ", repeating" * repeating, marker)


def weakly(word: str) -> tuple[str | None, str]:
    """The weak marker of a word, and the word as it is told from others."""
    for reason, pattern in WEAK_PATTERNS:
        for name in (word, word.rstrip(".:-")):
            if pattern.search(name):
                return reason, name
    return None, ""
