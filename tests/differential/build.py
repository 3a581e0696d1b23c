"""The targets, drafters and requests that a case names."""

from __future__ import annotations

import atexit
import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculon.core.config import EngineConfig, SamplingParams
from speculon.core.images import ImageInput
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.engine import Engine
from speculon.runtimes.torch.drafters import table as drafters
from speculon.runtimes.torch.loading.invariant import decide
from speculon.runtimes.torch.loading.load import load_target, wrap_model
from speculon.runtimes.torch.model.target import Target
from speculon.speculation.proposers.registry import known_methods, register
from tests.differential.factors import WITH_ADAPTERS, WITH_IMAGES, Case, Values
from tests.engines import engine_on, torch_runtime
from tests.tiny import assistant_forms, mtp_forms, recurrent_drafts
from tests.tiny.adapter_files import folders, stock_with, with_adapters
from tests.tiny.blocks import write_dflash
from tests.tiny.conftest import build, tiny_model, tiny_target
from tests.tiny.drafting import DRAFT, NoisyModel, use_draft
from tests.tiny.forms import FORMS, words
from tests.tiny.heads import deep_model, write_eagle3
from tests.tiny.language_drafts import byte_level, characters, shuffled, write_pard, write_same
from tests.tiny.recurrent import RECURRENT, recurrent_model
from tests.tiny.scripted import Key, Scripted
from tests.tiny.test_trees import ScriptedTrees
from tests.tiny.vision_models import IMAGE, image_prompt, stock_arguments, vision_model

VOCAB, EOS = 96, 2
Texts = dict[Key, list[int]]
FAMILIES = {"qwen2_5_vl": "qwen2_5_vl", "gemma3 with images": "gemma3"}  # of vision models
MTP = {"deepseek with mtp": "deepseek, two modules", "qwen3_5 with mtp": "qwen3_5"}
ASSISTED = "large"  # which Gemma 4
TAPS = {"deep llama": (1, 3, 4), "gemma3": (0, 1, 2), "qwen2_5_vl": (0, 1, 2), "qwen3_next": (-1, 0, 1)}


# targets


