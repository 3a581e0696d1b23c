"""Training sequences: files of the corpus as they are, and samples that teach copying.

Every sequence is drawn from a generator seeded by (seed, sequence number), so a resumed run reads the same
data.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizer import END_OF_TEXT, VOCAB_SIZE, chat_answer, chat_prompt, train_tokenizer
from tokenizers import Tokenizer

from speculon.measure.bench import corpus

COPY_SHARE = 0.5
"""Share of the sequences made of copy and chat samples."""

SAMPLE_TASKS = {"edit": 0.74, "repeat": 0.08, "quoted": 0.08, "induction": 0.05, "write": 0.05}

ANSWER_WEIGHT = 4.0
"""How much more a token of a copied answer counts in the loss than one of plain code."""

_REPEAT_PHRASES = (
    "Repeat this function.",
    "Repeat this function exactly as it is.",
    "Write this function again without any change.",
    "Copy this code.",
    "Print the code below once more.",
)
_EDIT_PHRASES = (
    "Rename `{old}` to `{new}` in this function.",
    "Write this function again with `{old}` renamed to `{new}`.",
    "Replace the name `{old}` by `{new}` and change nothing else.",
)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that no reader ever sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def load_tokenizer(folder: Path, root: Path) -> Tokenizer:
    """The tokenizer of a run, trained on the training files the first time."""
    path = folder / "tokenizer.json"
    if not path.exists():
        names = corpus.stdlib_files(root, held_out=False)
        texts = (text for name in names if (text := corpus.read_source(name, root)))
        write_atomically(path, train_tokenizer(texts, VOCAB_SIZE).to_str().encode())
    return Tokenizer.from_file(str(path))


@dataclass(frozen=True)
class Snippet:
    """A function of a training file, the names that may be renamed in it, and the length of its token run."""

    source: str
    identifiers: tuple[str, ...]
    length: int


class Corpus:
    """The tokenized training files and their functions."""

    def __init__(self, root: Path, tokenizer: Tokenizer, cache: Path) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id(END_OF_TEXT)
        if not cache.exists():
            prepared = json.dumps(self._prepare(root)).encode()
            write_atomically(cache, prepared)
        files, snippets = json.loads(cache.read_bytes())
        self.files = [np.array([*ids, self.end], dtype=np.int32) for ids in files]
        self.snippets = [Snippet(source, tuple(names), size) for source, names, size in snippets]
        self.names = sorted(
            {name for item in self.snippets for name in item.identifiers if 2 <= len(name) <= 24}
        )
        self.tokens = sum(len(file) for file in self.files)

    def _prepare(self, root: Path) -> tuple[list[list[int]], list[tuple[str, tuple[str, ...], int]]]:
        """Token ids of every file, and source, identifiers and length of every function."""
        names = corpus.stdlib_files(root, held_out=False)
        sources = {name: text for name in names if (text := corpus.read_source(name, root))}
        files = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sources.values()))]
        functions = [
            function for name, text in sources.items() for function in corpus.functions_in(text, name)
        ]
        lengths = [
            len(encoding.ids) for encoding in self.tokenizer.encode_batch([item.source for item in functions])
        ]
        pairs = zip(functions, lengths, strict=True)
        return files, [(item.source, item.identifiers, size) for item, size in pairs if 16 <= size <= 480]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


class Stream:
    """An endless, resumable stream of sequences of a corpus."""

    def __init__(self, data: Corpus, seed: int, row: int = 0, position: int = 0) -> None:
        self.data, self.seed = data, seed
        self.row, self.position = row, position
        self._epoch = -1
        self._tokens = np.zeros(0, dtype=np.int32)

    def state(self) -> dict[str, int]:
        """What a resumed stream needs: sequences drawn and tokens of plain code read."""
        return {"row": self.row, "position": self.position}

    def batch(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [rows, length + 1] and the loss weight of each target [rows, length]."""
        drawn = [self._draw(length + 1) for _ in range(rows)]
        return np.stack([ids for ids, _ in drawn]), np.stack([weights[1:] for _, weights in drawn])

    def _draw(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        rng = random.Random(f"{self.seed}:{self.row}")
        self.row += 1
        if rng.random() >= COPY_SHARE:
            return self._code(size), np.ones(size, dtype=np.float32)
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < size:
            room = size - len(ids)
            task = (
                rng.choices(list(SAMPLE_TASKS), list(SAMPLE_TASKS.values()))[0] if room >= 72 else "induction"
            )
            sample, scores = self._sample(task, rng, room)
            if len(sample) > room and len(ids) > size // 3:
                sample, scores = self._sample("induction", rng, room)
            ids.extend([*sample, self.data.end])
            weights.extend([*scores, 1.0])
        return np.array(ids[:size], dtype=np.int32), np.array(weights[:size], dtype=np.float32)

    def _code(self, size: int) -> np.ndarray:
        """The next `size` tokens of the shuffled files; the shuffle changes with every pass."""
        parts: list[np.ndarray] = []
        while size:
            epoch, offset = divmod(self.position, self.data.tokens)
            if epoch != self._epoch:
                count = len(self.data.files)
                order = random.Random(f"{self.seed}:epoch:{epoch}").sample(range(count), count)
                self._tokens, self._epoch = np.concatenate([self.data.files[i] for i in order]), epoch
            part = self._tokens[offset : offset + size]
            parts.append(part)
            self.position += len(part)
            size -= len(part)
        return np.concatenate(parts)

    def _pick(self, rng: random.Random, longest: int) -> Snippet:
        for _ in range(20):
            snippet = rng.choice(self.data.snippets)
            if snippet.length <= longest:
                break
        return snippet

    def _new_name(self, rng: random.Random, taken: str) -> str:
        if rng.random() < 0.4:
            return corpus.draw_new_name(rng, taken)
        while True:
            name = rng.choice(self.data.names)
            if rng.random() < 0.4:
                name = f"{name.strip('_')}_{rng.choice(self.data.names).strip('_')}"[:28].rstrip("_")
            if name not in taken and name.isidentifier():
                return name

    def _sample(self, task: str, rng: random.Random, room: int) -> tuple[list[int], list[float]]:
        """Token ids of one sample and what each counts in the loss."""
        if task == "induction":
            run = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(4, max(5, min(64, room // 3))))]
            times = rng.randint(2, 4)
            return run * times, [0.0] * len(run) + [1.0] * (len(run) * (times - 1))
        function = self._pick(rng, (room - 50) // 2)
        source = function.source
        if task == "edit":
            old = rng.choice(function.identifiers)
            new = self._new_name(rng, source)
            user = corpus.edit_prompt(source, old, new)
            if rng.random() < 0.2:
                user = f"{rng.choice(_EDIT_PHRASES).format(old=old, new=new)}\n\n{corpus.fenced(source)}"
            return self._chat(user, corpus.edit_answer(source, old, new), ANSWER_WEIGHT)
        if task == "repeat":
            user = f"{rng.choice(_REPEAT_PHRASES)}\n\n{corpus.fenced(source)}"
            return self._chat(user, corpus.fenced(source), ANSWER_WEIGHT)
        if task == "quoted":
            between = self._pick(rng, max(40, (room - 50) // 4)).source
            ids = self.data.encode(f"{source}\n\n\n{between}\n\n\n{source}\n")
            return ids, [1.0] * len(ids)
        heading = re.search(r"def (\w+)", source)
        user = f"Write a Python function named `{heading[1] if heading else 'main'}`."
        return self._chat(user, corpus.fenced(source), 1.0)

    def _chat(self, user: str, assistant: str, weight: float) -> tuple[list[int], list[float]]:
        prompt, answer = self.data.encode(chat_prompt(user)), self.data.encode(chat_answer(assistant))
        return prompt + answer, [1.0] * len(prompt) + [weight] * len(answer)


def held_out_tokens(root: Path, tokenizer: Tokenizer) -> np.ndarray:
    """All held-out files as one token run."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    texts = [
        text for name in corpus.stdlib_files(root, held_out=True) if (text := corpus.read_source(name, root))
    ]
    return np.concatenate(
        [np.array([*item.ids, end], dtype=np.int32) for item in tokenizer.encode_batch(texts)]
    )


def edit_probe(root: Path, tokenizer: Tokenizer, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer token ids of `count` edits of held-out functions of 30 to 200 tokens."""
    rng = random.Random(seed)
    functions = list(corpus.held_out_functions(root))
    lengths = [len(item.ids) for item in tokenizer.encode_batch([function.source for function in functions])]
    functions = [function for function, length in zip(functions, lengths, strict=True) if 30 <= length <= 200]
    probes: list[tuple[list[int], list[int]]] = []
    for function in rng.sample(functions, min(count, len(functions))):
        old = rng.choice(function.identifiers)
        new = corpus.draw_new_name(rng, function.source)
        prompt = chat_prompt(corpus.edit_prompt(function.source, old, new))
        answer = chat_answer(corpus.edit_answer(function.source, old, new))
        probes.append((tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids))
    return probes
