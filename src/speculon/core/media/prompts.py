"""Prompts of text and images: token ids with placeholders, and what the vision tower reads of each image."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from speculon.core.errors import InvalidParameter, ModelError, QueueFull, TooLong
from speculon.core.images import ImageInput
from speculon.core.media.files import FEATURE, ImageLimits, Picture, check_count, read_image, refusal
from speculon.core.media.parts import ImageSource, read_messages

if TYPE_CHECKING:
    from numpy import ndarray

    from speculon.decoding.text.tokenizer import Tokenizer

CACHE_BYTES = 2**28  # guess: of what was made of recent images, which the next turn of a chat sends again
USED_BYTES = 2**31  # guess: of what was made of the images of open requests
# of a processor's result, what is of the text
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")

# of a prompt of messages, how its answer begins
OF_MESSAGES = ("continue_final_message", "add_generation_prompt")

ImagePrompt = tuple[list[int], tuple[ImageInput, ...]]  # token ids, and the images at their placeholders


class Prepared(NamedTuple):
    """What a processor makes of one image, wherever it is in a prompt."""

    inputs: Mapping[str, ndarray]  # float32 pixels and their shapes, by argument of the model
    text: str  # its placeholders in a prompt, and what is around them
    rows: int  # placeholder tokens in it

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values()) + len(self.text)


class Processor:
    """What speculon needs of a transformers processor; `inner` is the processor itself.

    `image_id` is the token whose rows the model replaces by the features of an image. Prepared images are
    kept by their digests, the latest `CACHE_BYTES` of them.
    """

    def __init__(self, inner: Any, image_id: int, cache_bytes: int = CACHE_BYTES):
        self.inner, self.image_id = inner, image_id
        self.placeholder: str = inner.image_token  # of an image, as templates write it
        self.chat_template: Any = getattr(inner, "chat_template", None)  # one, or several by name
        self._cache: OrderedDict[str, Prepared] = OrderedDict()
        self._room = self._cache_bytes = cache_bytes
        self._used: WeakValueDictionary[int, ndarray] = WeakValueDictionary()  # all that is alive, by its id
        self._preparing = Lock()  # a processor has a tokenizer of its own, which fails in two threads at once
        self.prepared = 0  # images that were not found in the cache

    def prepare(self, picture: Picture, name: str) -> Prepared:
        """Raises `InvalidParameter` where the processor refuses the image."""
        with self._preparing:
            if (known := self._cache.get(picture.digest)) is not None:
                self._cache.move_to_end(picture.digest)
                return known
            self._check_room()
            self.prepared += 1
            try:
                prepared = self._prepare(picture)
            except Exception as error:  # processors raise errors of their own choice
                size = f"{picture.image.width} x {picture.image.height} pixels"
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise refusal(name, size, f"the model's image processor rejects it: {why}") from error
            self._keep(picture.digest, prepared)
            self._used.update({id(array): array for array in prepared.inputs.values()})
            return prepared

    def _check_room(self) -> None:
        """Raises `QueueFull`: a small file may become many bytes, which a request has until it ends."""
        if (used := sum(array.nbytes for array in self._used.values())) > USED_BYTES:
            most = f"images of open requests take {used / 1e6:.0f} MB, more than {USED_BYTES / 1e6:.0f}"
            raise QueueFull(most).about(FEATURE)

    def _prepare(self, picture: Picture) -> Prepared:
        made = self.inner(
            images=[picture.image],
            text=[self.placeholder],
            add_special_tokens=False,
            return_text_replacement_offsets=True,
            return_tensors="np",
        )
        ((replacement,),) = made["text_replacement_offsets"]
        rows = sum(token == self.image_id for token in made["input_ids"][0].tolist())
        inputs = {name: value for name, value in made.items() if name not in OF_TEXT}
        return Prepared(inputs, replacement["replacement"], rows)

    def _keep(self, digest: str, prepared: Prepared) -> None:
        if prepared.bytes > self._cache_bytes:
            return
        self._cache[digest] = prepared
        self._room -= prepared.bytes
        while self._room < 0:
            self._room += self._cache.popitem(last=False)[1].bytes


class Images:
    """The images of prompts to one model, whose processor is loaded by `load` or with the first of them."""

    def __init__(self, load: Callable[[], Processor], limits: ImageLimits):
        self._load, self._limits = load, limits
        self._loading = Lock()
        self._processor: Processor | None = None
        self._why: str = ""  # there is no processor

    def load(self) -> None:
        """Loads the processor, if there is one; takes seconds, the first time."""
        with self._loading:
            if self._processor is None and not self._why:
                try:
                    self._processor = self._load()
                except ModelError as error:
                    self._why = str(error)

    def processor(self, sources: Seq[ImageSource]) -> Processor:
        """That for these images. Raises `InvalidParameter` where the model takes none, or not so many."""
        self.load()
        if self._processor is None:
            raise refusal(sources[0].name, "an image", f"this model takes no images: {self._why}")
        check_count(len(sources), sources[0].name.partition(".")[0], self._limits)
        return self._processor

    @classmethod
    def none(cls) -> Images:
        """Those of a model without a processor."""

        def load() -> Processor:
            raise ModelError("it has no image processor")

        return cls(load, ImageLimits(0, 0, 0))

    def template(self, sources: Seq[ImageSource]) -> Any:
        """What writes a conversation with these images: the processor's template, or templates by name, or
        where it has none the tokenizer's (""); None without images.
        """
        return (self.processor(sources).chat_template or "") if sources else None

    def read(
        self, prompt: Mapping[str, Any], tokenizer: Tokenizer, max_context: int | None = None
    ) -> ImagePrompt:
        """A prompt as a table: `{"prompt": text, "images": [...]}` or `{"messages": [...]}`, as `prompt`.

        A table of messages may have `continue_final_message` and `add_generation_prompt`.
        """
        known = {"messages", *OF_MESSAGES} if "messages" in prompt else {"prompt", "images"}
        if unknown := prompt.keys() - known:
            raise InvalidParameter(
                "prompt", min(map(str, unknown)), "unknown field: give prompt and images, or messages"
            )
        if "messages" in prompt:
            messages, sources = read_messages(prompt["messages"])
            continues, opens = map(prompt.get, OF_MESSAGES)
            text = tokenizer.render_chat(
                messages, answer_follows=opens, continues=continues, with_images=self.template(sources)
            )
            encode = partial(tokenizer.encode, add_special_tokens=False)
            return self.prompt(text, sources, encode, "messages", max_context)
        given, images = prompt.get("prompt"), prompt.get("images", ())
        if not isinstance(given, str):
            raise InvalidParameter("prompt", given, "must be a string, with a placeholder for each image")
        images = images if isinstance(images, list | tuple) else [images]
        sources = [ImageSource(f"images.{i}", image) for i, image in enumerate(images)]
        return self.prompt(given, sources, tokenizer.encode, max_context=max_context)

    def prompt(
        self,
        text: str,
        sources: Seq[ImageSource],
        encode: Callable[[str], list[int]],
        name: str = "prompt",
        max_context: int | None = None,
    ) -> ImagePrompt:
        """Token ids of a text with a placeholder for each image, and the images, in their order.

        `name` is the field of the text. Raises `InvalidParameter` for images that are refused and for
        placeholders without an image, `TooLong` as soon as the images alone exceed the context.
        """
        if not sources:
            return encode(text), ()
        processor = self.processor(sources)
        pieces = text.split(processor.placeholder)
        if len(pieces) - 1 != len(sources):
            limit = (
                f"is {len(pieces) - 1} times in the text; it must be there once for each of {len(sources)} "
                "images"
            )
            raise refusal(name, processor.placeholder, limit)
        prepared, digests, rows = list[Prepared](), list[str](), 0
        for source in sources:
            picture = read_image(source.image, source.name, self._limits)
            prepared.append(processor.prepare(picture, source.name))
            digests.append(picture.digest)
            rows += prepared[-1].rows
            if max_context is not None and rows > max_context:
                message = f"{len(prepared)} images of {rows} tokens > context {max_context} tokens"
                raise TooLong(message).about("limits.max_context")
        whole = pieces[0] + "".join(one.text + piece for one, piece in zip(prepared, pieces[1:], strict=True))
        return self._placed(encode(whole), prepared, digests, name, processor)

    def _placed(
        self, ids: list[int], prepared: list[Prepared], digests: list[str], name: str, processor: Processor
    ) -> ImagePrompt:
        """The placeholder tokens of a prompt, given to its images in order."""
        places = [i for i, token in enumerate(ids) if token == processor.image_id]
        if len(places) != (rows := sum(one.rows for one in prepared)):
            limit = f"is {len(places)} times in the prompt, but the images have {rows} rows"
            raise refusal(name, f"token {processor.image_id}", limit)
        left = iter(places)
        images = [
            ImageInput(tuple(islice(left, one.rows)), digest, one.inputs)
            for one, digest in zip(prepared, digests, strict=True)
        ]
        return ids, tuple(images)
