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
from speculon.engine.outputs import Completion, RequestOutput, absorb, output_of, write_texts
from speculon.engine.stepper import PromptCall, Stepper, TaskRequests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("speculon")

Prompt = str | Seq[int] | Mapping[str, Any]  # text, token ids, or {"prompt": text, "images": [...]}
GivenMessage = Mapping[str, Any]
SpeculationLike = RequestSpeculation | Mapping[str, Any] | None


class LLM:
    """Loads a model and generates text with it, speculatively unless the settings turn that off.

    >>> llm = LLM("smollm2")
    >>> llm.generate(["def add(a, b):"], SamplingParams(temperature=0.0, max_tokens=64))[0].text

    Any number of threads and tasks may call one `LLM`: their requests run as one batch. Use it in a `with`
    block, or call `close`, so that running requests end and the events and the state are written.

    Calls without `params` use `default_params`, which has the values of the checkpoint's
    `generation_config.json`. Parameters that a call gives are complete: a field that they do not set has the
    default of `SamplingParams`, not the checkpoint's value.

    Args:
        model: A folder, a GGUF file, a hub id or a known name. The default is the setting `model`.
        speculation: The fields of `SpeculationConfig`, as an object or a table.
        tokenizer: `"auto"` loads the checkpoint's tokenizer; with None there is none. Prompts are then token
            ids, results have no text, and stop strings, grammars, chats and streams of text are refused.
        progress: Called with the name of each stage while the model loads.
        **settings: The fields of `EngineConfig`.

    Raises:
        ModelError: The checkpoint cannot be used.
        ConfigError: A setting is wrong.
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
            raise ConfigError(
                f"tokenizer = {tokenizer!r}: must be 'auto' (the checkpoint's) or None (token ids only)"
            )
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
        raise TypeError("an LLM cannot be copied or pickled, because it holds a model, pages and threads")

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises `InvalidParameter` if the model was loaded without one."""
        if self.engine.tokenizer is None:
            raise InvalidParameter("tokenizer", None, NO_TOKENIZER).about("tokenizer")
        return self.engine.tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer object of transformers, for example for its `apply_chat_template`. On runtime llama
        it is the vocabulary of the GGUF file, which has only those of its methods that speculon uses.

        Raises `InvalidParameter` if the model was loaded without a tokenizer.
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
        """Continues all prompts in one batch, and returns when the last one has ended.

        Args:
            prompts: One prompt or several. A prompt is a text, token ids, `{"messages": [...]}`, or
                `{"prompt": text, "images": [...]}` with the model's placeholder in the text for each image.
                An image is a `Path`, bytes, an image of Pillow or a data URL.
            params: How to sample, for all prompts or one per prompt.
            speculation: The fields of `RequestSpeculation`, for all prompts or one per prompt.
            adapter: The name of a LoRA adapter, for all prompts or one per prompt; empty: the model itself.
            on_token: Called as `on_token(index of the prompt, number of new tokens)` while texts grow.

        Returns:
            One `RequestOutput` per prompt, in the order of the prompts. A text whose logits processor fails
            ends there, with finish reason `error` and the `LogitsProcessorError` as its `error`.

        Raises:
            InvalidRequest: A prompt or a parameter is refused. Then no prompt is continued.
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
        """Does what `generate` does, for an event loop. Cancelling the task aborts its requests."""
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
        """Answers one conversation, or several, through the checkpoint's chat template.

        >>> llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text

        Args:
            messages: A list of messages, or a list of such conversations. A content is a text or a list of
                parts in OpenAI's form, with images as `image_url`; a part `{"type": "image", "image": ...}`
                takes an image in the forms that `generate` takes.
            params: As in `generate`, for all conversations or one per conversation; so are `speculation` and
                `adapter`.
            continue_final_message: True: the answer continues the text of the last message, which must be
                the assistant's, and the result has only what is new. `"reasoning_content"` continues its
                thinking instead.
            add_generation_prompt: False: the template does not open an answer.

        Returns:
            A `RequestOutput`, or a list of them for a list of conversations.

        Raises:
            InvalidRequest: A message or a parameter is refused, the checkpoint has no chat template, or both
                `continue_final_message` and `add_generation_prompt` are true.
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
        """Yields the text of one prompt piece by piece while it is generated. Closing the iterator aborts the
        request. The arguments are those of `generate`.
        """
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
        """Does what `stream` does, for an event loop. Closing the iterator, or cancelling the task, aborts
        the request.
        """
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
        """Yields an `Event` per step that adds tokens to one prompt: token ids, who drafted them, and at the
        end the statistics. Closing the generator aborts the request.
        """
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
        """Begins a conversation that sends only what is new of each turn to the model.

        Args:
            params: How answers are sampled, unless `send` names others.
            system: The system message.
            raw: True: no chat template and no roles; the model continues the texts as they are.
            adapter: The name of a LoRA adapter; empty: the model itself.
        """
        _ = self.tokenizer  # refused here where there is none
        return Session(self, params or self.default_params, system, raw, adapter)

    def forget_pools(self, pool: str | None = None) -> int:
        """Deletes earlier answers from which drafts are taken: those of one pool, or with None all of them.

        Returns the number of deleted pools.
        """
        with self._stepper.turn() as engine:
            return engine.forget_pools(pool)

    def close(self) -> None:
        """Aborts open requests, and writes the events and the state to their files.

        Leaving the `with` block does the same, and so does the end of the process.
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
        outputs = [output_of(call.prompt, call.params) for call in calls]
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
            raise InvalidParameter("prompt", prompt, "must be a string or a list of token ids")
        return list(prompt), ()


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A message of the user, and the answer."""

    content: str
    output: RequestOutput
    rendered: str  # the text of its tokens; empty where the two differ

    @property
    def tokens(self) -> list[int]:
        return [*self.output.prompt_token_ids, *self.output.token_ids]


