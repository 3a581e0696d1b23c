"""The engine's settings, from keywords, the environment and a settings file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from tomllib import TOMLDecodeError
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from speculon.core.checked import AdapterFolder, AdapterName, FilePath, FolderPath, invalid_parameter, nearest
from speculon.core.config.file import CACHE, FILE, MODELS, VARIABLE, place, settings_file, syntax_error
from speculon.core.config.serve import ServeConfig
from speculon.core.config.speculation import Quantization, SpeculationConfig
from speculon.core.errors import ConfigError, InvalidParameter


class EngineConfig(BaseSettings):
    """The settings of an engine, and in `speculation` and `serve` those of its parts.

    >>> EngineConfig(model="smollm2", max_num_seqs=8)

    A field that is not given is read from the environment (`SPECULON_` and its name), then from
    `speculon.toml`, and otherwise has its default. Raises `ConfigError` for a value that is wrong or unknown;
    the message names the source of the value.
    """

    model_config = SettingsConfigDict(
        env_prefix="SPECULON_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    model: str = Field(
        "smollm2",
        description="a folder, a GGUF file, a hub id, a name of `speculon pull`, or a name in a folder of "
        "SPECULON_MODELS",
    )
    runtime: Literal["auto", "torch", "llama"] = Field(
        "auto",
        description="what runs the model: torch, or llama (llama.cpp, for GGUF files); auto: llama for a "
        "GGUF file where llama-cpp-python is installed and no other setting needs torch",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="type of the weights; auto: the checkpoint's, but on a CPU without bf16 fp32 for "
        "weights that are not packed in 4 or 8 bits",
    )
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N | mps")
    quantization: Quantization = Field(
        "auto",
        description="int8 | int4: round the weights of linear layers to 8 or 4 bits, and the output "
        "layer to 8; auto: leave them as in the checkpoint, so a GGUF file's stay packed "
        "unless dtype is fp32; none: unpack them to dtype",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of a forward; None: torch's choice")
    gpu_layers: int | None = Field(
        None, ge=0, description="llama: layers on the GPU; None: all, if the package was built for one"
    )
    kv_cache_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = Field(
        "f16", description="llama: numbers of the KV cache; q8_0 takes half of the memory of f16"
    )
    flash_attention: Literal["auto", "on", "off"] = Field(
        "auto", description="llama: fused attention; a quantised KV cache needs it"
    )
    mmap: bool = Field(True, description="llama: map the file into memory, in the place of reading it")
    tensor_split: tuple[float, ...] = Field((), description="llama: the share of each GPU")
    rpc: tuple[str, ...] = Field(
        (),
        description="llama: HOST:PORT of RPC servers that hold a part of the layers (only in a "
        "trusted network)",
    )
    repack: bool | None = Field(
        None,
        description="llama: rearrange weights for faster CPU kernels; None: yes, unless a trial at "
        "the first load, in a process of its own, ends with an illegal instruction",
    )
    fuse: bool = Field(True, description="join layers into fewer, faster operations of equal result")
    compile: Literal["off", "auto", "now"] = Field(
        "auto",
        description="compile norms, rotations and activations, or with packed weights all between "
        "two attentions; auto: on a CPU in bf16 or fp16, while the model already runs, "
        "in a process of the lowest priority; the model then uses each program that "
        "gives the same bits; now: before the load ends (CPU: a minute or two at the "
        "first load of a shape; CUDA: as CUDA graphs)",
    )
    batch_invariant: bool | None = Field(
        None,
        description="bitwise equal logits for a row in every batch, so the same text in bf16 too; None: in "
        "bf16 and fp16, where kernels allow it",
    )
    max_context: int | None = Field(
        None, ge=2, description="longest prompt and answer together, in tokens; None: the model's"
    )
    max_num_seqs: int = Field(32, ge=1, le=4096, description="most sequences in a batch")
    max_batch_tokens: int = Field(512, ge=1, description="most rows of a forward; longer prompts are chunked")
    block_size: int = Field(16, ge=1, le=1024, description="tokens per KV page")
    num_blocks: int | None = Field(None, ge=1, description="KV pages; None: from kv_memory_gb")
    kv_memory_gb: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="memory of the KV pages; None: at most 30 % of what is free",
    )
    snapshot_memory_gb: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="memory of snapshots of recurrent states, where cached prefixes end; 0: none; None: at "
        "most 5 % of what is free",
    )
    prefix_cache: bool = Field(True, description="keep full pages for prompts that begin alike")
    events: FilePath | None = Field(
        None,
        description="file for a JSON line per round: numbers, reasons, request ids; no text, no token ids",
    )
    events_limit_mb: float = Field(
        256.0,
        ge=1,
        allow_inf_nan=False,
        description="largest size of that file and FILE.1 together; at half of it the file becomes "
        "FILE.1, in place of the one before, and a new file begins",
    )
    warmup: bool | None = Field(
        None,
        description="at start, measure costs for up to two seconds; None: under policy goodput",
    )
    state: FolderPath | None = Field(
        None,
        description="folder that keeps, across restarts, earlier answers as token ids, and what policy "
        "goodput has measured",
    )
    allow_pickle: bool = Field(False, description="accept pickle checkpoints (weights_only)")
    trust_remote_code: bool = Field(False, description="run Python code that comes with a checkpoint")
    adapters: dict[AdapterName, AdapterFolder] = Field(
        default_factory=dict,
        description="LoRA adapters of the model by name, folders in peft's format (llama: GGUF files); a "
        "request chooses one, over HTTP "
        "as `model:NAME`",
        json_schema_extra={"flag": "--adapter", "metavar": "NAME=FOLDER"},
    )
    generation_config: bool = Field(
        True, description="take the defaults of sampling from the checkpoint's generation_config.json"
    )
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)

    file: ClassVar[str] = FILE

    def __init__(self, /, **values: Any):
        refuse_unknown_variables()
        try:
            with readable():
                super().__init__(**values)
        except ValidationError as error:
            wrong = with_table(invalid_parameter(error, type(self)))
            raise ConfigError(f"{origin(wrong.name, values)}{wrong}") from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources = (init_settings, env_settings, TomlConfigSettingsSource(settings_cls, settings_file()))
        return (InitSettingsSource(settings_cls, first_of(source() for source in sources)),)


@contextmanager
def readable() -> Iterator[None]:
    """Raises `ConfigError` where the environment or the settings file cannot be read."""
    try:
        yield
    except SettingsError as error:
        raise ConfigError(f"{error}: {error.__cause__}") from None
    except (TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise syntax_error(error) from None


def first_of(sources: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Each field from the first source that sets it. Tables are merged, but no field that is a table."""
    fields: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            before = fields.get(name)
            if name in TABLES and isinstance(before, dict) and isinstance(value, dict):
                fields[name] = {**value, **before}
            else:
                fields.setdefault(name, value)
    return fields


