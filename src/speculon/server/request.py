"""One HTTP request as the server works with it, and the fields that both routes share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from speculon.core.config import RequestSpeculation, SamplingParams, Structured
from speculon.core.errors import InvalidParameter
from speculon.core.images import ImageInput
from speculon.core.media.parts import IMAGE_PARTS
from speculon.decoding.text.deltas import ReplyParser, TextParser
from speculon.engine.admission import read_prediction
from speculon.server.model import ServedModel
from speculon.server.schemas import Content, Message, Sampling

# vLLM's field -> our field, in `structured_outputs` and in the fields that begin with `guided_`
NAMES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


class TextForm(NamedTuple):
    """The form of the text that a body requests."""

    name: str  # of the body's field
    value: Any  # the field's value, as an error shows it
    structured: Structured


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts and parameters of one HTTP request; each prompt is continued `params.n` times."""

    chat: bool  # a chat completion, not a completion
    prompts: list[list[int]]
    params: SamplingParams
    speculation: RequestSpeculation
    method: str  # the drafting method; shown in the answer
    stream: bool = False
    include_usage: bool = False  # whether the last chunk of a stream has the usage
    continuous_usage: bool = False  # whether all other chunks have it, too
    include_stats: bool = False
    explain: bool = False  # the source and the fate of each token
    echo: tuple[str, ...] = ()  # the prompts as sent, where the texts begin with them
    captured_prompts: tuple[bytes, ...] = ()  # as JSON; empty: the request is not captured
    parser: Callable[[], ReplyParser] = field(default=TextParser)
    form: TextForm | None = None
    prompt_name: str = "prompt"  # the client's field
    images: tuple[ImageInput, ...] = ()  # images of the prompt, which is then the only one

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.params.n

    def renamed(self, error: InvalidParameter) -> InvalidParameter:
        """The engine's refusal of a prompt or a form, under the name of the client's field."""
        if error.name == "prompt":
            return error.renamed(self.prompt_name)
        if self.form is None or not error.name.startswith("structured"):
            return error
        refusal = InvalidParameter(self.form.name, self.form.value, error.limit)
        refusal.feature = error.feature
        return refusal


def read_sampling(body: Sampling, model: ServedModel, form: TextForm | None, **more: Any) -> SamplingParams:
    """The fields that both routes share, the form of the text, and `more`; a field that is not set keeps the
    model's default, else ours.

    Raises `InvalidParameter`.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidParameter("best_of", body.best_of, "must equal n, because all choices are returned")
    names = set(SamplingParams.model_fields) & (set(Sampling.model_fields) - {"logit_bias", "thinking"})
    fields = {name: value for name in names if (value := getattr(body, name)) is not None}
    if (penalty := under_either(body, "repetition_penalty", "repeat_penalty")) is not None:
        fields["repetition_penalty"] = penalty
    if body.logit_bias:
        fields["logit_bias"] = read_biases(body.logit_bias)
    if body.stop is not None:  # empty ones are left out, as other servers do
        fields["stop"] = [text for text in ([body.stop] if isinstance(body.stop, str) else body.stop) if text]
    if form is not None:
        fields["structured"] = form.structured
    fields |= {name: value for name, value in more.items() if value is not None}
    defaults = dict(model.sampling)
    if getattr(body, "logprobs", None) is False:  # `more` leaves out what is off
        defaults.pop("logprobs", None)
    if "max_tokens" in fields and "min_tokens" in defaults:
        defaults["min_tokens"] = min(defaults["min_tokens"], fields["max_tokens"])
    return SamplingParams(**{**defaults, **fields})


def under_either(body: Sampling, name: str, other: str) -> Any:
    """The value of a field that has two names. Raises `InvalidParameter` if they have different values."""
    first, second = getattr(body, name), getattr(body, other)
    if first is not None and second is not None and first != second:
        raise InvalidParameter(name, first, f"must equal {other}, which is {second}")
    return second if first is None else first


def form_of(body: Sampling) -> TextForm | None:
    """The one form of a body, or None. Two forms, and forms that are wrong, are refused by name."""
    forms = [*response_format(body), *structured_outputs(body)]
    guided = [(f"guided_{name}", field) for name, field in NAMES.items()]
    forms += [(name, field, value) for name, field in guided if (value := getattr(body, name)) is not None]
    if not forms:
        return None
    if len(forms) > 1:
        (first, *_), (name, _, value), *_ = forms
        raise InvalidParameter(name, value, f"cannot be used together with {first}")
    name, field, value = forms[0]
    if field == "json_schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(name, value, f"must be JSON ({error})") from None
    try:
        return TextForm(name, value, Structured(**{field: value}))
    except InvalidParameter as error:
        raise error.renamed(name) from None


def response_format(body: Sampling) -> list[tuple[str, str, Any]]:
    """(name, our field, value) of `response_format`."""
    form = body.response_format
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [("response_format", "json_object", True)]
    if form.json_schema is None:
        raise InvalidParameter("response_format.json_schema", None, "is needed when type is json_schema")
    return [("response_format.json_schema", "json_schema", form.json_schema.schema_)]


def structured_outputs(body: Sampling) -> list[tuple[str, str, Any]]:
    if body.structured_outputs is None:
        return []
    fields = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    forms = [
        (f"structured_outputs.{name}", NAMES.get(name, name), value)
        for name, value in fields.items()
        if value is not False
    ]
    if not forms:
        names = ", ".join([*NAMES, "json_object"])
        raise InvalidParameter("structured_outputs", fields, f"must have one of {names}")
    return forms


def read_biases(fields: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in fields.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise InvalidParameter("logit_bias", token, "keys must be token ids")
        if not -100 <= bias <= 100:
            raise InvalidParameter("logit_bias", {token: bias}, "must be from -100 to 100")
        biases[int(token)] = bias
    return biases


def read_speculation(body: Sampling, model: ServedModel) -> RequestSpeculation:
    """What a request sets of its speculation, with the model's own defaults."""
    fields: dict[str, Any] = {} if model.speculation is None else {"defaults": model.speculation}
    if body.speculation:
        fields |= body.speculation.model_dump(exclude={"stats", "explain"}, exclude_none=True)
    # the narrowest first: many users may share a cache key
    users = (body.safety_identifier, body.user, body.prompt_cache_key)
    pool = fields.get("pool", next((name for name in users if name and name.strip()), None))
    if pool is not None:
        fields["pool"] = pool_digest(pool)
    if body.prediction is None:
        return RequestSpeculation(**fields)
    content, ids = body.prediction.content, body.prediction.token_ids
    if (content is None) == (ids is None):
        raise InvalidParameter("prediction.content", content, "give either content or token_ids")
    # the settings refuse a prediction that is too long, before it is encoded
    speculation = RequestSpeculation(**fields, prediction=text_of(content) if ids is None else tuple(ids))
    # encoded here, where no step waits for it
    encoded = read_prediction(speculation.prediction, model.tokenizer, model.vocab_size)
    return speculation.model_copy(update={"prediction": encoded})


