"""Every error a user can meet."""

from __future__ import annotations

from typing import Any, Self

from speculon.core.logs import without_text


class SpeculonError(Exception):
    """Base of everything raised on purpose."""

    logged: str | None = None  # in the server's log, where the message has a client's text
    feature: str | None = None  # the row of the capability table that denies what was asked

    def about(self, feature: str) -> Self:
        """The same error, with the row of the capability table that it is about."""
        self.feature = feature
        return self

    @property
    def for_log(self) -> str:
        """The message without text of a request."""
        return self.logged or str(self)

    # errors pass between processes, and the constructors of some take more than a message
    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (type(self), str(self), self.__dict__)


def rebuilt(error_class: type[SpeculonError], message: str, fields: dict[str, Any]) -> SpeculonError:
    error = error_class.__new__(error_class, message)
    error.__dict__.update(fields)
    return error


class InvalidRequest(SpeculonError, ValueError):
    """The request cannot be served; nothing was started."""


class InvalidParameter(InvalidRequest):
    """One field is out of its range or unknown. Carries `name`, `value` and `limit`."""

    def __init__(self, name: str, value: Any, limit: str):
        self.name, self.value, self.limit = name, value, limit
        super().__init__(f"{name} = {shorten(value)}: {limit}")

    def renamed(self, name: str) -> InvalidParameter:
        """The same refusal, under the name of another field."""
        refusal = InvalidParameter(name, self.value, self.limit)
        refusal.feature, refusal.logged = self.feature, self.logged
        return refusal

    @property
    def for_log(self) -> str:
        return self.logged or without_text(self.name, self.value, self.limit)


class EmptyPrompt(InvalidRequest):
    """A prompt without a single token leaves nothing to continue."""


class TooLong(InvalidRequest):
    """prompt + max_tokens does not fit the context."""


class NeverFits(InvalidRequest):
    """The request needs more KV pages over its lifetime than the pool owns."""


class UnknownMethod(InvalidRequest):
    """No drafting method (or policy) of that name."""

    logged = "the method is unknown"


class UnknownModel(InvalidRequest):
    """The server serves a model of another name."""

    logged = "the model has another name"


class UnknownRequest(InvalidRequest):
    """No request of this id runs, or is among the latest."""


class QueueFull(InvalidRequest):
    """More requests wait than the server keeps; ask again later."""


class ConfigError(SpeculonError, ValueError):
    """The engine's own settings are wrong."""


class StateInUse(ConfigError):
    """Another engine writes the state folder; names the folder and the process."""


class MemoryExceeded(SpeculonError):
    """A drafter does not fit into the memory limit. `memory` has the estimate, its parts and the limit."""

    def __init__(self, method: str, memory: Any):
        self.method, self.memory = method, memory
        super().__init__(f"{method}: {memory}")


class ModelError(SpeculonError):
    """The checkpoint cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, no cached hub id of that name, or a model by name that was not fetched yet."""


class PullFailed(ModelNotFound):
    """`speculon pull` could not fetch a model, or what it fetched is not the pinned file. Nothing is kept."""


class MissingWeights(ModelError):
    """A folder with a config but no safetensors file, or with tensors missing."""


class CorruptWeights(ModelError):
    """A weight file that is truncated or not what its header says."""


class UnsafeCheckpoint(ModelError):
    """Pickle weights or remote code, which the settings do not allow."""


class UnsupportedModel(ModelError):
    """An architecture trait that is not supported, named."""


class WrongPair(ModelError):
    """A drafter that does not fit the target; names what differs."""


class DataError(SpeculonError, ValueError):
    """Texts to learn from or measure that cannot be read or used; names the file, and the line if known."""


class EngineError(SpeculonError, RuntimeError):
    """A fault inside the engine, which stays usable."""


class LogitsProcessorError(EngineError):
    """The logits processor of a request raised an error, which is the cause, or returned no row of logits.

    It ends its sequence alone, with finish reason `error`.
    """


class NotReady(EngineError):
    """The model is being loaded, the engine hangs or is started again, or the server is about to end."""


class LoadFailed(NotReady):
    """One model of several could not be loaded; a later request tries again."""


class NoRoom(NotReady):
    """One model of several does not fit into the server's memory; names what it needs and who holds what."""


class BenchError(EngineError):
    """A benchmark that would have reported an untrue figure."""


def shorten(value: Any, max_length: int = 80) -> str:
    """A refused value as a message shows it."""
    shown = repr(value)
    return shown if len(shown) <= max_length else shown[: max_length - 3] + "..."
