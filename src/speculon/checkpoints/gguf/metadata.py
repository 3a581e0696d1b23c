"""The metadata of a GGUF file's architecture. What speculon does not know refuses the file by name."""

from __future__ import annotations

import math
from typing import Any

from speculon.checkpoints.gguf.header import TOKENS, GgufHeader
from speculon.core.errors import CorruptWeights, UnsupportedModel

REQUIRED = object()
KINDS: dict[str, type | tuple[type, ...]] = {
    "a whole number": int,
    "a number": (int, float),
    "true or false": bool,
    "a text": str,
}


def refusal(header: GgufHeader, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{header.path}: {what}; take its safetensors files")


class Metadata:
    """The values of an architecture by their names, without its prefix.

    A value that nobody has asked for may change what the model computes, so `refuse_unread` refuses the file.
    Absent values take the default of llama.cpp, since its converter leaves them out.
    """

    def __init__(self, header: GgufHeader):
        self.header, self._read = header, set[str]()

    def whole(self, name: str, default: Any = REQUIRED, *, zero: bool = False) -> int:
        """A count, which may be zero only where that means something; a list has it for each layer."""
        value = self._value(name, default)
        if isinstance(value, list) and value:
            if any(one != value[0] for one in value):
                raise refusal(self.header, f"{self._key(name)} is not the same in all layers")
            value = value[0]
        return self._positive(name, self._checked(name, value, "a whole number"), zero)

    def real(self, name: str, default: Any = REQUIRED, *, zero: bool = False) -> float:
        value = float(self._checked(name, self._value(name, default), "a number"))
        return self._positive(name, value, zero)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        return self._checked(name, self._value(name, default), "true or false")

    def text(self, name: str, default: Any = REQUIRED) -> str:
        return self._checked(name, self._value(name, default), "a text")

    def counts(self, name: str) -> list[int]:
        """A count of each layer, which may be zero."""
        value = self._value(name, REQUIRED)
        if not isinstance(value, list) or len(value) != self.num_layers:
            return [self.whole(name)] * self.num_layers
        return [self._positive(name, self._checked(name, one, "a whole number"), True) for one in value]

    def layers(self, name: str, default: int, number: int) -> list[bool]:
        """Which of so many layers: a list says it, or the period of which the last layer is none."""
        value = self._value(name, default)
        if isinstance(value, list) and len(value) == number:
            return [bool(one) for one in value]
        period = self._positive(name, self._checked(name, value, "a whole number"), True)
        return [period == 0 or layer % period < period - 1 for layer in range(number)]

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses the file where it has a value, and none of these."""
        value = self._value(name, None)
        if value is not None and value not in allowed:
            known = " or ".join(map(str, allowed))
            said = f"its metadata says {self._key(name)} = {shorten(value)}"
            raise refusal(self.header, f"{said}, where only {known} is supported")

    def ignore(self, *names: str) -> None:
        """Of values that do not change what the model computes."""
        self._read.update(names)

    def refuse_unread(self) -> None:
        prefix = self._key("")
        for key, value in self.header.metadata.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._read:
                said = f"its metadata says {key} = {shorten(value)}, which speculon does not know"
                raise refusal(self.header, said)

    @property
    def vocab_size(self) -> int:
        """As many as have embeddings; the number that the metadata says may be an older one."""
        embedding = self.header.by_name.get("token_embd.weight")
        self.ignore("vocab_size")
        return embedding.shape[0] if embedding else self.whole("vocab_size", self.header.metadata.get(TOKENS))

    @property
    def num_layers(self) -> int:
        number = self.whole("block_count")
        if number > len(self.header.tensors):
            what = f"{number}, but it has {len(self.header.tensors)} tensors"
            raise CorruptWeights(f"{self.header.path}: its metadata says {self._key('block_count')} = {what}")
        return number

    def token(self, name: str) -> int | None:
        """The id of a special token; None where the file has none within its vocabulary."""
        value = self.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < self.vocab_size else None

    def _key(self, name: str) -> str:
        return f"{self.header.architecture}.{name}"

    def _value(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self.header.metadata.get(self._key(name), default)
        if value is REQUIRED:
            raise CorruptWeights(f"{self.header.path}: its metadata has no {self._key(name)}")
        return value

    def _checked(self, name: str, value: Any, kind: str) -> Any:
        if not isinstance(value, KINDS[kind]) or isinstance(value, bool) != (kind == "true or false"):
            what = f"{self._key(name)} = {shorten(value)}, which is not {kind}"
            raise CorruptWeights(f"{self.header.path}: its metadata says {what}")
        return value

    def _positive(self, name: str, value: Any, zero: bool) -> Any:
        if not (value > 0 or (zero and value == 0)) or value == math.inf:
            least = "a positive number or 0" if zero else "positive and finite"
            raise CorruptWeights(f"{self.header.path}: {self._key(name)} = {value}, which is not {least}")
        return value


def shorten(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