def pool_digest(name: str) -> str:
    """A digest of a pool's name, so that the engine never has the name; the empty name stays empty."""
    return name and hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def common_fields(body: Sampling, model: ServedModel) -> dict[str, Any]:
    """Fields of `GenerationRequest` that both routes fill alike."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidParameter("stream_options", options.model_dump(), "needs stream = true")
    speculation = read_speculation(body, model)
    return {
        "speculation": speculation,
        "method": model.method if speculation.method is None else speculation.method,
        "stream": bool(body.stream),
        "include_usage": shows_usage(body),
        "continuous_usage": options is not None and options.continuous_usage_stats,
        "include_stats": body.speculation is not None and body.speculation.stats,
        "explain": body.speculation is not None and body.speculation.explain,
    }


def shows_usage(body: Sampling) -> bool:
    """Whether a stream ends with its usage."""
    options, usage = body.stream_options, body.usage
    return (options is not None and options.include_usage) or (usage is not None and usage.include)


def thinks(body: Sampling) -> bool | None:
    """Whether the model shall think, according to any of the fields that say so; None: no field does.

    Raises `InvalidParameter` if two fields contradict each other.
    """
    thinking, reasoning = body.thinking, body.reasoning
    if thinking is not None and not isinstance(thinking, bool):
        thinking = {"enabled": True, "disabled": False}.get(thinking.type)
    enabled = None if reasoning is None else False if reasoning.effort == "none" else reasoning.enabled
    fields = {
        "enable_thinking": body.enable_thinking, "think": body.think, "thinking": thinking,
        "reasoning": enabled, "reasoning_effort": False if body.reasoning_effort == "none" else None,
    }  # fmt: skip
    given = [(name, value) for name, value in fields.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise InvalidParameter(given[0][0], given[0][1], f"contradicts {name}, which is {value}")
    return given[0][1] if given else None


def text_of(content: Content | None) -> str:
    """One text from a string or from text parts."""
    return content or "" if isinstance(content, str | None) else "".join(part.text for part in content)


def template_message(message: Message) -> dict[str, Any]:
    """One message as a table, with a content. Its parts are not read yet."""
    fields = message.model_dump(exclude_none=True)
    return {**fields, "content": fields.get("content", "")}


def has_images(messages: Any) -> bool:
    """Whether any message, or item of a response, has one."""
    if not isinstance(messages, list):
        return False
    # an item that is left out has no field of this name, but may have been sent one
    contents = [message.content for message in messages if "content" in type(message).model_fields]
    return any(part.type in IMAGE_PARTS for parts in contents if isinstance(parts, list) for part in parts)
