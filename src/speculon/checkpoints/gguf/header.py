"""The header of a GGUF file: its metadata, and the type and shape of each tensor. Nothing is loaded."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from speculon.core.errors import CorruptWeights, ModelError, ModelNotFound, UnsupportedModel

SUFFIX = ".gguf"
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)  # one file of several
# number in the file -> name, parameters of a block, bytes of a block
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # before each text
VERSIONS = (2, 3)
SPLIT = (
    "one part of a split GGUF file; runtime llama loads the parts under their own names "
    "(NAME-00001-of-0000N.gguf), runtime torch only when `llama-gguf-split --merge` has joined them"
)
TOKENS, TEMPLATE = "tokenizer.ggml.tokens", "tokenizer.chat_template"  # keys of the metadata
CONTROL = 3  # the type of tokens that no text has
FACTORS = "rope_freqs.weight"  # of the wavelengths of rotary positions
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
PREDICTION_LAYERS = "nextn_predict_layers"  # of multi-token prediction, behind the model's own
NO_PARAMETERS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the file stores it; `shape` is in the order of torch, `begin` counts from the data."""

    name: str
    type: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself. Arrays of strings are their lengths, unless asked for."""

    path: Path
    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]
    texts: Mapping[str, tuple[int, int]]  # where the arrays of strings begin in the file, and their lengths
    begin: int  # of the data
    num_parts: int  # files that the model is split into, as it says
    files: tuple[Path, ...] = ()  # those that were read

    def of_architecture(self, name: str) -> Any:
        """A value whose key begins with the architecture's name; None where the file has none."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def number(self, name: str) -> int | None:
        """The same, where it is a whole number."""
        value = self.of_architecture(name)
        return value if isinstance(value, int) else None

    @property
    def num_layers(self) -> int | None:
        """Without those of multi-token prediction, which the file counts as well."""
        blocks = self.number("block_count")
        return None if blocks is None else blocks - (self.number(PREDICTION_LAYERS) or 0)

    @property
    def by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def factors(self, name: str) -> list[float]:
        """Factors of wavelengths; none where the file has no such tensor."""
        tensor = self.by_name.get(name)
        if tensor is None:
            return []
        if tensor.type != "F32":
            raise UnsupportedModel(f"{self.path}: {name} of type {tensor.type} is not supported")
        with self.path.open("rb") as file:
            file.seek(self.begin + tensor.begin)
            return [*struct.unpack(f"<{tensor.size}f", file.read(tensor.num_bytes))]

    @property
    def types(self) -> Counter[str]:
        """Number of tensors by type."""
        return Counter(tensor.type for tensor in self.tensors)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors if tensor.name not in NO_PARAMETERS)

    @property
    def dtype(self) -> str:
        """The dtype its weights are computed in: fp32 or fp16 where all have it, else bf16."""
        types = set(self.types)
        if types <= {"F32", "F64"}:
            return "float32"
        return "float16" if types <= {"F32", "F16"} else "bfloat16"

    @property
    def has_blocks(self) -> bool:
        """Whether any tensor is quantised."""
        return not set(self.types) <= {"F64", "F32", "F16", "BF16"}

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence or a turn, as the metadata names them."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        return tuple(dict.fromkeys(number for number in ids if isinstance(number, int)))


def is_gguf(path: str | Path) -> bool:
    """Whether `path` has the name of a GGUF file. A folder of such a name is none."""
    return str(path).lower().endswith(SUFFIX) and not Path(path).expanduser().is_dir()


def is_later_part(path: str | Path) -> bool:
    """Whether `path` has the name of a part of a split file that is not the first."""
    part = PART.search(str(path))
    return part is not None and int(part[1]) != 1


def read_gguf(path: str | Path, lists: frozenset[str] = frozenset()) -> GgufHeader:
    """Reads the header. `lists` has the keys of arrays of strings that are kept.

    Raises `ModelNotFound`, `CorruptWeights` for a damaged file, `UnsupportedModel` for one of several parts.
    """
    file = Path(path).expanduser()
    if PART.search(file.name) and file.is_file():
        raise UnsupportedModel(f"{file}: {SPLIT}")
    header = read_files((file,), lists)
    if header.num_parts > 1:
        raise UnsupportedModel(f"{file}: {SPLIT}")
    return header


def read_split(path: str | Path) -> GgufHeader:
    """The same of a file that may be the first of several: its metadata, and the tensors of all parts.

    Each tensor begins in the file of its own part. Raises also `ModelNotFound` for a part that is missing.
    """
    file = Path(path).expanduser()
    part = PART.search(file.name)
    if part is None or not file.is_file():
        return read_gguf(file)
    name, number, count = file.name[: part.start()], *map(int, part.groups())
    if is_later_part(file):
        first = f"{name}-00001-of-{count:05}.gguf"
        raise UnsupportedModel(f"{file}: part {number} of {count}; the model is loaded by its first, {first}")
    others = (file.with_name(f"{name}-{other:05}-of-{count:05}.gguf") for other in range(2, count + 1))
    header = read_files((file, *others))
    if header.num_parts != count:
        raise CorruptWeights(f"{file}: its name says {count} parts, its header {header.num_parts}")
    return header


