"""The errors that speculon raises on purpose, all of them subclasses of `SpeculonError`."""

from __future__ import annotations

from typing import Any, Self

from speculon.core.logs import without_text


class SpeculonError(Exception):
    """Base of all errors that speculon raises on purpose. The message says what to do."""

    logged: str | None = None  # in the server's log, where the message has a client's text
    feature: str | None = None  # the row of the capability table that denies what was asked

    def about(self, feature: str) -> Self:
        """Sets the row of the capability table that denies the request, and returns the error."""
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
    """A request cannot be served. Nothing of it was started."""


class InvalidParameter(InvalidRequest):
    """A field is unknown, or its value is not allowed. `name`, `value` and `limit` say which and why."""

    def __init__(self, name: str, value: Any, limit: str):
        self.name, self.value, self.limit = name, value, limit
        super().__init__(f"{name} = {shorten(value)}: {limit}")

    def renamed(self, name: str) -> InvalidParameter:
        """A copy that names another field, as clients know it."""
        refusal = InvalidParameter(name, self.value, self.limit)
        refusal.feature, refusal.logged = self.feature, self.logged
        return refusal

    @property
    def for_log(self) -> str:
        return self.logged or without_text(self.name, self.value, self.limit)


class EmptyPrompt(InvalidRequest):
    """A prompt has no tokens, so there is nothing to continue."""


class TooLong(InvalidRequest):
    """The prompt and `max_tokens` together do not fit into the context."""


class NeverFits(InvalidRequest):
    """A request may need more KV pages than the whole pool has, so it could never finish."""


class UnknownMethod(InvalidRequest):
    """There is no drafting method of this name. The message lists the known ones."""

    logged = "the method is unknown"


class UnknownModel(InvalidRequest):
    """The server has no model, or the model no adapter, of this name. The message lists the known ones."""

    logged = "the model has another name"


class UnknownRequest(InvalidRequest):
    """No request with this id is running or among the latest ones."""


class QueueFull(InvalidRequest):
    """The server's queue is full. The client should try again later."""


class ConfigError(SpeculonError, ValueError):
    """A setting of the engine or of the server is wrong."""


class StateInUse(ConfigError):
    """Another engine already uses the state folder. The message names the folder and the process."""


class MemoryExceeded(SpeculonError):
    """A drafter does not fit into the memory limit. `memory` has the estimate, its parts and the limit, in
    bytes.
    """

    def __init__(self, method: str, memory: Any):
        self.method, self.memory = method, memory
        super().__init__(f"{method}: {memory}")


class ModelError(SpeculonError):
    """A checkpoint cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, no cached hub id of that name, or a model by name that was not fetched yet."""


class PullFailed(ModelNotFound):
    """`speculon pull` could not fetch a model, or what it fetched is not the pinned file. Nothing is kept."""


class MissingWeights(ModelError):
    """A checkpoint has no file of weights, or tensors are missing in it."""


class CorruptWeights(ModelError):
    """A file of weights is truncated, or contradicts its header."""


class UnsafeCheckpoint(ModelError):
    """A checkpoint has pickles or Python code, which may do harm, and the settings do not allow them."""


class UnsupportedModel(ModelError):
    """A checkpoint has a property that is not supported. The message names it."""


class WrongPair(ModelError):
    """A drafter does not fit the target. The message says what differs."""


class DataError(SpeculonError, ValueError):
    """A file of texts, for training or a benchmark, cannot be used. The message names the file, and the line
    if it is known.
    """


class EngineError(SpeculonError, RuntimeError):
    """A fault inside the engine. The engine stays usable unless the message says otherwise."""


class LogitsProcessorError(EngineError):
    """The logits processor of a request raised an error (the cause), or returned something that is not a row
    of logits. Only its own sequence ends, with finish reason `error`.
    """


class NotReady(EngineError):
    """The engine cannot serve at the moment: the model is being loaded, the engine hangs or is restarted, or
    the server is about to end.
    """


class LoadFailed(NotReady):
    """One model of a server with several could not be loaded. A later request tries again."""


class NoRoom(NotReady):
    """One model of a server with several does not fit into the memory. The message says how much it needs,
    and how much the other models hold.
    """


class BenchError(EngineError):
    """A benchmark stopped, because a figure of it would have been wrong."""


def shorten(value: Any, max_length: int = 80) -> str:
    """A value as a message shows it: its repr, cut after `max_length` characters."""
    shown = repr(value)
    return shown if len(shown) <= max_length else shown[: max_length - 3] + "..."
