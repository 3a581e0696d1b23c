"""The config of a Gemma 4 assistant: layers with queries alone, over keys and values of their target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from speculon.core.errors import ModelError, WrongPair
from speculon.runtimes.torch.drafters.config import AUTHORS, DrafterConfig
from speculon.runtimes.torch.drafters.formats import (
    FIRST_Q,
    DrafterSource,
    count_layers,
    read_rope,
    read_windows,
)

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
TARGETS = "gemma4"  # what the architectures of its targets begin with
HEAD, CENTROIDS = "embed_tokens.weight", "masked_embedding.centroids.weight"
PARTS = ("pre_projection.weight", "post_projection.weight", HEAD, FIRST_Q)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantConfig(DrafterConfig):
    """A Gemma 4 assistant (Google 2026). Widths come from its tensors, the rest from its config."""

    vocab_size: int  # V
    types: tuple[str, ...]  # of each layer's attention
    queries: tuple[tuple[int, int], ...]  # of each layer: heads, and the width of one
    ropes: Mapping[str, dict[str, Any]]  # by type
    groups: int  # C: tokens are scored where the centroids of their groups are best; 0: all of them
    best: int

    def _likely_layouts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        return ((num_layers - 1,),)

    def check_architecture(self, name: str) -> tuple[str, ...]:
        """Raises `WrongPair` for any other target: there are no keys and values that it could read."""
        if not name.lower().startswith(TARGETS):
            raise WrongPair(f"{self.path}: reads keys and values of a Gemma 4, the target is {name}")
        return ()

    def summary(self, num_layers: int | None = None) -> str:
        scored = self.vocab_size // self.groups * self.best if self.groups else self.vocab_size
        tokens = f"{scored:,} of {self.vocab_size:,} tokens"
        reads = f"states of width {self.target_hidden:,} and keys and values of the target"
        return f"Gemma 4 assistant by {AUTHORS[self.format]}: {self.shape}, {reads}, {tokens}; {self.size}"

    def describe_taps(self, num_layers: int | None = None) -> str:
        last = "the last layer" if num_layers is None else f"layer {num_layers - 1}"
        return f"after {last}, normed; keys and values of the last layer of each type"


def read_assistant(source: DrafterSource) -> AssistantConfig:
    """The config of an assistant. Raises `ModelError` where tensors and config contradict each other."""
    text, layers = source.part("text_config"), count_layers(source)
    windows = read_windows(source, layers, text.get("layer_types") or [], text.get("sliding_window"))
    types = tuple(text["layer_types"][:layers])
    tables = {kind: text["rope_parameters"][kind] for kind in types}
    ropes = {k: read_rope(replace(source, config={"rope_parameters": x})) for k, x in tables.items()}
    dims = [source.shape(f"layers.{number}.self_attn.q_norm.weight")[0] for number in range(layers)]
    rows = [source.shape(f"layers.{number}.self_attn.q_proj.weight")[0] for number in range(layers)]
    queries = tuple((all_heads // dim, dim) for all_heads, dim in zip(rows, dims, strict=True))
    hidden, width = source.shape("pre_projection.weight")
    groups, best = token_groups(source)
    names = dict(source.names)
    if not groups:  # else its rows are read one by one
        names.setdefault("lm_head.weight", names.pop(HEAD))
    return AssistantConfig(
        hidden=hidden,
        target_hidden=width // 2,
        taps=1,
        layers=layers,
        heads=queries[0][0],
        kv_heads=int(text.get("num_key_value_heads") or 0),
        head_dim=queries[0][1],
        intermediate=source.shape("layers.0.mlp.gate_proj.weight")[0],
        vocab_size=source.shape(HEAD)[0],
        draft_vocab_size=source.shape(HEAD)[0],
        eps=float(text.get("rms_norm_eps") or 1e-6),
        rope=ropes[types[0]],
        act=text.get("hidden_activation") or "gelu_pytorch_tanh",
        windows=windows,
        max_context=text.get("max_position_embeddings"),
        names=names,
        path=source.folder,
        files=source.files,
        format="google",
        dtype=source.sizes.most_common(1)[0][0],
        num_bytes=sum(file.stat().st_size for file in source.files),
        types=types,
        queries=queries,
        ropes=ropes,
        groups=groups,
        best=best,
    )


def token_groups(source: DrafterSource) -> tuple[int, int]:
    """Groups of tokens, and how many of them are scored; none where the head scores all tokens."""
    if not source.config.get("use_ordered_embeddings"):
        return 0, 0
    groups, best = source.shape(CENTROIDS)[0], source.config.get("centroid_intermediate_top_k")
    vocab = source.shape(HEAD)[0]
    if type(best) is not int or not 0 < best <= groups or vocab % groups:
        tokens = f"{vocab:,} tokens in {groups:,} groups"
        raise ModelError(f"{source.folder}: {tokens}, centroid_intermediate_top_k = {best!r}")
    return groups, best