def changed(config: EngineConfig, names: Iterable[str]) -> str | None:
    """The first of these fields that has another value than its default, with the value."""
    fields = EngineConfig.model_fields
    values = ((name, getattr(config, name)) for name in names)
    different = (
        f"{name} = {value!r}"
        for name, value in values
        if value != fields[name].get_default(call_default_factory=True)
    )
    return next(different, None)


TABLES: Mapping[str, type[BaseModel]] = {"speculation": SpeculationConfig, "serve": ServeConfig}


def variable_names() -> list[str]:
    """Every variable of the environment that is read."""
    nested = [
        f"{variable_of(table)}__{name.upper()}" for table in TABLES for name in TABLES[table].model_fields
    ]
    return [VARIABLE, MODELS, CACHE, *nested, *(variable_of(name) for name in EngineConfig.model_fields)]


def variable_of(name: str) -> str:
    return f"SPECULON_{name.upper()}"


def refuse_unknown_variables() -> None:
    known = variable_names()
    unknown = sorted({name for name in os.environ if name.startswith("SPECULON_")} - set(known))
    if unknown:
        hint = nearest(unknown[0], known) if len(unknown) == 1 else ""
        raise ConfigError(f"unknown setting in the environment: {', '.join(unknown)}{hint}")


def with_table(wrong: InvalidParameter) -> InvalidParameter:
    """An unknown name that is right in another table gets the table's name."""
    if wrong.limit.startswith("unknown field") and "." not in wrong.name:
        for table, model in TABLES.items():
            if wrong.name in model.model_fields:
                return InvalidParameter(
                    wrong.name, wrong.value, f"unknown field here; it belongs to [{table}]"
                )
    return wrong


def origin(name: str, keywords: Mapping[str, Any]) -> str:
    """Where a wrong value was set, before the message: a line of the file, or nothing for a keyword."""
    keys = name.split(".")
    value: Any = keywords
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    variables = {"__".join((variable_of(keys[0]), *map(str.upper, keys[1:]))), variable_of(keys[0])}
    if value is not None or variables & os.environ.keys():
        return ""
    line = place(keys)
    return f"{line}: " if line else ""
