"""Loads the prediction modules of a target's checkpoint, checks them, and says before that what they need."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig

from speculon.core.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel
from speculon.runtimes.torch.budget import scratch_bytes
from speculon.runtimes.torch.drafters.mtp.network import Module, MtpHead, Operation
from speculon.runtimes.torch.drafters.mtp.tensors import MtpConfig
from speculon.runtimes.torch.drafters.state_drafter import final_norm
from speculon.runtimes.torch.kv.store import PageStore, SpanView
from speculon.runtimes.torch.loading.load_check import LOOSE, TOLERANCE
from speculon.runtimes.torch.model import attention
from speculon.runtimes.torch.model.block import (
    UNKNOWN,
    CannotReplace,
    Fused,
    FusedLayer,
    fused_block,
    fused_norm,
)
from speculon.runtimes.torch.model.compare import difference
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.needs import NO_PADDING, LayerSpec, Needs

FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS = "experts."
# parameters of all experts -> their parts, where experts are stored one by one
JOINED = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
ROW_COPIES = 6  # of width H, beyond those of a layer: states, embeddings, both normed and joined
TRIAL_ROWS = 12
ROUNDING = 0.03  # guess: of the largest value, between a fused module and its stock form in bf16 and fp16


def mtp_needs(config: MtpConfig, target: Target, rows: int, scored: int) -> Needs:
    """The needs of modules that are not loaded; T = `rows` and R = `scored` in their largest forward.

    Its own layers are the taps, each module's keys and values, then what each but the last yields.
    """
    if config.hidden != target.hidden_size:
        raise ModelError(
            f"{config.path}: its MTP modules are of width {config.hidden}, the target's is "
            f"{target.hidden_size}"
        )
    sizes, dtype = target.model.config.get_text_config(), target.dtype
    states = LayerSpec("taps", 1, config.hidden, 0, dtype)
    names = layer_types(sizes, len(config.modules))
    own = [attention_spec(target, sizes, name) for name in names]
    scratch = scratch_bytes(sizes, dtype, target.device, rows, scored)
    return Needs(
        taps=(len(target.layers) - 1,),
        layers=(states, *own, *[states] * (len(own) - 1)),
        max_context=target.max_context,
        bytes_fixed=config.num_parameters * dtype.itemsize,
        bytes_scratch=scratch + ROW_COPIES * rows * config.hidden * dtype.itemsize,
    )


def layer_types(config: PreTrainedConfig, modules: int) -> list[str]:
    """What each module's layer attends to: full attention, unless the config has types for them."""
    names = list(getattr(config, "mtp_layer_types", None) or [FULL] * modules)
    if len(names) != modules or not set(names) <= {FULL, SLIDING}:
        raise UnsupportedModel(f"mtp_layer_types {names} for {modules} MTP modules is not supported")
    return names


def attention_spec(target: Target, config: PreTrainedConfig, layer_type: str) -> LayerSpec:
    """The keys and values of one module's layer, as those of the target's layers of that type."""
    layers = [layer for layer in target.layers if layer.heads]
    if not layers:
        raise UnsupportedModel(f"{target.name} has no attention, as its MTP modules would")
    window = config.sliding_window if layer_type == SLIDING else None
    alike = [layer for layer in layers if layer.window == window and not layer.chunk]
    spec = replace((alike or layers)[-1], padding=NO_PADDING)
    typed = bool(getattr(config, "layer_types", None))
    return replace(spec, window=window, chunk=None) if typed else spec


def load_mtp(
    config: MtpConfig, target: Target, layers: tuple[LayerSpec, ...], fused: bool = True
) -> tuple[MtpHead, int]:
    """The modules in the target's dtype, and the bytes of what they do not share with it.

    Raises `ModelError` for tensors that do not fit the target's layers, `UnsupportedModel` for a target whose
    layers cannot be used.
    """
    if target.layer_class is None:
        raise UnsupportedModel(f"{target.name}: the class of its layers is not known, so MTP has none")
    tensors = read_tensors(config)
    modules = [
        ModuleLoader(config, target, number, tensors).module() for number in range(len(config.modules))
    ]
    head = MtpHead(modules, final_norm(target), target_rotary(target, layers))
    shared = {target.embedding.data_ptr()}
    own = {t.data_ptr(): t.nbytes for module in modules for t in own_weights(module, target)}
    check_head(head, target, layers, fused)
    return head, sum(size for pointer, size in own.items() if pointer not in shared)


def read_tensors(config: MtpConfig) -> dict[str, Tensor]:
    """By stored name."""
    names = {name for module in config.modules for name in module.values()}
    tensors: dict[str, Tensor] = {}
    for path in config.files:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if name in names}
    return tensors


