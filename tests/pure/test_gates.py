"""Which prompts look as if their answers repeat them."""

from __future__ import annotations

from time import thread_time

import pytest

from speculon.speculation.control.gates import NO_SIGNAL, STRONG, WEAK, classify_prompt, prompt_shape

PROMPTS = [
    ("Fix this:\n```python\nx = 1\n```", "fenced_code"),
    ("  ~~~\nx\n~~~", "fenced_code"),
    ("```json\n{}\n```", "json"),
    ("Return only valid JSON.", "json"),
    ("It must match this JSON Schema", "json"),
    ("Answer with a tool call", "json"),
    ("diff --git a/x b/x", "diff"),
    ("apply\n@@ -1,2 +1,2 @@", "diff"),
    ("Traceback (most recent call last):", "stack_trace"),
    ("here is the stack trace", "stack_trace"),
    ("x.c:3: error: expected ;", "compiler_error"),
    ("error[E0308]: mismatched types", "compiler_error"),
    ("2 tests failed", "test_output"),
    ("=== 3 failed, 10 passed ===", "test_output"),
    ("AssertionError", "test_output"),
    ("the process ended with exit code 2", "tool_output"),
    ("<b>bold</b>", "xml"),
    ("SELECT name FROM users WHERE id = 3", "sql"),
    ("Rename it in src/app.tsx and src/main.py", "path"),
    ("warning: unused variable in main.rs", "path"),
    ("main.py: warning: unused", "compiler_warning"),
    ("Compare lib.go with util.go.", "path"),
    ("Move it from src/ to crates/core", "path"),
]


@pytest.mark.parametrize(("prompt", "reason"), PROMPTS)
def test_a_marker_is_found_whatever_its_case(prompt: str, reason: str) -> None:
    for written in (prompt, prompt.upper(), prompt.lower(), f"Please help me.\n{prompt}"):
        assert prompt_shape(written) == (True, reason), written


def test_every_marker_has_its_prompt() -> None:
    assert {reason for _, reason in PROMPTS} == {reason for reason, _ in (*STRONG, *WEAK)}


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "Write a poem about the sea.",
        "Please select the best of these words.",
        "Tell me about src/app.tsx",  # one name, if with a folder and an ending that holds another one
        "What is in main.py? And why main.py?",  # the same name counts once
        "main.py.",
        "a warning: this is hard",
        "warning: and again a warning: this is hard",
        "This is an error of mine, and e.g. 3.5 is a number.",
        "He took the exit.",
        "a < b / c",
    ],
)
def test_nothing_is_made_of_ordinary_prompts(prompt: str) -> None:
    assert prompt_shape(prompt) == (False, NO_SIGNAL)


@pytest.mark.parametrize("part", ["a/", "\n ", "select ", ".tsx", "`", "warning:"])
def test_a_long_prompt_cannot_keep_the_server_busy(part: str) -> None:
    began = thread_time()
    prompt_shape(part * (200_000 // len(part)))
    assert thread_time() - began < 2.0  # 0.2 s at the worst seen


def test_prompt_classes_follow_from_the_request() -> None:
    names = {
        classify_prompt(greedy, prompt).name
        for greedy in (True, False)
        for prompt in ("", "Hello", "Edit:\n```\nx = 1\n```")
    }
    assert names == {"greedy", "sampled", "greedy, repeating", "sampled, repeating"}
