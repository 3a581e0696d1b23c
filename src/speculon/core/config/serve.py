"""The server's own settings: table `[serve]` of the file, `SPECULON_SERVE__*` in the environment."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from speculon.core.checked import Checked, FilePath, FolderPath
from speculon.core.errors import InvalidParameter

Keys = Annotated[tuple[SecretStr, ...], NoDecode]


class ServeConfig(Checked):
    """The settings of the server: where it listens, who may use it, and the limits of requests."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: every interface")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    api_key: Keys = Field(
        (), description="bearer token of clients; safer as SPECULON_SERVE__API_KEY, one per line"
    )
    served_model_name: str | None = Field(
        None,
        description="the model's name in the API, with several models that of the first; None: "
        "`model` if it is a name or a hub id, else the name of its folder or file",
    )
    models_dir: Path | None = Field(
        None, description="folder whose subfolders are served, too, each under its name; drafters are not"
    )
    models_file: FilePath | None = Field(
        None,
        description="settings of each model; None: speculon-models.toml beside speculon.toml, if it is there",
    )
    memory_gb: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="memory of all models of a device; None: with several models 90 % of what is "
        "free before the first one loads",
    )
    pin: tuple[str, ...] = Field(
        (), description="names of models that are never unloaded to make room for others"
    )
    admin: bool = Field(False, description="dashboard at /admin; needs pip install 'speculon[admin]'")
    admin_key: SecretStr | None = Field(
        None,
        description="key of the dashboard; safer as SPECULON_SERVE__ADMIN_KEY; None: no key, which "
        "needs a loopback address as host",
    )
    admin_texts: bool | None = Field(
        None, description="show prompts and answers to administrators; None: on a loopback address alone"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins that browsers may call from; none by default"
    )
    max_queue: int = Field(128, ge=0, description="most sequences that wait; more get status 429")
    max_request_tokens: int | None = Field(
        None, ge=1, description="most tokens of a completion; also the default of chats"
    )
    max_body_mb: float = Field(4.0, gt=0, le=1024, description="largest body of a request, in MB")
    max_image_body_mb: float = Field(
        32.0, gt=0, le=1024, description="largest body of a request with images in it, in MB"
    )
    max_images: int = Field(16, ge=0, le=4096, description="most images of a request, in Python too; 0: none")
    max_image_mb: float = Field(20.0, gt=0, le=1024, description="largest file of an image, in MB")
    max_image_megapixels: float = Field(
        40.0, gt=0, le=1000, description="most pixels of an image, in millions; read in its header"
    )
    remote_images: bool = Field(
        False, description="fetch images that requests name by https or http, from public addresses alone"
    )
    remote_image_hosts: tuple[str, ...] = Field(
        (), description="hosts that images are fetched from; .NAME: also all below it; none: any"
    )
    remote_image_timeout: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="seconds for an image to be fetched"
    )
    header_timeout: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="seconds for a request's header to arrive"
    )
    keep_alive: float = Field(
        75.0,  # longer than the pools of clients and proxies, of mostly 5 to 60 s, keep one
        gt=0,
        allow_inf_nan=False,
        description="seconds that a connection stays open between requests",
    )
    max_connections_per_address: int | None = Field(
        None, ge=1, description="most connections of a client's address; None: half of all that fit"
    )
    body_timeout: float = Field(
        30.0, gt=0, allow_inf_nan=False, description="seconds for a request's body to arrive"
    )
    request_timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds after which a request is ended; None: never"
    )
    drain_timeout: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="seconds that running requests have after SIGTERM"
    )
    engine_timeout: float = Field(
        60.0,
        ge=1,
        allow_inf_nan=False,
        description="seconds without a message of an engine that has work; then it is hung",
    )
    restart_engine: bool | None = Field(
        None,
        description="start an engine again that has died or hangs; None: with several models",
    )
    log_format: Literal["text", "json"] = Field("text", description="form of the log line of each request")

    capture: FolderPath | None = Field(
        None,
        description="folder that stores prompts and answers, to train drafters on; None: off",
    )
    capture_gb: float = Field(
        1.0,
        ge=0.001,
        allow_inf_nan=False,
        description="largest size of that folder, in GB; the oldest files are deleted first",
    )
    capture_key: Keys = Field(
        (), description="API keys whose texts are stored, given like api_key; none: all"
    )

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
            raise ValueError("each key must have at least one character")
        return value

    @model_validator(mode="after")
    def _admin_is_guarded(self) -> ServeConfig:
        key = self.admin_key
        if key is not None and not key.get_secret_value().strip():
            raise InvalidParameter("admin_key", "''", "must have at least one character")
        if self.admin and key is None and not is_loopback(self.host):
            needed = (
                f"needs admin_key (SPECULON_SERVE__ADMIN_KEY), because host = {self.host!r} is open to others"
            )
            raise InvalidParameter("admin", True, needed)
        return self

    @property
    def shows_texts(self) -> bool:
        """Whether administrators see prompts and answers, which may be those of others."""
        return is_loopback(self.host) if self.admin_texts is None else self.admin_texts

    @model_validator(mode="after")
    def _capture_keys_can_enter(self) -> ServeConfig:
        strange = sum(key not in self.api_key for key in self.capture_key)
        if self.api_key and strange:
            raise InvalidParameter(
                "capture_key",
                f"{len(self.capture_key)} keys",
                f"each must also be in api_key; {strange} of them are not",
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
