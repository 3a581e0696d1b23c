"""The server's own settings: table `[serve]` of the file, `SPECULON_SERVE__*` in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from speculon.checked import Checked, new_or_there
from speculon.errors import InvalidParameter

Keys = Annotated[tuple[SecretStr, ...], NoDecode]


class ServeConfig(Checked):
    """How the server listens, and what it allows."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: every interface")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    api_key: Keys = Field(
        (), description="bearer tokens of clients; better by environment, there one per line"
    )
    served_model_name: str | None = Field(None, description="the name clients ask for; None: the model's")
    cors_origins: tuple[str, ...] = Field((), description="origins whose web pages may call; none by default")
    max_queue: int = Field(
        128, ge=0, description="texts that may wait for a place; more are answered with 429"
    )
    max_request_tokens: int | None = Field(
        None, ge=1, description="most tokens per text; also for chats that do not say"
    )
    max_body_mb: float = Field(4.0, gt=0, le=1024, description="largest body of a request")
    body_timeout: float = Field(
        30.0, gt=0, allow_inf_nan=False, description="seconds for a request's body to arrive"
    )
    request_timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds until a request is ended"
    )
    drain_timeout: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="seconds for running requests after TERM"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="of the line that each request leaves: text or json"
    )

    capture: Path | None = Field(
        None,
        description="a folder that keeps what clients ask and get, as text, to train drafters on; off by default",
    )
    capture_gb: float = Field(
        1.0,
        ge=0.001,
        allow_inf_nan=False,
        description="of that folder, at most; what was written longest ago goes first",
    )
    capture_key: Keys = Field(
        (), description="keep the texts of these API keys alone, given like api_key; none: of every key"
    )

    @field_validator("capture")
    @classmethod
    def _can_be_a_folder(cls, value: Path | None) -> Path | None:
        return new_or_there(value)

    @field_validator("api_key", "capture_key", mode="before")
    @classmethod
    def _one_or_one_per_line(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(value.splitlines()) or ("",)
        return () if value is None else (value,) if isinstance(value, SecretStr) else value

    @field_validator("api_key", "capture_key")
    @classmethod
    def _none_empty(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        # a variable that was never set must not open the server
        if not all(key.get_secret_value().strip() for key in value):
            raise ValueError("a key has at least one character")
        return value

    @model_validator(mode="after")
    def _capture_keys_can_enter(self) -> ServeConfig:
        strange = sum(key not in self.api_key for key in self.capture_key)
        if self.api_key and strange:
            raise InvalidParameter(
                "capture_key", f"{len(self.capture_key)} keys", f"{strange} of them not among api_key"
            )
        return self