@cache
def stock_model(name: str, adapter: str = "") -> PreTrainedModel:
    """The model as transformers has it, in fp32; treat it as read-only."""
    if adapter:
        return stock_with(tiny_model(name), folders(name)[adapter])
    if name in FAMILIES:
        return vision_model(FAMILIES[name])
    if name in MTP:
        return mtp_forms.written(MTP[name]).stock
    if name in RECURRENT:
        return recurrent_model(name)
    match name:
        case "deep llama":
            return deep_model()
        case "gemma4":
            return assistant_forms.stock(ASSISTED)
        case "packed llama":
            return build("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    return tiny_model(name)


@cache
def target_of(name: str, dtype: str) -> Target:
    """In bf16 batch-invariant where this machine can; treat it as read-only."""
    if name in MTP:
        return mtp_forms.target_of(MTP[name])
    if name == "packed llama":
        stock_model(name).save_pretrained(folder := temporary("packed"))
        return load_target(folder, dtype=dtype, quantization="int4", batch_invariant=None)
    target = wrap_model(rounded(name, dtype), name=name, share=False)
    if name in WITH_ADAPTERS:
        with_adapters(target, folders(name))
    decide(target, None)
    return target


@cache
def rounded(name: str, dtype: str) -> PreTrainedModel:
    """The stock model in another dtype; treat it as read-only."""
    return copy.deepcopy(stock_model(name)).to(getattr(torch, dtype))


def temporary(name: str) -> Path:
    folder = Path(mkdtemp(prefix=f"{name}-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    return folder


# drafters


@cache
def checkpoint(drafter: str, target: str) -> Path:
    """A random drafter for a target; the one with another tokenizer has the target's own weights."""
    folder, config = temporary(drafter.replace(" ", "-")), stock_model(target).config.get_text_config()
    taps = TAPS.get(target)
    match drafter:
        case "other tokenizer":
            pieces = shuffled(lacking=8, more=5)
            return write_same(folder, pieces, byte_level(pieces))
        case "pard":
            return write_pard(folder)
        case "eagle3":
            return write_eagle3(folder, config, draft_vocab=64, taps=taps)
        case "dflash":
            return write_dflash(folder, config, taps=taps)
        case "dspark":
            layout: dict[str, Any] = {"from_anchor": True, "windows": (9, None), "markov": "rnn"}
            return write_dflash(folder, config, "speculators", **layout)
        case "dflash2":
            return write_dflash(folder, config, "dflash2")
    raise ValueError(drafter)


METHOD = {  # those of these names that are a method under another one
    "trees": "branching",
    "recurrent draft": "draft_model",
    "other tokenizer": "draft_model",
    "dspark": "dflash",
    "dflash2": "dflash",
}


def use_drafters(case: Case, truth: Texts, texts: Texts) -> dict[str, Any]:
    """Registers what the methods of a case draft with, and returns the settings for that. `truth` has the
    outputs that drafts are often made of, `texts` the same after their prompts.
    """
    register("scripted", lambda config, target: Scripted(truth))
    register("branching", lambda config, target: ScriptedTrees(truth))
    drafter, target = case.shared["drafter"], case.shared["target"]
    match drafter:
        case "none":
            return {}
        case "draft_model":
            own = tiny_target("llama") if target in WITH_IMAGES else target_of(target, case.shared["dtype"])
            use_draft(NoisyModel(copy.copy(own)))  # which does not fail where the target does
            return DRAFT
        case "recurrent draft":
            recurrent_drafts.use_drafts("mamba2", recurrent_drafts.right_now_and_then(texts))
            return DRAFT
        case "other tokenizer":
            return {"draft": {"draft_model": str(checkpoint(drafter, target))}}
        case "mtp":
            correct("mtp", truth)
            return {"method": "mtp"}
        case "gemma4_assistant":
            correct(drafter, truth)
            return {"draft": {drafter: str(assistant_forms.folder_of(ASSISTED))}}
    method = METHOD.get(drafter, drafter)
    correct(method, truth)
    return {"draft": {method: str(checkpoint(drafter, target))}}


def correct(method: str, truth: Texts) -> None:
    """Makes the drafts of a random drafter the true ones, mostly: else hardly one would be accepted.

    Drafts that carry a q stay as they are, since they must be drawn from it.
    """
    drafters.registered.pop(method, None)
    factory = drafters.find(method)

    def made(config: Any, host: Any) -> Any:
        proposer: Any = factory(config, host)
        for name in ("propose", "propose_trees"):
            if propose := getattr(proposer, name, None):
                setattr(proposer, name, corrected(propose))
        return proposer

    def corrected(propose: Callable[..., list[Draft]]) -> Callable[..., list[Draft]]:
        def true_drafts(seqs: list[Sequence], *others: Any) -> list[Draft]:
            drafts = propose(seqs, *others)
            return [true_draft(truth, seq, draft) for seq, draft in zip(seqs, drafts, strict=True)]

        return true_drafts

    drafters.register(method, made)


def true_draft(truth: Texts, seq: Sequence, draft: Draft) -> Draft:
    """The draft with tokens of the output along its first path, some of them wrong."""
    if draft.probs is not None:
        return draft
    chance = random.Random(f"{seq.request.id} {seq.sample} {len(seq.tokens)}")
    tokens, node = list(draft.tokens), -1
    parents = draft.parents or tuple(range(-1, len(tokens) - 1))
    for true in truth[seq.request.id, seq.sample][seq.num_output :]:
        children = [child for child, parent in enumerate(parents) if parent == node]
        if not children:
            break
        node = next((child for child in children if tokens[child] == true), children[0])
        if chance.random() < 0.3:
            others = {tokens[child] for child in children}
            true = next(token for token in range(3, VOCAB) if token not in others and token != true)
        tokens[node] = true
    return replace(draft, tokens=tuple(tokens))


# requests


@dataclass
class Asked:
    """A request of a case."""

    id: str
    own: Values
    prompt: list[int]
    params: SamplingParams
    images: list[ImageInput] = field(default_factory=list)
    speculation: dict[str, Any] = field(default_factory=dict)

    def add(self, engine: Engine, speculation: Mapping[str, Any]) -> None:
        adapter = self.own["adapter"]
        engine.add_request(
            self.prompt, self.params, speculation, self.id, images=self.images, adapter=adapter
        )

    @property
    def keys(self) -> list[Key]:
        return [(self.id, sample) for sample in range(self.params.n)]


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "unseeded": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
    "penalised": {
        "temperature": 0.8,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
    },
    "biased": {"temperature": 1.2, "logit_bias": {40: 2.0, 41: -3.0}, "bad_words": ("e", "an")},
}


def processed(tokens: list[int], logits: Tensor) -> Tensor:
    """A processor that looks at the whole text: another row's text would give other logits."""
    return logits.roll(sum(tokens) % 7, -1)


def params_of(own: Values, chance: random.Random) -> SamplingParams:
    form = own["form"]
    given: dict[str, Any] = {
        "max_tokens": 40 if form == "nested" else chance.randrange(6, 26),
        "n": own["samples"],
        "logprobs": own["logprobs"],
        "prompt_logprobs": own["prompt_logprobs"],
        "ignore_eos": own["end"] in ("length", "stop token", "stop string"),
        "structured": FORMS.get(form),
        **SAMPLING.get(own["sampling"], {"temperature": 0.7}),
    }
    if own["sampling"] not in ("greedy", "unseeded"):
        given["seed"] = chance.randrange(1000)
    if own["sampling"] == "processed":
        given["logits_processor"] = processed
    bias: dict[int, float] = given.pop("logit_bias", {})
    if own["method"] in ("ngram", "suffix"):
        bias = bias | dict.fromkeys(range(50, 54), 6.0)  # texts of few tokens repeat themselves
    if own["end"] == "end of text":
        bias = bias | {EOS: 3.0}
    if own["end"] in ("stop token", "least tokens"):
        given["stop_token_ids"] = tuple(chance.sample(range(3, VOCAB), 6))
    if own["end"] == "least tokens":
        given["min_tokens"] = chance.randrange(1, 6)
    if own["vision"]:
        bias = bias | {IMAGE: -100.0}  # no stock model could read it
    return SamplingParams(**given, logit_bias=bias)


def requests_of(case: Case) -> list[Asked]:
    """The requests, but for stop strings and predictions: these are made of outputs."""
    chance = random.Random(f"{case.seed} {case.number}")
    common = [chance.randrange(3, 80) for _ in range(19)]
    family = FAMILIES.get(case.shared["target"])
    asked = []
    for i, own in enumerate(case.requests):
        prompt = prompt_of(own["prompt"], common, chance)
        images: list[ImageInput] = []
        if own["images"]:
            assert family is not None
            before, images = image_prompt(family, tuple(range(1, own["images"] + 1)), len(prompt))
            prompt = [*prompt, *before[len(prompt) :]]
        own = {**own, "vision": family is not None}
        asked.append(Asked(f"q{i}", own, prompt, params_of(own, chance), images, speculation_of(own)))
    return asked


def prompt_of(kind: str, common: list[int], chance: random.Random) -> list[int]:
    lengths = {"short": range(1, 6), "long": range(30, 44), "repeated": range(8, 9), "shared": range(3, 4)}
    own = [chance.randrange(3, 80) for _ in range(chance.choice(lengths[kind]))]
    return own * 3 if kind == "repeated" else [*common, *own] if kind == "shared" else own


def speculation_of(own: Values) -> dict[str, Any]:
    method = own["method"]
    return {
        "method": METHOD.get(method, method),
        "policy": own["policy"],
        "num_speculative_tokens": own["drafts"],
        "draft_depth": 3 if method == "trees" else own["depth"],
        "chained_drafts": own["chained"],
        "acceptance": own["acceptance"],
    }


def with_stop_string(asked: Asked, output: list[int], tokenizer: Tokenizer, chance: random.Random) -> Asked:
    """The request with a stop string that its output has, over two tokens."""
    at = chance.randrange(1, max(2, len(output) - 1))
    stop = tokenizer.decode(output[at : at + 2])
    params = asked.params.model_copy(update={"stop": (stop,) if stop else ("no such text",)})
    return replace(asked, params=params)


def with_prediction(asked: Asked, output: list[int], chance: random.Random) -> Asked:
    """The request with its own output as the prediction, edited."""
    wrong = [*output[:4], 5, 6, *output[7:]]
    tokens = chance.choice([output, wrong, output[::2], output[len(output) // 2 :] + output])
    return replace(asked, speculation={**asked.speculation, "prediction": tokens})


# engines


def tokenizer_of(case: Case) -> Tokenizer:
    """Of few tokens of more than one character, but where a drafter needs one whose tokens are letters."""
    return characters() if case.shared["drafter"] in ("other tokenizer", "pard") else words()


def plain_engine(case: Case) -> Engine:
    config = EngineConfig(speculation={"method": "off"}, max_num_seqs=4)
    return engine_on(target_of(case.shared["target"], case.shared["dtype"]), tokenizer_of(case), config)


def speculative_engine(case: Case, asked: list[Asked], speculation: dict[str, Any]) -> Engine:
    shared, page = case.shared, case.shared["page"]
    longest = max(len(one.prompt) + (one.params.max_tokens or 0) for one in asked)
    config = EngineConfig(
        block_size=page,
        num_blocks=-(-longest // page) + 2 + 8 // page if shared["pages"] == "few" else None,
        max_num_seqs=shared["seats"],
        max_batch_tokens=max(shared["chunk"], shared["seats"] + 4 if shared["target"] in WITH_IMAGES else 0),
        prefix_cache=shared["prefix_cache"],
        speculation={"policy": "fixed", **speculation},
    )
    engine = engine_on(target_of(shared["target"], shared["dtype"]), tokenizer_of(case), config)
    freeze_costs(engine)
    return engine


NO_MORE = [0.0] * 5  # of many rows, of long sequences, and of branches


def freeze_costs(engine: Engine) -> None:
    """Drafts are cheap, whatever they take: what a policy decides must not depend on the clock."""
    costs = {
        "": [10.0, 0.5, 0.0, 0.0, 0.05, *NO_MORE],
        **dict.fromkeys(known_methods(), [0.01, 0.01, 0.0, 0.0]),
    }
    engine.policy.costs.restore({name: (parts, 4, []) for name, parts in costs.items()})
    engine.policy.costs.observe = lambda *_: None  # type: ignore[method-assign]


def has_equal_bits(case: Case, asked: Asked, engine: Engine) -> bool:
    return engine.runtime.facts.batch_invariant


def call_of(engine: Engine) -> tuple[Any, str]:
    return torch_runtime(engine).target, "forward"


def stock_logits(case: Case, asked: Asked, tokens: list[int], model: PreTrainedModel | None = None) -> Tensor:
    """What transformers' own forward gives after each of these tokens [T, V], in fp32."""
    name = case.shared["target"]
    model = model or stock_model(name, asked.own["adapter"])
    more = stock_arguments(FAMILIES[name], tokens, asked.images) if asked.images else {}
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False, **more).logits[0].float()


ROUNDED = 1e-3  # nat: ten times what another order of additions in fp32 has changed
APART = 4  # times the error of a dtype, which two ways of rounding may be apart


def tolerance(case: Case, asked: Asked, tokens: list[int]) -> float:
    """How far apart two right log-probabilities after these tokens may be, nat: in a coarser dtype by how far
    the stock model in it is from that in fp32.
    """
    name, dtype = case.shared["target"], case.shared["dtype"]
    if dtype == "float32":
        return ROUNDED
    exact, coarse = (stock_logits(case, asked, tokens, model) for model in (None, rounded(name, dtype)))
    return APART * float((exact.log_softmax(-1) - coarse.log_softmax(-1)).abs().max())