class Session:
    """A conversation with the model, made by `LLM.session`.

    Every turn sends the tokens of the earlier turns unchanged, so their pages are found in the prefix cache
    and only the new message is computed. Between turns `system` may be changed, and `turns` may be shortened
    to take turns back.
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
            raise InvalidParameter(
                "system", system, "a raw conversation has no roles, so it can have no system message"
            )
        self.llm, self.params, self.system, self.raw, self.adapter = llm, params, system, raw, adapter
        self.turns: list[ChatTurn] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as messages with a role and a content, the system message first."""
        pairs = [("system", self.system)] if self.system else []
        for turn in self.turns:
            pairs += [("user", turn.content), ("assistant", turn.output.text)]
        return [{"role": role, "content": content} for role, content in pairs]

    def send(
        self, content: str, params: SamplingParams | None = None, *, speculation: SpeculationLike = None
    ) -> RequestOutput:
        """Adds a message of the user and returns the answer.

        A message that is refused leaves the conversation unchanged.
        """
        for _ in self.stream(content, params, speculation=speculation):
            pass
        return self.turns[-1].output

    def stream(
        self, content: str, params: SamplingParams | None = None, *, speculation: SpeculationLike = None
    ) -> Generator[Event, None, None]:
        """Adds a message of the user and yields an `Event` for each step of the answer. At the end, the
        answer is `turns[-1].output`.

        A turn that is refused or fails leaves the conversation unchanged. A turn that is closed early or
        interrupted keeps the tokens generated so far, or is removed if there are none.
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
        """The token ids that a turn with this message would send, the earlier turns included.

        Raises `InvalidRequest` if the chat template refuses the message.
        """
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
        raise InvalidParameter("n", params.n, "must be 1, because a stream carries one text")
    return params


def new_text(stream: Stream, event: Event) -> str:
    return stream.push(event.tokens) + (stream.flush(event.finish.matched) if event.finish else "")
