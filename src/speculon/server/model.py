"""The model as requests are read against it: its name, tokenizer, default method and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from speculon.core.config import RequestSpeculation, SpeculationConfig
from speculon.core.config.serve import ServeConfig
from speculon.core.errors import InvalidParameter, TooLong
from speculon.core.media.prompts import Images
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.admission import CONTEXT, max_length

OF_REQUESTS = RequestSpeculation.model_fields.keys() & SpeculationConfig.model_fields.keys()


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str  # that clients use
    tokenizer: Tokenizer
    max_context: int
    vocab_size: int
    own_method: str  # the method of its process
    config: ServeConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults for what a request does not set
    max_new_tokens: int | None = None  # the checkpoint's, used if neither request nor settings have a limit
    images: Images = field(default_factory=Images.none)
    adapter: str = ""  # the target's adapter that the client named
    speculation: SpeculationConfig | None = None  # its settings now, if its process was started with others

    @property
    def method(self) -> str:
        """The method for a request that names none."""
        return self.own_method if self.speculation is None else self.speculation.method

    def under(self, adapter: str) -> Self:
        """The same model under one of its adapters, with the name of both."""
        return replace(self, name=f"{self.name}:{adapter}", adapter=adapter) if adapter else self

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        A prompt that is far too long is refused after its beginning: other requests wait meanwhile.
        """
        part = 4 * self.max_context
        while part < len(text):
            # twice the context: the cut may have split a word into more tokens
            if len(self.tokenizer.encode(text[:part])) > 2 * self.max_context:
                message = f"prompt of {len(text)} characters > context {self.max_context} tokens"
                raise TooLong(message).about(CONTEXT)
            part *= 4
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def max_tokens(
        self,
        requested: int | None,
        prompts: list[list[int]],
        default: int | None = None,
        min_tokens: int | None = None,
    ) -> int:
        """`max_tokens` of a request; by default as many as the model's settings, or its checkpoint and
        `default`, server and context allow. Of these, only the last two are limits to `min_tokens`.

        Checked before the prompts go to the engine, by the engine's own rule (`max_length`).
        """
        limit, longest = self.config.max_request_tokens, max(map(len, prompts))
        max_length(longest, None, self.max_context)
        if requested is None:
            own = self.sampling.get("max_tokens")
            defaults = (default, self.max_new_tokens) if own is None else (int(own),)
            usual = min((length for length in defaults if length is not None), default=self.max_context)
            limits = (max(usual, min_tokens or 0), limit, self.max_context - longest)
            return min(length for length in limits if length is not None)
        if limit is not None and requested > limit:
            refusal = InvalidParameter(
                "max_tokens", requested, f"must be at most {limit} on this server (max_request_tokens)"
            )
            raise refusal.about("limits.max_request_tokens")
        max_length(longest, requested, self.max_context)
        return requested


def defaults_differ(started: SpeculationConfig, now: SpeculationConfig) -> bool:
    """Whether the two differ in a field that a request can set."""
    return any(getattr(now, name) != getattr(started, name) for name in OF_REQUESTS)