def read_files(files: tuple[Path, ...], lists: frozenset[str] = frozenset()) -> GgufHeader:
    """The header of the first file, with the tensors of all of them."""
    for number, file in enumerate(files, 1):
        if not file.is_file():
            which = f" (part {number} of {len(files)})" if len(files) > 1 else ""
            raise ModelNotFound(f"{file}: no such file{which}")
    stamps = tuple((status.st_size, status.st_mtime_ns) for status in (file.stat() for file in files))
    header = parse_once(files, stamps)
    return with_lists(header, lists) if lists else header


@lru_cache(maxsize=1)  # a load asks several times
def parse_once(files: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> GgufHeader:
    headers = [read(file, lambda reader: reader.header()) for file in files]
    for header in headers:
        check_size(header)
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    if not tensors:
        raise CorruptWeights(f"{files[0]}: it has no tensors")
    return replace(headers[0], tensors=tensors, files=files)


def with_lists(header: GgufHeader, lists: frozenset[str]) -> GgufHeader:
    """The same with the lists of these arrays of strings."""
    places = {key: place for key, place in header.texts.items() if key in lists}
    found = read(header.path, lambda reader: {key: reader.texts(*place) for key, place in places.items()})
    return replace(header, metadata=header.metadata | found)


def read(file: Path, what: Callable[[HeaderReader], T]) -> T:
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return what(HeaderReader(file, data))
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"{file}: not readable ({error})") from error
    except (struct.error, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        raise CorruptWeights(f"{file}: its GGUF header is damaged or truncated ({error})") from error


def check_size(header: GgufHeader) -> None:
    """Raises `CorruptWeights` where the data ends before its last tensor."""
    size = header.path.stat().st_size
    needed = max((header.begin + tensor.begin + tensor.num_bytes for tensor in header.tensors), default=0)
    if size < needed:
        raise CorruptWeights(f"{header.path}: {size} bytes, but its header says {needed}: truncated")


def chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template, or several by name."""
    default, prefix = metadata.get(TEMPLATE), f"{TEMPLATE}."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    if not named:
        return default or None
    return {"default": default, **named} if default else named


class HeaderReader:
    """Reads from front to back. Beyond the end of the file it raises `struct.error` or `ValueError`."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0
        self.places: dict[str, tuple[int, int]] = {}  # of arrays of strings

    def header(self) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise CorruptWeights(f"{self.path}: not a GGUF file: it does not begin with GGUF")
        self.at = 4
        version, tensors, pairs = self.numbers("IQQ")
        if version not in VERSIONS:
            raise UnsupportedModel(f"{self.path}: GGUF version {version}; {VERSIONS} are supported")
        metadata = dict(self.pair() for _ in range(self.count(pairs)))
        architecture, num_parts = metadata.get("general.architecture", ""), metadata.get("split.count", 0)
        first = metadata.get("split.no", 0) < 1  # the parts behind it have nothing but tensors
        if not isinstance(architecture, str) or (first and not architecture):
            raise CorruptWeights(f"{self.path}: its metadata has no general.architecture")
        infos = tuple(self.tensor() for _ in range(self.count(tensors)))
        alignment = metadata.get("general.alignment", 32)
        begin = -(-self.at // alignment) * alignment
        return GgufHeader(self.path, architecture, metadata, infos, self.places, begin, max(1, num_parts))

    def count(self, number: int) -> int:
        """A count of things of at least one byte each."""
        if number > len(self.data) - self.at:
            raise ValueError(f"{number} entries in {len(self.data)} bytes")
        return number

    def numbers(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def text(self) -> str:
        length = self.count(self.numbers("Q")[0])
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", errors="replace")

    def pair(self) -> tuple[str, Any]:
        key = self.text()
        return key, self.value(self.numbers("I")[0], key)

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])[0]
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        inner, length = self.numbers("IQ")
        self.count(length)
        if inner in SCALARS:
            return list(self.numbers(f"{length}{SCALARS[inner]}"))
        if inner != STRING:
            raise ValueError(f"an array of type {inner}")
        self.places[key] = self.at, length
        return self.skip_texts(length)

    def skip_texts(self, number: int) -> int:
        """Their number, which is what an array of strings is here: a list of them takes much memory."""
        data, at, size = self.data, self.at, LENGTH.size
        for _ in range(number):
            at += size + LENGTH.unpack_from(data, at)[0]
        self.at = self.count(at - self.at) + self.at
        return number

    def texts(self, begin: int, number: int) -> list[str]:
        """Those of an array that begins there; `text` would take twice as long."""
        self.at = begin
        data, at, found = self.data, begin, []
        for _ in range(number):
            first = at + LENGTH.size
            at = first + LENGTH.unpack_from(data, at)[0]
            found.append(data[first:at].decode("utf-8", errors="replace"))
        self.at += self.count(at - begin)
        return found

    def tensor(self) -> Tensor:
        name = self.text()
        (dims,) = self.numbers("I")
        shape = tuple(reversed(self.numbers(f"{self.count(dims)}Q")))
        number, begin = self.numbers("IQ")
        if number not in TYPES:
            raise UnsupportedModel(f"{self.path}: tensor {name} has type {number}, which is not supported")
        kind, block, num_bytes = TYPES[number]
        return Tensor(name, kind, shape, begin, math.prod(shape) // block * num_bytes)
