"""Minimal chat templates with the features of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AddedToken

from trainer.cli.make_tiny import CHARACTERS, make_tokenizer

RAISES = "{{ raise_exception('no tags in the content') }}"


@dataclass(frozen=True)
class Shape:
    """A template, the end of its turns, and its change of a turn that another one follows."""

    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    sampled: str
    """A turn as a model samples it."""
    rewrites: bool
    """True if the template writes an older turn differently than it was sampled."""
    between: str
    """The text between a turn and the next one, after its stop token."""


SHAPES = {
    "chatml": Shape(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        ("<|im_end|>",),
        "a guess",
        rewrites=False,
        between="\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n",
    ),
    # reasoning stays only after the last user message, and is empty there if there is none
    "qwen3": Shape(
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{% set parts = m.content.split('</think>') %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% if loop.index0 > ns.last %}{{ '<think>\n' + parts[0].replace('<think>', '').strip()"
        " if parts|length > 1 else '<think>\n' }}{{ '\n</think>\n\n' }}{% endif %}"
        "{{ parts[-1].strip('\n') }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        ("<|im_end|>",),
        "<think>\nhm\n</think>\n\na guess",
        rewrites=True,
        between="\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": Shape(
        "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
        "'<|end_header_id|>\n\n' + m.content|trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
        "{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ("<|eot_id|>",),
        "a guess",
        rewrites=False,
        between="<|start_header_id|>user<|end_header_id|>\n\nno<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    # a turn has no end: the model stops with the next role's token
    "glm": Shape(
        "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' }}"
        "{% if m.role == 'assistant' %}{{ '<think></think>\n' + m.content.split('</think>')[-1]"
        ".strip() }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
        ("<|user|>",),
        "<think>hm</think>\na guess",
        rewrites=True,
        between="\nno<|assistant|>\n",
    ),
    # the last turn has another end, and the model writes a channel itself
    "gptoss": Shape(
        "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}"
        "{% if '<|channel|>' in m.content %}" + RAISES + "{% endif %}"
        "{{ '<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}"
        "{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
        ("<|return|>",),
        "a guess",
        rewrites=True,
        between="<|start|>user<|message|>no<|end|><|start|>assistant",
    ),
    "mistral": Shape(
        "{{ '<s>' }}{% for m in messages %}{{ '[INST] ' + m.content + '[/INST]' if m.role == 'user'"
        " else ' ' + m.content + '</s>' }}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        ("</s>",),
        "a guess",
        rewrites=True,  # a space before the turn, which the model does not sample
        between="[INST] no[/INST]",
    ),
}


AFTER_CALLS = {
    # a tool's result is a part of the turn that called the tool
    "gemma4": Shape(
        "{{ '<|tool>' + tools|tojson + '<tool|>' if tools else '' }}"
        "{% for m in messages if m.role != 'tool' %}{{ '<|turn>' + m.role + '\n' }}"
        "{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + '{' }}"
        "{% for key, value in c.function.arguments.items() %}{{ key }}:{{ value }}{% endfor %}"
        "{{ '}<tool_call|>' }}{% endfor %}{% set answers = namespace(n=0) %}{% if m.tool_calls %}"
        "{% for t in messages[messages.index(m) + 1:] if t.role == 'tool' %}"
        "{% set answers.n = loop.length %}{{ '<|tool_response>response:' + t.name + '{value:' }}"
        "{{ '<|\"|>' + t.content + '<|\"|>}<tool_response|>' }}{% endfor %}{% endif %}"
        "{{ m.content }}{% if m.tool_calls and not answers.n %}{{ '<|tool_response>' }}"
        "{% elif not answers.n %}{{ '<turn|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>assistant\n' }}"
        "{% endif %}",
        (
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            '<|"|>',
            "<turn|>",
        ),
        ("<|tool_response>", "<turn|>"),
        "<|tool_call>call:add{a:1}<tool_call|>",
        rewrites=False,
        between='response:add{value:<|"|>no<|"|>}<tool_response|>',
    ),
    "gptoss": Shape(
        "{{ '<|start|>developer<|message|>' + tools|tojson + '<|end|>' if tools else '' }}"
        "{% set call = namespace(name='') %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if not call.name %}" + RAISES + "{% endif %}{{ '<|start|>functions.' + call.name }}"
        "{{ ' to=assistant<|channel|>commentary<|message|>' + m.content|tojson + '<|end|>' }}"
        "{% elif m.tool_calls %}{% set call.name = m.tool_calls[0].function.name %}"
        "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}"
        "{{ '<|message|>' + m.tool_calls[0].function.arguments|tojson + '<|call|>' }}{% else %}"
        "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        ("<|call|>", "<|end|>"),
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
        rewrites=False,
        between="<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
        '"no"<|end|><|start|>assistant',
    ),
    "mistral": Shape(
        "{{ '[AVAILABLE_TOOLS]' + tools|tojson + '[/AVAILABLE_TOOLS]' if tools else '' }}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}"
        + RAISES
        + "{% endif %}"
        "{{ '[TOOL_RESULTS]{' + m.tool_call_id + m.content + '}[/TOOL_RESULTS]' }}"
        "{% elif m.tool_calls %}{{ '[TOOL_CALLS]' }}{% for c in m.tool_calls %}"
        "{{ c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments|tojson }}"
        "{% endfor %}{{ '</s>' }}"
        "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}"
        "{{ m.content + '</s>' }}{% endif %}{% endfor %}",
        ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ("</s>", "[INST]"),
        '[TOOL_CALLS]add[CALL_ID]call00000[ARGS]{"a": 1}',
        rewrites=False,
        between="[TOOL_RESULTS]{call00000no}[/TOOL_RESULTS]",
    ),
}
"""Templates that write a tool's result only after a message that has `tool_calls`."""


def tokenizer_of(shape: Shape) -> Any:
    """Return a tokenizer of characters with the template and its special tokens."""
    characters = [*CHARACTERS, *'"{}:_[]<>/|IGMANSTKCLODERUV=0\u200b']
    tokenizer = make_tokenizer([*dict.fromkeys(characters)])
    tokenizer.add_tokens([AddedToken(text, special=True) for text in shape.special])
    tokenizer.chat_template = shape.template
    return tokenizer
