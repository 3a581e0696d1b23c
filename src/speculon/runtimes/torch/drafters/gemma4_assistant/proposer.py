"""A Gemma 4 assistant drafts token by token from its target's own keys and values (Google 2026).

It keeps nothing of a sequence: it reads no prompt, and its pages hold the target's last states alone. See
`runtimes.torch.drafters.gemma4_assistant.network` for what its rows see.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from speculon.core.config import SpeculationConfig
from speculon.core.errors import WrongPair
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.budget import scratch_bytes
from speculon.runtimes.torch.drafters.families import read_assistant_config
from speculon.runtimes.torch.drafters.gemma4_assistant.config import AssistantConfig
from speculon.runtimes.torch.drafters.gemma4_assistant.network import (
    AssistantNetwork,
    Layers,
    Sources,
    load_assistant,
    make_sources,
)
from speculon.runtimes.torch.drafters.host import DrafterHost
from speculon.runtimes.torch.drafters.layers import rope_config, weight_bytes
from speculon.runtimes.torch.drafters.state_drafter import Overrides, StateDrafter, checked_config, final_norm
from speculon.runtimes.torch.model.target import Runner, Target
from speculon.runtimes.torch.needs import LayerSpec, Needs
from speculon.speculation.proposers.chain import draft_chain

if TYPE_CHECKING:
    from torch import Tensor

NAME = "gemma4_assistant"
AS_IT_IS = "neither compiled nor captured: its attention is over keys of the target"


class Gemma4Assistant(StateDrafter):
    """One call of the assistant per draft position for all sequences of the round."""

    def __init__(self, config: AssistantConfig, host: DrafterHost, min_confidence: float = 0.0):
        super().__init__(host, min_confidence)
        self.config, self.sources = config, layers_read(config, self.target)
        self.final_norm = final_norm(self.target)
        self.needs = assistant_needs(config, host)
        self.network: AssistantNetwork

    @classmethod
    def build(cls, config: SpeculationConfig, host: DrafterHost) -> Gemma4Assistant:
        checkpoint = checked_config(NAME, config, host.model, read_assistant_config, Overrides())
        return cls(checkpoint, host, config.draft_min_confidence)

    def load(self) -> None:
        self.network = load_assistant(self.config, self.target)
        self.runner = Runner(self.network.forward, self.config.layers, self.config.layers, "loop")
        if self.compile:
            self.runner.refused[AS_IT_IS] += 1

    @torch.inference_mode()
    def _propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        at = [len(seq.tokens) - 1 for seq in seqs]  # of the last token, whose keys the target lacks yet
        last = self.final_norm(self.pages.taps([(seq, n - 1, n) for seq, n in zip(seqs, at, strict=True)]))
        states = dict(enumerate(last))  # by index [Ht]
        device, embedding = self.target.device, self.target.model.get_input_embeddings()  # which scales

        @cache  # in a round the same keys are read from the same position, until a sequence has its drafts
        def seen(which: tuple[int, ...]) -> tuple[Tensor, Sources]:
            positions = torch.tensor([at[i] for i in which], device=device)
            return positions, make_sources(self.sources, self.pages, [(seqs[i], at[i]) for i in which])

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            ids = [drafts[i][-1] if drafts[i] else seqs[i].tokens[-1] for i in which]
            embedded = embedding(torch.tensor(ids, device=device))
            before = torch.stack([states[i] for i in which])
            after = self.runner.run(embedded, before, *seen(tuple(which)))
            states.update(zip(which, self.network.post_projection(after), strict=True))
            return self.network.logits(after, self.vocab_size)

        drafts = draft_chain(NAME, seqs, ks, forward, self.min_confidence)
        self.pages.mark([(seq, 0, len(seq.tokens)) for seq in seqs])  # nothing is left to read
        return drafts


def layers_read(config: AssistantConfig, target: Target) -> Layers:
    """The target's last layer of each type, and the assistant's window over it.

    Raises `WrongPair` where there is none, or its keys have another shape than the assistant's queries.
    """
    types = list(getattr(target.model.config.get_text_config(), "layer_types", None) or ())
    found = {}
    for kind, (heads, dim), window in zip(config.types, config.queries, config.windows, strict=True):
        if kind not in types:
            raise WrongPair(f"{config.path}: reads a layer of {kind}, which {target.name} does not have")
        layer = len(types) - 1 - types[::-1].index(kind)
        spec = target.layers[layer]
        if spec.k_dim != dim or heads % spec.heads:
            keys = f"the target's layer {layer} has {spec.heads} heads of {spec.k_dim}"
            raise WrongPair(f"{config.path}: {heads} heads of {dim} read {kind}, but {keys}")
        found[kind] = layer, window
    return found


def assistant_needs(config: AssistantConfig, host: DrafterHost) -> Needs:
    """The needs of an assistant that is not loaded; each sequence has one row in its forwards."""
    target, width, rows = host.model, config.target_hidden, host.sequences
    sizes, order = rope_config(config), 8 * config.vocab_size * bool(config.groups)
    sizes.vocab_size = config.vocab_size
    scratch = scratch_bytes(sizes, target.dtype, target.device, rows, rows)
    return Needs(
        taps=config.tap_layouts(len(target.layers))[0],
        layers=(LayerSpec("taps", 1, width, 0, target.dtype),),
        max_context=config.max_context,
        bytes_fixed=weight_bytes(config, target.dtype) + order,
        bytes_scratch=scratch + host.rows * width * target.dtype.itemsize,  # the states that are tapped
    )
