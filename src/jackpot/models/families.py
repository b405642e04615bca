"""Families of models known by name, without reaching the hub: architecture, special tokens, chat format.

Tokens and their ids are those of the families' own tokenizers; what a chat template has beyond plain messages (tools,
dates, thoughts of earlier turns) is left out.
"""

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from jackpot.core.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What the models of one family have in common."""

    name: str
    example: str  # a hub name
    pattern: str  # of a model's name; the group is its size in billions of parameters
    chat_pattern: str  # found in the names of those that were taught to chat
    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    tied_up_to: float  # billions of parameters; larger models have an output layer of their own
    first_id: int  # the id of the first of `tokens`
    tokens: tuple[str, ...]  # added to the vocabulary of plain text, in the order of their ids
    kept: frozenset[str] = frozenset()  # tokens that stay where special tokens are removed from a text
    begin: str | None = None  # stands before every text
    end: str  # of a text
    message_end: str  # of what a model that chats says
    pad: str
    template: str  # of chats
    base_has_template: bool  # whether models that do not chat come with it too
    shape: dict[str, object] = field(default_factory=dict)  # settings of every model, whatever its size


class Known(NamedTuple):
    """What the name of a model tells."""

    family: Family
    chats: bool
    tied: bool  # embedding and output layer are one


def known_model(name: str) -> Known:
    """The family of a hub name such as `Qwen/Qwen3-4B-Base`, or of the last part of a path.

    Raises:
        ModelError: no family has such names (lists them).
    """
    last = PurePath(name).name
    for family in FAMILIES:
        if found := re.fullmatch(family.pattern, last, re.IGNORECASE):
            chats = re.search(family.chat_pattern, last, re.IGNORECASE) is not None
            return Known(family, chats, float(found[1]) <= family.tied_up_to)
    raise ModelError(
        f"{name!r} is of no family that is known here, so no small model can be made in its place. Families: "
        f"{', '.join(f'{one.name} ({one.example})' for one in FAMILIES)}. Name a model of one of them, for example "
        f"policy.path={FAMILIES[0].example}, or starter:policy"
    )


_SIZE = r"(\d+(?:\.\d+)?)B(?!-A\d)"  # a mixture of experts, such as Qwen3-30B-A3B, is another architecture
_QWEN2 = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CODE = (
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
_VISION = (
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_OBJECTS = ("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>")
_TOOLS, _THOUGHTS = ("<tool_call>", "</tool_call>"), ("<think>", "</think>")
_QWEN25 = (*_QWEN2, *_OBJECTS, *_VISION, *_TOOLS, *_CODE)
_QWEN3 = (*_QWEN25, "<tool_response>", "</tool_response>", *_THOUGHTS)
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_SPEAKERS = ("<｜User｜>", "<｜Assistant｜>")

_CHATML = (
    "{% if messages[0].role != 'system' and DEFAULT %}<|im_start|>system\n{{ DEFAULT }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN2_TEMPLATE = "{% set DEFAULT = 'You are a helpful assistant.' %}" + _CHATML
_QWEN25_TEMPLATE = (
    "{% set DEFAULT = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}" + _CHATML
)
_QWEN3_TEMPLATE = (
    "{% set DEFAULT = '' %}"
    + _CHATML
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    + "<think>\n\n</think>\n\n{% endif %}"
)
_LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}<｜User｜>{{ message.content }}"
    "{% else %}<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
_INSTRUCT = r"-Instruct\b"
_LLAMA_SHAPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
_QWEN_SHAPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}

# A name is looked for from the first to the last.
FAMILIES = (
    Family(
        name="Qwen3",
        example="Qwen/Qwen3-4B-Base",
        pattern=rf"Qwen3-{_SIZE}(-.*)?",
        chat_pattern=r"^(?!.*-Base\b)",  # those without a further word chat
        model=Qwen3ForCausalLM,
        config=Qwen3Config,
        tied_up_to=4,
        first_id=151_643,
        tokens=_QWEN3,
        kept=frozenset((*_TOOLS, *_CODE, "<tool_response>", "</tool_response>", *_THOUGHTS)),
        end="<|endoftext|>",
        message_end="<|im_end|>",
        pad="<|endoftext|>",
        template=_QWEN3_TEMPLATE,
        base_has_template=True,
        shape=_QWEN_SHAPE,
    ),
    Family(
        name="Qwen2.5",
        example="Qwen/Qwen2.5-3B",
        pattern=rf"Qwen2\.5-(?:Math-|Coder-)?{_SIZE}(-.*)?",
        chat_pattern=_INSTRUCT,
        model=Qwen2ForCausalLM,
        config=Qwen2Config,
        tied_up_to=3,
        first_id=151_643,
        tokens=_QWEN25,
        kept=frozenset((*_TOOLS, *_CODE)),
        end="<|endoftext|>",
        message_end="<|im_end|>",
        pad="<|endoftext|>",
        template=_QWEN25_TEMPLATE,
        base_has_template=True,
        shape=_QWEN_SHAPE,
    ),
    Family(
        name="Qwen2",
        example="Qwen/Qwen2-1.5B",
        pattern=rf"Qwen2-(?:Math-)?{_SIZE}(-.*)?",
        chat_pattern=_INSTRUCT,
        model=Qwen2ForCausalLM,
        config=Qwen2Config,
        tied_up_to=1.5,
        first_id=151_643,
        tokens=_QWEN2,
        end="<|endoftext|>",
        message_end="<|im_end|>",
        pad="<|endoftext|>",
        template=_QWEN2_TEMPLATE,
        base_has_template=True,
        shape=_QWEN_SHAPE,
    ),
    Family(
        name="Llama 3",  # 3, 3.1, 3.2 and 3.3; the tokens are those of 3.1
        example="meta-llama/Llama-3.2-1B",
        pattern=rf"(?:Meta-)?Llama-3(?:\.\d)?-{_SIZE}(?!-Vision)(-.*)?",
        chat_pattern=_INSTRUCT,
        model=LlamaForCausalLM,
        config=LlamaConfig,
        tied_up_to=3,
        first_id=128_000,
        tokens=_LLAMA,
        begin="<|begin_of_text|>",
        end="<|end_of_text|>",
        message_end="<|eot_id|>",
        pad="<|finetune_right_pad_id|>",
        template=_LLAMA_TEMPLATE,
        base_has_template=False,
        shape=_LLAMA_SHAPE,
    ),
    Family(
        name="DeepSeek-R1-Distill-Qwen",
        example="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        pattern=rf"DeepSeek-R1-Distill-Qwen-{_SIZE}(-.*)?",
        chat_pattern="",
        model=Qwen2ForCausalLM,
        config=Qwen2Config,
        tied_up_to=0,
        first_id=151_643,
        tokens=(_END, *_SPEAKERS, _BEGIN, "<|EOT|>", *_THOUGHTS, *_VISION, *_TOOLS, *_CODE),
        kept=frozenset((*_SPEAKERS, "<|EOT|>", *_THOUGHTS, *_TOOLS, *_CODE)),
        begin=_BEGIN,
        end=_END,
        message_end=_END,
        pad=_END,
        template=_DEEPSEEK_TEMPLATE,
        base_has_template=True,
        shape=_QWEN_SHAPE,
    ),
    Family(
        name="DeepSeek-R1-Distill-Llama",
        example="deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        pattern=rf"DeepSeek-R1-Distill-Llama-{_SIZE}(-.*)?",
        chat_pattern="",
        model=LlamaForCausalLM,
        config=LlamaConfig,
        tied_up_to=0,
        first_id=128_000,
        tokens=(_BEGIN, _END, *_LLAMA[2:], *_SPEAKERS, *_THOUGHTS, "<｜▁pad▁｜>"),
        kept=frozenset((*_SPEAKERS, *_THOUGHTS)),
        begin=_BEGIN,
        end=_END,
        message_end=_END,
        pad=_END,
        template=_DEEPSEEK_TEMPLATE,
        base_has_template=True,
        shape=_LLAMA_SHAPE,
    ),
)
