"""Settings that refuse bad values with one typed error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationError

from speculon.core.errors import InvalidParameter, InvalidRequest

# types of validation errors of a value beyond a limit, or not among those that are known
BEYOND = ("less_than_equal", "too_long", "literal_error")


class Checked(BaseModel):
    """Refuses bad values with `InvalidParameter`, which names the field, the value and the limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    features: ClassVar[str] = ""  # under which the capability table has limits of these fields, if it has

    def __init__(self, /, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            refusal = invalid_parameter(error, type(self))
            if self.features and error.errors(include_url=False)[0]["type"] in BEYOND:
                refusal.about(f"{self.features}.{refusal.name.partition('.')[0]}")
            raise refusal from None


def invalid_parameter(error: ValidationError, model: type[BaseModel] | None = None) -> InvalidParameter:
    """The first fault of a validation; an unknown field of `model` comes with the nearest known name."""
    first = error.errors(include_url=False)[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, InvalidParameter):  # raised by settings within settings: its name is the inner one
        return InvalidParameter(".".join([*map(str, first["loc"]), inner.name]), inner.value, inner.limit)
    name = ".".join(str(part) for part in first["loc"]) or error.title
    limit = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        limit = f"unknown field{nearest(name, model.model_fields if model else ())}"
    return InvalidParameter(name, None if first["type"] == "missing" else first["input"], limit)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name that is most like it; empty where none is."""
    matches = get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def new_or_there(value: Path) -> Path:
    if not (value.is_dir() or (value.absolute().parent.is_dir() and not value.exists())):
        raise ValueError("must be a folder, or a new name in an existing folder")
    return value


def file_in_folder(value: Path) -> Path:
    if not value.absolute().parent.is_dir() or (value.exists() and not value.is_file()):
        raise ValueError("must be a file, or a new name, in an existing folder")
    return value


# existing, or new inside an existing folder
FolderPath = Annotated[Path, AfterValidator(new_or_there)]
FilePath = Annotated[Path, AfterValidator(file_in_folder)]


def is_list(value: object) -> TypeGuard[Seq[Any]]:
    return isinstance(value, Seq) and not isinstance(value, str | bytes | bytearray)


def as_list(prompts: Any) -> list[Any]:
    """Several prompts as they are; a single one (a text, token ids, a table) as a list of one."""
    ids = is_list(prompts) and len(prompts) > 0 and isinstance(prompts[0], int)
    if ids or isinstance(prompts, str | Mapping):
        return [prompts]
    if not is_list(prompts):
        raise InvalidParameter(
            "prompts",
            prompts,
            "must be a string, a list of token ids, or a list of strings or of lists of token ids",
        )
    return list(prompts)


def conversations(messages: Seq[Any]) -> list[Seq[Any]] | None:
    """The conversations of a list of them; None where it is a single one."""
    if not is_list(messages) or not messages or not is_list(messages[0]):
        return None
    return list(messages)


def one_per_prompt(name: str, value: Any, count: int, kind: type | tuple[type, ...]) -> list[Any]:
    if isinstance(value, kind):
        return [value] * count
    if not is_list(value) or not all(isinstance(item, kind) for item in value):
        names = " or ".join(item.__name__ for item in (kind if isinstance(kind, tuple) else (kind,)))
        raise InvalidParameter(name, value, f"must be {names}, or a list with one per prompt")
    if len(value) != count:
        raise InvalidRequest(
            f"{name}: {len(value)} values for {count} prompts; give one for all prompts, or one for each"
        )
    return list(value)


# a name has no colon: that is between a model and its adapter
AdapterName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+$", max_length=64)]
AdapterFolder = Annotated[str, StringConstraints(min_length=1)]
