"""Chat templates in the shapes of well-known models, written for tests, and a tokenizer that renders them."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from speculon.core.config import EngineConfig
from speculon.core.config.serve import ServeConfig
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.server.model import ServedModel
from tests.server.inside import ScriptedLoader
from tests.server.scripted import CONTEXT, VOCAB, Bytes

ANSWER = "{% if add_generation_prompt %}<assistant>{% endif %}"
# takes any roles in any order
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}" + ANSWER
# as Qwen3.5's: a system message comes first
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<end>{% endfor %}" + ANSWER
)
# as Gemma 3's: a system message is the beginning of the first turn, and turns alternate
ALTERNATING = (
    "{% set opening = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if opening else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<{{ 'model' if m.role == 'assistant' else m.role }}>{{ opening if loop.first }}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)
# as Gemma 2's: no system message at all
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + ALTERNATING
)
# as Mistral's: instructions in brackets, answers are trimmed
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'system' and loop.first %}{{ m.content }}"
    "{% elif (m.role == 'user') != (loop.index0 % 2 == (1 if messages[0].role == 'system' else 0)) %}"
    "{{ raise_exception('After the optional system message, roles must alternate user/assistant') }}"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
CALLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> answer in <tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}(ARGUMENTS)</tool_call>{% endfor %}<end>{% endfor %}" + ANSWER
)
# iterates the arguments of calls, as Qwen3.5's
ITERATING = CALLS.replace(
    "ARGUMENTS", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}"
)
# puts them into a text, as DeepSeek's
CONCATENATING = CALLS.replace("ARGUMENTS", "{{ '' + c.function.arguments }}")
# shows the thinking of the last answer, as Qwen3's
THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
# named templates
WITH_TOOLS = "TOOLS " + CALLS
WITH_DOCUMENTS = "{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}" + TURNS


class Rendered(Bytes):
    """Renders a template, or one of several by name."""

    chat_template: Any

    def apply_chat_template(  # type: ignore[override]
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        (text,), _ = render_jinja_template(
            [messages],
            tools=tools,
            documents=documents,
            chat_template=chat_template or self.chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return str(text)


class RenderedLoader(ScriptedLoader):
    def tokenizer(self, config: EngineConfig) -> Tokenizer:
        return tokenizer_of(self._template)


def tokenizer_of(template: Any) -> Tokenizer:
    return Tokenizer(Rendered(template))


def model_of(template: Any) -> ServedModel:
    return ServedModel("m", tokenizer_of(template), CONTEXT, VOCAB, "off", ServeConfig())
