"""`LLM`: a model with its engine, called synchronously; and sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from speculon.checkpoints.generation import sampling_defaults
from speculon.checkpoints.processors import images_of
from speculon.core.checked import as_list, conversations, is_list, one_per_prompt
from speculon.core.config import EngineConfig, RequestSpeculation, SamplingParams, SpeculationConfig
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.core.images import ImageInput
from speculon.decoding.sequence import Event
from speculon.decoding.text.tokenizer import NO_TOKENIZER, Stream, Tokenizer, check_messages
from speculon.engine.build import build_engine
from speculon.engine.outputs import Completion, RequestOutput, absorb, write_texts
from speculon.engine.stepper import PromptCall, Stepper, TaskRequests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("speculon")

Prompt = str | Seq[int] | Mapping[str, Any]  # text, token ids, or {"prompt": text, "images": [...]}
GivenMessage = Mapping[str, Any]
SpeculationLike = RequestSpeculation | Mapping[str, Any] | None


class LLM:
    """A model with its engine.

    >>> llm = LLM("smollm2")
    >>> llm.generate(["def add(a, b):"], SamplingParams(temperature=0.0, max_tokens=64))[0].text

    Keywords are the fields of `EngineConfig`. Raises `ModelError` for a checkpoint that cannot be used,
    `ConfigError` for a setting that is wrong.

    Calls without `params` have `default_params`, with the values of the checkpoint's
    `generation_config.json`. Given ones are complete: what they do not set has our default.

    With `tokenizer=None` no tokenizer is loaded. Prompts are then token ids, results have no text, and what
    needs one raises `InvalidParameter`: strings as prompts, stop strings, grammars, chats, streams of text.

    Any number of threads and tasks may call it: their requests form one batch.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculation: SpeculationConfig | Mapping[str, Any] | None = None,
        tokenizer: Literal["auto"] | None = "auto",
        progress: Callable[[str], None] | None = None,
        **settings: Any,
    ):
        if model is not None:
            settings["model"] = model
        if speculation is not None:
            settings["speculation"] = speculation
        if tokenizer not in ("auto", None):
            raise ConfigError(f"tokenizer = {tokenizer!r}: 'auto' is that of the checkpoint, None is none")
        self.engine = build_engine(EngineConfig(**settings), progress, texts=tokenizer is not None)
        self.config = self.engine.config
        defaults = sampling_defaults(self.config)
        # a limit of servers: here it would refuse prompts that leave less room
        defaults.pop("max_tokens", None)
        self.default_params = SamplingParams(**defaults)  # of calls without `params`
        self._stepper = Stepper(self.engine)
        self._images = images_of(self.config, files=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an LLM holds a model, pages and threads: it cannot be copied or pickled")

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's. Raises `InvalidParameter` where the model was loaded without one."""
        if self.engine.tokenizer is None:
            raise InvalidParameter("tokenizer", None, NO_TOKENIZER).about("tokenizer")
        return self.engine.tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of transformers itself, with `apply_chat_template` and all else that it has; on
        runtime llama the file's vocabulary, with as much of that as is used here.

        Raises `InvalidParameter` where the model was loaded without one.
        """
        inner: PreTrainedTokenizerBase = self.tokenizer.inner
        return inner

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: SpeculationLike | Seq[SpeculationLike] = None,
        adapter: str | Seq[str] = "",
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt, all at once, in the order given.

        A prompt is a text, token ids, `{"prompt": text, "images": [...]}` with the model's placeholder in the
        text for each image, or `{"messages": [...]}`. An image is a `Path`, bytes, an image of Pillow or a
        data URL.

        `params`, `speculation` and `adapter` are one for all or one per prompt; the empty adapter is the
        model itself. `on_token(prompt index, new tokens)` is called as texts grow. When one prompt is refused
        nothing is written for any. A text whose logits processor fails ends there, with finish reason
        `error` and the `LogitsProcessorError` as its `error`.
        """
        calls, outputs = self._read(prompts, params, speculation, adapter)
        with self._stepper.requests(calls) as queue:
            index = {request_id: i for i, request_id in enumerate(queue.requests)}
            for event in self._stepper.events(queue):
                i = index[event.request_id]
                absorb(outputs[i], event)
                if on_token and event.tokens:
                    on_token(i, len(event.tokens))
        self._stepper.check_when_idle()
        return self._finished(calls, outputs)

    async def agenerate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: SpeculationLike | Seq[SpeculationLike] = None,
        adapter: str | Seq[str] = "",
    ) -> list[RequestOutput]:
        """`generate` for an event loop. Cancelling the task aborts its requests."""
        calls, outputs = await asyncio.to_thread(self._read, prompts, params, speculation, adapter)
        async with TaskRequests(self._stepper, calls) as queue:
            results = dict(zip(queue.requests, outputs, strict=True))
            while events := await queue.take():
                for event in events:
                    absorb(results[event.request_id], event)
        return self._finished(calls, outputs)

    @overload
    def chat(
        self,
        messages: Seq[GivenMessage],
        params: SamplingParams | None = None,
        *,
        speculation: SpeculationLike = None,
        adapter: str = "",
        continue_final_message: bool | str = False,
        add_generation_prompt: bool | None = None,
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Seq[Seq[GivenMessage]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: SpeculationLike | Seq[SpeculationLike] = None,
        adapter: str | Seq[str] = "",
        continue_final_message: bool | str = False,
        add_generation_prompt: bool | None = None,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Seq[GivenMessage] | Seq[Seq[GivenMessage]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: SpeculationLike | Seq[SpeculationLike] = None,
        adapter: str | Seq[str] = "",
        continue_final_message: bool | str = False,
        add_generation_prompt: bool | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers a conversation, or each of a list of conversations, through the checkpoint's chat template.

        Contents are texts, or lists of parts as OpenAI has them, with images as `image_url`. A part
        `{"type": "image", "image": ...}` takes an image as `generate` does. A list of conversations gives a
        list. Its `params`, `speculation` and `adapter` are one for all or one per conversation.

        With `continue_final_message` the answer goes on from the last message, one of the assistant, and is
        what comes after its text; `"reasoning_content"` goes on from its thinking. Without
        `add_generation_prompt` the template opens no answer. Raises `InvalidParameter` where both are true.
        """
        _, many = self.tokenizer, conversations(messages)  # refused here where there is no tokenizer
        begins = {
            "continue_final_message": continue_final_message,
            "add_generation_prompt": add_generation_prompt,
        }
        prompts = [{"messages": chat, **begins} for chat in ([messages] if many is None else many)]
        outputs = self.generate(prompts, params, speculation=speculation, adapter=adapter)
        return outputs[0] if many is None else outputs

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: SpeculationLike = None,
        adapter: str = "",
    ) -> Iterator[str]:
        """Yields the text of one prompt as it is written. Closing the iterator aborts the request."""
        params = params or self.default_params
        prompt_ids, images = self._encode(prompt)
        text = Stream.of(self.tokenizer, params, prompt_ids)
        output = RequestOutput(prompt_ids, [Completion()])
        with closing(self._stream_to(output, params, speculation, images, adapter)) as events:
            for event in events:
                if new := new_text(text, event):
                    yield new

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: SpeculationLike = None,
        adapter: str = "",
    ) -> AsyncIterator[str]:
        """`stream` for an event loop. Closing the iterator, or cancelling the task, aborts the request."""
        params = one_sample(params or self.default_params)
        prompt_ids, images = await asyncio.to_thread(self._encode, prompt)
        text = Stream.of(self.tokenizer, params, prompt_ids)
        call = PromptCall(prompt_ids, params, speculation, images, adapter)
        async with TaskRequests(self._stepper, [call]) as queue:
            while events := await queue.take():
                for event in events:
                    if new := new_text(text, event):
                        yield new
                    if event.finish and event.finish.error is not None:
                        raise event.finish.error

    def events(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: SpeculationLike = None,
        adapter: str = "",
    ) -> Generator[Event, None, None]:
        """Yields what each step brings to one prompt. Closing the generator aborts the request."""
        prompt_ids, images = self._encode(prompt)
        output = RequestOutput(prompt_ids, [Completion()])
        yield from self._stream_to(output, params or self.default_params, speculation, images, adapter)

    def session(
        self,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        adapter: str = "",
    ) -> Session:
        """A conversation whose earlier turns stay in pages; a `raw` one has no roles: texts are continued."""
        _ = self.tokenizer  # refused here where there is none
        return Session(self, params or self.default_params, system, raw, adapter)

    def forget_pools(self, pool: str | None = None) -> int:
        """Deletes the earlier answers under a name, or all; returns how many pools there were."""
        with self._stepper.turn() as engine:
            return engine.forget_pools(pool)

    def close(self) -> None:
        """Ends what is still open, with `abort`, and writes what is to be kept of events and state.

        The end of a `with` block does this, and so does the end of the process.
        """
        self._stepper.close()

    def _stream_to(
        self,
        output: RequestOutput,
        params: SamplingParams,
        speculation: SpeculationLike,
        images: tuple[ImageInput, ...] = (),
        adapter: str = "",
    ) -> Generator[Event, None, None]:
        """Yields what each step brings to `output`, which has it already; whole also if closed early."""
        call = PromptCall(output.prompt_token_ids, one_sample(params), speculation, images, adapter)
        with self._stepper.requests([call]) as queue:
            try:
                for event in self._stepper.events(queue):
                    absorb(output, event)
                    yield event
            finally:
                queue.close()
                for event in queue.unread:
                    absorb(output, event)
                write_texts(output, self.engine.tokenizer, params)
        if output.error is not None:
            raise output.error

    def _read(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None,
        speculation: SpeculationLike | Seq[SpeculationLike],
        adapter: str | Seq[str],
    ) -> tuple[list[PromptCall], list[RequestOutput]]:
        """What is asked for each prompt, and its result, still empty."""
        many = as_list(prompts)
        params = self.default_params if params is None else params
        all_params = one_per_prompt("params", params, len(many), SamplingParams)
        types = (RequestSpeculation, Mapping, type(None))
        requested = one_per_prompt("speculation", speculation, len(many), types)
        adapters = one_per_prompt("adapter", adapter, len(many), str)
        values = zip(map(self._encode, many), all_params, requested, adapters, strict=True)
        calls = [PromptCall(ids, own, options, images, name) for (ids, images), own, options, name in values]
        outputs = [RequestOutput(call.prompt, [Completion() for _ in range(call.params.n)]) for call in calls]
        return calls, outputs

    def _finished(self, calls: list[PromptCall], outputs: list[RequestOutput]) -> list[RequestOutput]:
        for call, output in zip(calls, outputs, strict=True):
            write_texts(output, self.engine.tokenizer, call.params)
        return outputs

    def _encode(self, prompt: Prompt) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The token ids of a prompt, and its images."""
        if isinstance(prompt, str | Mapping) and self.engine.tokenizer is None:
            raise InvalidParameter("prompt", prompt, NO_TOKENIZER).about("tokenizer")
        if isinstance(prompt, Mapping):
            return self._images.read(prompt, self.tokenizer, self.engine.max_context)
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt), ()
        if not is_list(prompt) or not all(isinstance(token, int) for token in prompt):
            raise InvalidParameter("prompt", prompt, "a string or a list of token ids")
        return list(prompt), ()


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What a user said, and the answer."""

    content: str
    output: RequestOutput
    rendered: str  # the text of its tokens; empty where the two differ

    @property
    def tokens(self) -> list[int]:
        return [*self.output.prompt_token_ids, *self.output.token_ids]


class Session:
    """A conversation. The tokens of earlier turns are sent again as they were, so their pages are found
    again.

    `system` may be changed between turns, and `turns` shortened: the last one taken back, or all of them.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None = None,
        raw: bool = False,
        adapter: str = "",
    ):
        if raw and system:
            raise InvalidParameter("system", system, "a raw conversation has no roles")
        self.llm, self.params, self.system, self.raw, self.adapter = llm, params, system, raw, adapter
        self.turns: list[ChatTurn] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        pairs = [("system", self.system)] if self.system else []
        for turn in self.turns:
            pairs += [("user", turn.content), ("assistant", turn.output.text)]
        return [{"role": role, "content": content} for role, content in pairs]

    def send(
        self, content: str, params: SamplingParams | None = None, *, speculation: SpeculationLike = None
    ) -> RequestOutput:
        """Adds a user's turn and returns the answer; a refused turn leaves the conversation as it was."""
        for _ in self.stream(content, params, speculation=speculation):
            pass
        return self.turns[-1].output

    def stream(
        self, content: str, params: SamplingParams | None = None, *, speculation: SpeculationLike = None
    ) -> Generator[Event, None, None]:
        """Adds a user's turn and yields what each step brings to its answer, which is then
        `turns[-1].output`.

        A turn that is refused or fails leaves the conversation as it was. One that is closed early, or
        interrupted, keeps what was written; where nothing was, it is taken back.
        """
        text = self._render(content)
        output = RequestOutput(self._encode(text), [Completion()])
        try:
            yield from self.llm._stream_to(output, params or self.params, speculation, (), self.adapter)
        except (GeneratorExit, KeyboardInterrupt):
            if output.token_ids:
                self._keep(content, text, output)
            raise
        self._keep(content, text, output)

    def prompt(self, content: str) -> list[int]:
        """The tokens that a turn would send. Raises `InvalidRequest` where the template refuses it."""
        return self._encode(self._render(content))

    def _render(self, content: str) -> str:
        messages = [*self.messages, {"role": "user", "content": content}]
        if not self.raw:
            return self.llm.tokenizer.render_chat(messages)
        check_messages(messages)
        text = ""
        for message in messages:
            new_line = text and message["role"] == "user" and not text.endswith("\n")
            text += "\n" * bool(new_line) + message["content"]
        return text

    def _encode(self, text: str) -> list[int]:
        tokenizer, last = self.llm.tokenizer, self.turns[-1] if self.turns else None
        if last and last.rendered and text.startswith(last.rendered):
            return [*last.tokens, *tokenizer.encode(text[len(last.rendered) :], add_special_tokens=False)]
        return tokenizer.encode(text, add_special_tokens=self.raw)

    def _keep(self, content: str, text: str, output: RequestOutput) -> None:
        # a stop string is in the tokens but not in the text: the next prompt is then made from the text again
        ended_by_string = isinstance(output.outputs[0].stop, str)
        self.turns.append(ChatTurn(content, output, "" if ended_by_string else text + output.text))


def one_sample(params: SamplingParams) -> SamplingParams:
    if params.n != 1:
        raise InvalidParameter("n", params.n, "a stream carries one text")
    return params


def new_text(stream: Stream, event: Event) -> str:
    return stream.push(event.tokens) + (stream.flush(event.finish.matched) if event.finish else "")
