"""Chat templates in the shapes of common models, shortened to the relevant parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from notes_cli.text.template import ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A default system message if there is no other.
QWEN = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)

# Trims contents, prints the date, begins with the BOS token, and has a system message in any case.
LLAMA3 = (
    "{{ bos_token }}{% set system, messages = (messages[0].content | trim, messages[1:])"
    " if messages[0].role == 'system' else ('', messages) %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n\n' + system }}"
    "<|eot_id|>"
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# No system role: it raises. Roles must alternate.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

# No system role: it drops the message.
DROPS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)

# Puts the system text before the last user message.
MISTRAL = (
    "{{ bos_token }}{% set system, talk = (messages[0].content + '\n\n', messages[1:])"
    " if messages[0].role == 'system' else ('', messages) %}"
    "{% for m in talk %}{% if m.role == 'user' %}[INST] {{ (system if loop.last else '') + m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim + eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture
def templates() -> SimpleNamespace:
    return SimpleNamespace(CHATML=CHATML, QWEN=QWEN, LLAMA3=LLAMA3, GEMMA=GEMMA, DROPS=DROPS, MISTRAL=MISTRAL)


@pytest.fixture
def chatml() -> ChatTemplate:
    return ChatTemplate(CHATML)
