"""A model in llama.cpp with one context: the only module that calls it to compute."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from speculon.core.config import EngineConfig
from speculon.core.errors import EngineError, ModelError, UnsupportedModel
from speculon.runtimes.llama.library import errors, last_error, library
from speculon.runtimes.llama.memory import padded
from speculon.runtimes.llama.weights import ALL, load_weights

if TYPE_CHECKING:
    from torch import Tensor

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}  # numbers of ggml
STATE_ALONE = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: of what cannot be cut
DECODE = {
    1: "no room for the batch in its memory",
    2: "aborted",
    -1: "it refuses the batch",
    -2: "no memory for the computation",
    -3: "the computation failed",
}


class Rows(NamedTuple):
    """Consecutive tokens of one stream, as a part of a batch; from `scored` on each has logits."""

    stream: int
    start: int
    tokens: Seq[int]
    scored: int  # of the tokens

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.scored


class Batch:
    """Rows as the library takes them. Its arrays are made once: they are filled anew for each call."""

    def __init__(self, size: int):
        lib = library()
        self.size = size
        self.tokens, self.positions, self.streams = (np.zeros(size, np.int32) for _ in range(3))
        self.scored, self._one = np.zeros(size, np.int8), np.ones(size, np.int32)
        # each row's list of streams: a pointer to its one entry in `streams`
        self._lists = np.arange(size, dtype=np.uintp) * 4 + self.streams.ctypes.data
        self.view = lib.llama_batch()
        pointers: dict[str, Any] = {
            "token": self.tokens,
            "pos": self.positions,
            "n_seq_id": self._one,
            "seq_id": self._lists,
            "logits": self.scored,
        }
        kinds = dict(lib.llama_batch._fields_)
        for name, array in pointers.items():
            setattr(self.view, name, ctypes.cast(array.ctypes.data, kinds[name]))

    def fill(self, parts: Seq[Rows]) -> Any:
        at = 0
        for stream, start, tokens, scored in parts:
            end = at + len(tokens)
            self.tokens[at:end] = tokens
            self.positions[at:end] = range(start, start + len(tokens))
            self.streams[at:end] = stream
            self.scored[at : at + scored], self.scored[at + scored : end] = 0, 1
            at = end
        self.view.n_tokens = at
        return self.view


class LlamaModel:
    """A loaded model and the memory of its streams, each of which holds one sequence of at most `length`
    tokens.

    A stream's logits do not depend on what is in the others (`kv_unified` is false).
    """

    def __init__(
        self,
        path: Path,
        config: EngineConfig,
        *,
        repack: bool,
        streams: int,
        length: int,
        rows: int,
        outputs: int,
        rollback: int,
    ):
        self.lib = lib = library()
        self.path, self.max_outputs = path, outputs
        self.model = load_weights(path, config, repack=repack)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.vocab_size: int = lib.llama_vocab_n_tokens(self.vocab)
        pointers = [self.model]  # freed from the last to the first
        self.close = weakref.finalize(self, _free, lib, pointers)
        self.context = self._make_context(config, streams, length, rows, outputs, rollback)
        pointers.append(self.context)
        self.memory = lib.llama_get_memory(self.context)
        encodes = lib.llama_model_has_encoder(self.model) or lib.llama_model_is_diffusion(self.model)
        if encodes or not self.memory:  # it would be run as an encoder, and end the process
            self.close()
            raise UnsupportedModel(f"{path}: it does not generate text token by token")
        self.length: int = min(lib.llama_n_ctx_seq(self.context), length)
        self.batch = Batch(rows)
        # a recurrent state cannot be cut, but some architectures keep it after each of the latest rows
        self.recurrent = bool(
            lib.llama_model_is_recurrent(self.model) or lib.llama_model_is_hybrid(self.model)
        )
        self.rollback: int = lib.llama_n_rs_seq(self.context)

    def _make_context(
        self, config: EngineConfig, streams: int, length: int, rows: int, outputs: int, rollback: int
    ) -> Any:
        lib = self.lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = streams * padded(length), streams
        params.n_batch, params.n_ubatch = rows, min(rows, 512)
        params.n_outputs_max, params.n_rs_seq = outputs, rollback
        threads = config.threads or torch.get_num_threads()
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH_ATTENTION[config.flash_attention]
        params.type_k = params.type_v = KV_TYPES[config.kv_cache_type]
        params.offload_kqv = config.gpu_layers != 0
        params.swa_full = True  # else a rollback could not restore the rows that left a window
        params.kv_unified, params.no_perf = False, True
        errors.clear()
        context = lib.llama_init_from_model(self.model, params)
        if not context:
            what = f"a context of {streams} sequences of {length} tokens ({config.kv_cache_type})"
            raise ModelError(f"{self.path}: llama.cpp cannot make {what}: {last_error()}")
        return context

    def decode(self, parts: Seq[Rows]) -> Tensor:
        """Logits [R, V] of the scored rows, in the order of the parts, which are ordered by stream: only
        then the library computes them together.
        """
        if sum(len(part.tokens) for part in parts) > self.batch.size:
            raise EngineError(f"a batch of more than {self.batch.size} rows")
        if not self.close.alive:
            raise EngineError(f"{self.path}: the runtime is closed")
        errors.clear()
        if status := self.lib.llama_decode(self.context, self.batch.fill(parts)):
            why = DECODE.get(status, f"status {status}")
            raise EngineError(f"llama.cpp: {why}{f' ({errors[0]})' if errors else ''}")
        count = sum(part.outputs for part in parts)
        if not count:
            self.lib.llama_synchronize(self.context)
            return torch.empty(0, self.vocab_size)
        logits = np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), (count, self.vocab_size))
        return torch.from_numpy(logits).clone()  # the library's own are overwritten by the next call

    def calls(self, parts: Seq[Rows]) -> Iterator[list[Rows]]:
        """The parts in as many calls as their logits need."""
        call, outputs = list[Rows](), 0
        for part in parts:
            if call and outputs + part.outputs > self.max_outputs:
                yield call
                call, outputs = [], 0
            call.append(part)
            outputs += part.outputs
        yield call

    def run(self, parts: Seq[Rows]) -> tuple[Tensor, float]:
        """Logits [R, V] of all scored rows in the order of the parts, and the ms that it took."""
        began = perf_counter()
        logits = [self.decode(call) for call in self.calls(parts)]
        joined = logits[0] if len(logits) == 1 else torch.cat(logits)
        return joined, (perf_counter() - began) * 1e3

    # adapters

    def load_adapter(self, path: Path) -> Any:
        """Raises `ModelError` for a file that is no adapter of this model."""
        errors.clear()
        if not (adapter := self.lib.llama_adapter_lora_init(self.model, os.fsencode(path))):
            raise ModelError(f"adapter {path}: llama.cpp cannot load it: {last_error()}")
        return adapter

    def use_adapters(self, adapters: Seq[Any]) -> None:
        """Computes what follows under these, with the scale of their files."""
        count = len(adapters)
        pointers = (self.lib.llama_adapter_lora_p_ctypes * count)(*adapters)
        self.lib.llama_set_adapters_lora(
            self.context, pointers, count, (ctypes.c_float * count)(*[1.0] * count)
        )

    # the memory of a stream

    def cut(self, stream: int, length: int) -> bool:
        """Forgets all tokens of a stream but the first `length`; False where that cannot be."""
        return bool(self.lib.llama_memory_seq_rm(self.memory, stream, length, ALL))

    def copy(self, stream: int, to: int) -> None:
        """Makes another stream one with the same tokens."""
        self.lib.llama_memory_seq_rm(self.memory, to, 0, ALL)
        self.lib.llama_memory_seq_cp(self.memory, stream, to, ALL, ALL)

    def save_state(self, stream: int) -> Any:
        """What cannot be cut of a stream: its recurrent states as they are now."""
        size = self.lib.llama_state_seq_get_size_ext(self.context, stream, STATE_ALONE)
        state = (ctypes.c_uint8 * size)()
        self.lib.llama_state_seq_get_data_ext(self.context, state, size, stream, STATE_ALONE)
        return state

    def restore_state(self, stream: int, state: Any) -> None:
        if not self.lib.llama_state_seq_set_data_ext(self.context, state, len(state), stream, STATE_ALONE):
            raise EngineError(f"llama.cpp: the state of stream {stream} cannot be restored")

    # facts

    @property
    def end_ids(self) -> frozenset[int]:
        """The control tokens that the library knows as ends of a text or a turn.

        It also takes words of a text for such by their names: </s> of HTML in Gemma 3.
        """
        lib, vocab = self.lib, self.vocab
        ends = [token for token in range(self.vocab_size) if lib.llama_vocab_is_eog(vocab, token)]
        word, of = lib.LLAMA_TOKEN_ATTR_USER_DEFINED, lib.llama_vocab_get_attr
        return frozenset(token for token in ends if not of(vocab, token) & word)

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return int(self.lib.llama_model_size(self.model))

    @property
    def description(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.lib.llama_model_desc(self.model, text, len(text))
        return text.value.decode(errors="replace")


def _free(lib: Any, pointers: list[Any]) -> None:
    model, *contexts = pointers
    for context in contexts:
        lib.llama_free(context)
    lib.llama_model_free(model)