class ModuleLoader:
    """Builds one module from its tensors."""

    def __init__(self, config: MtpConfig, target: Target, number: int, stored: Mapping[str, Tensor]):
        self.config, self.target, self.number = config, target, number
        names = config.modules[number]
        self.tensors = {
            here: stored[name].to(target.device, self.pick_dtype(name)) for here, name in names.items()
        }

    def pick_dtype(self, name: str) -> torch.dtype:
        """The target's dtype, but for what its class always keeps in fp32."""
        model, dtype = self.target.model, self.target.dtype
        exact = set(model._keep_in_fp32_modules_strict or ())
        exact |= set(model._keep_in_fp32_modules or ()) if dtype is torch.float16 else set()
        return torch.float32 if any(part in name for part in exact) else dtype

    def module(self) -> Module:
        layer = self.layer()
        norm_class: Any = type(layer.input_layernorm)
        return Module(
            embed=self.embed(),
            embed_norm=self.norm(norm_class, "embed_norm"),
            state_norm=self.norm(norm_class, "state_norm"),
            proj=self.linear("proj"),
            hidden_first=self.config.hidden_first,
            layer=layer,
            norm=self.norm(norm_class, "norm"),
            head=self.head(),
        )

    def layer(self) -> Any:
        """A decoder layer of the target's class with the module's weights."""
        assert self.target.layer_class is not None
        config = layer_config(self.target, self.config, self.number)
        with torch.device("meta"):
            layer = self.target.layer_class(config, self.number)
        own = {
            name.removeprefix("layer."): t for name, t in self.tensors.items() if name.startswith("layer.")
        }
        shapes = {name: tensor.shape for name, tensor in layer.state_dict().items()}
        weights = {name: self.find(name, own) for name in shapes}
        for name, shape in shapes.items():
            if weights[name].shape != shape:
                shapes_differ = f"is {list(weights[name].shape)}, its class has {list(shape)}"
                raise CorruptWeights(
                    f"{self.config.path}: {name} of MTP module {self.number} {shapes_differ}"
                )
        if own:
            more = f"{len(own)} tensors that its class does not have, first {min(own)}"
            raise UnsupportedModel(f"{self.config.path}: MTP module {self.number} has {more}")
        layer.load_state_dict(weights, assign=True)
        if left := [name for name, tensor in layer.named_buffers() if tensor.is_meta]:
            raise UnsupportedModel(f"{self.config.path}: MTP module {self.number} needs a buffer {left[0]}")
        return layer.eval().requires_grad_(False)

    def find(self, name: str, own: dict[str, Tensor]) -> Tensor:
        """A tensor of the layer, removed from `own`; those of experts may be stored one by one."""
        if name in own:
            return own.pop(name)
        at, _, last = name.rpartition(EXPERTS)
        count = len({n for n in own if n.startswith(at + EXPERTS) and n.endswith(".down_proj.weight")})
        parts = JOINED.get(EXPERTS + last, ())
        names = [[f"{at}{EXPERTS}{i}.{part}.weight" for part in parts] for i in range(count)]
        if not parts or not all(n in own for group in names for n in group) or not names:
            raise MissingWeights(f"{self.config.path}: {name} of MTP module {self.number} is missing")
        return torch.stack([torch.cat([own.pop(n) for n in group]) for group in names])

    def norm(self, norm_class: Any, part: str) -> nn.Module:
        """A norm of the layer's class, whose weight may be w or 1 + w."""
        made = norm_class(self.config.hidden, eps=self.target.model.config.get_text_config().rms_norm_eps)
        made.weight = nn.Parameter(self.tensors[f"{part}.weight"], requires_grad=False)
        return made

    def linear(self, part: str) -> nn.Linear:
        weight = self.tensors[f"{part}.weight"]
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer

    def embed(self) -> Tensor:  # [V, H]
        """The target's embedding, unless the module has another one."""
        own, shared = self.tensors.get("embed.weight"), self.target.embedding
        return shared if own is None or torch.equal(own, shared) else own

    def head(self) -> Operation:
        """The target's head, unless the module has another one: it may be packed, so outputs are compared."""
        shared = self.target.head
        if "head.weight" not in self.tensors:
            return shared
        own = self.linear("head")
        x = torch.randn(2, self.config.hidden, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            mine, theirs = (head(x.to(self.tensors["head.weight"])).float() for head in (own, shared))
        return shared if mine.shape == theirs.shape and difference(mine, theirs) <= 1e-5 else own


def layer_config(target: Target, config: MtpConfig, number: int) -> Any:
    """A copy of the target's config in which the modules are all layers that there are."""
    made: Any = copy.deepcopy(target.model.config.get_text_config())
    count, sparse = len(config.modules), config.has_experts(number)
    settings = {
        "layer_types": layer_types(made, count),
        "mlp_layer_types": ["sparse" if config.has_experts(i) else "dense" for i in range(count)],
        "first_k_dense_replace": 0 if sparse else count,
        "mlp_only_layers": [] if sparse else [*range(count)],
        "decoder_sparse_step": 1,
    }
    for name, value in settings.items():
        if getattr(made, name, None) is not None:
            setattr(made, name, value)
    made.num_hidden_layers = count
    made._attn_implementation = attention.NAME
    return made


def target_rotary(target: Target, layers: tuple[LayerSpec, ...]) -> Callable[[Tensor, Tensor], Any]:
    """The target's rotary tables, as its layers of the modules' type use them."""
    rotary: Any = getattr(target.model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModel(f"{target.name}: it has no rotary table, which its MTP layers would read")
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        return partial(rotary, layer_type=SLIDING if layers[1].window else FULL)
    return rotary


def own_weights(module: Module, target: Target) -> list[Tensor]:
    """Tensors of its own, and its embedding."""
    parts = [module.layer, module.embed_norm, module.state_norm, module.proj, module.norm]
    if isinstance(module.head, nn.Module) and module.head is not target.head:
        parts.append(module.head)
    own = (weight for part in parts for weight in (*part.parameters(), *part.buffers()))
    return [*own, module.embed]


@torch.inference_mode()
def check_head(head: MtpHead, target: Target, layers: tuple[LayerSpec, ...], fused: bool) -> None:
    """Raises `UnsupportedModel` where the target's logits are not those of its final norm and head, or a
    module over pages differs from its layer's eager attention.

    With `fused`, modules are replaced by fused ones. Changes which taps the target captures.
    """
    device, n, last = target.device, TRIAL_ROWS, len(target.layers) - 1
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (n,), generator=generator).to(device)
    store, limit = PageStore((*target.layers, *layers), 1, n, device), TOLERANCE.get(target.dtype, LOOSE)
    logits, taps = target.tapped(ids, store, (last,))
    states = head.final_norm(taps[last])
    if not (off := difference(target.head(states).float()[:, : target.vocab_size], logits)) <= limit:
        raise UnsupportedModel(
            f"{target.name}: its logits differ from head(norm(states)) by {off:.2g}, so MTP cannot read them"
        )
    positions = torch.arange(n - 1, device=device)
    view = store.view_of([SpanView(0, n - 1, slice(1, n), n - 1)], len(target.layers) + 1)
    for number, module in enumerate(head.modules):
        where = f"{target.name}: MTP module {number}"
        run = partial(head.run, number, ids[1:], states[:-1], positions, view)
        try:
            paged = run()
            eager = eager_run(head, module, ids[1:], states[:-1], positions, layers[1 + number].window)
        except UNKNOWN as error:
            raise UnsupportedModel(f"{where} cannot run: {error}") from error
        if not (off := difference(paged, eager)) <= limit:
            raise UnsupportedModel(f"{where} over pages differs from its eager attention by {off:.2g}")
        for form in fused_forms(module, number, layers[1 + number]) if fused else ():
            head.modules[number] = form
            if agrees(run, paged, TOLERANCE.get(target.dtype, ROUNDING)):
                break
            head.modules[number] = module


def eager_run(
    head: MtpHead, module: Module, ids: Tensor, states: Tensor, positions: Tensor, window: int | None
) -> Tensor:
    """The module over consecutive rows with transformers' own attention."""
    ages = positions[:, None] - positions[None]
    hidden = (ages < 0) | (ages >= (window or len(ids)))
    mask = torch.zeros(hidden.shape, device=ids.device, dtype=states.dtype)
    mask = mask.masked_fill(hidden, torch.finfo(states.dtype).min)[None, None]
    module.use_attention("eager")
    try:
        return module(ids, states, head.rotary(states[None], positions[None]), positions, mask)
    finally:
        module.use_attention(attention.NAME)


def fused_forms(module: Module, number: int, spec: LayerSpec) -> Iterator[Module]:
    """A module with fused norms and layer, then with fused norms alone. Does not modify it."""
    embed_norm, state_norm, norm = map(fused_module, (module.embed_norm, module.state_norm, module.norm))
    with_norms = replace(module, embed_norm=embed_norm, state_norm=state_norm, norm=norm)
    try:
        layer = FusedLayer(fused_block(module.layer, number, spec.heads, spec.k_dim, share=False))
        yield replace(with_norms, layer=layer)
    except (CannotReplace, *UNKNOWN):
        pass  # latent attention has its own code
    yield with_norms


def agrees(run: Callable[[], Tensor], expected: Tensor, limit: float) -> bool:
    """Whether a fused form runs, with the same result."""
    try:
        return difference(run(), expected) <= limit
    except UNKNOWN:
        return False


def fused_module(stock: nn.Module) -> nn.Module:
    try:
        return Fused(fused_norm(stock))
    except CannotReplace:
        return stock
