"""Hostile chat templates: programs in models, rendered within limits."""

from __future__ import annotations

import random
import re
import time

from bench.faults.frame import ACCEPTED, Kind, chance, check, refused
from bench.faults.mutate import text_changed
from notes_cli.errors import ModelError
from notes_cli.text.template import PLAIN, ChatTemplate

SECONDS = 60
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% macro show(m) %}[{{ m.role | upper }}]{{ m.content }}{% endmacro %}{%- set ns = namespace(n=0) -%}"
    "{%- if tools %}{{ tools | tojson }}{% endif -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role') }}{% endif %}"
    "{{ show(m) }}{% if not loop.last %}\n{% endif %}{% endfor %}{{ strftime_now('%Y') }}"
    "{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
)
BOMBS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{{ 10 ** (10 ** 7) }}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ 'x' * 10 ** 6 }}",
    "{{ (range(99999) | list) * 99999 }}",
    "{% set x = namespace(s='x') %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}{{ x.s }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ " + "1+" * 50_000 + "1 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ messages.__class__ }}",
    "{{ '{:>999999999}'.format('x') }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 'x' | center(999999999) }}",
    "{{ lipsum(n=99999) }}",
    "{% include '/etc/passwd' %}",
    "{% extends 'x' %}",
    "{{ raise_exception('\x1b[2J\n\n' * 9) }}",
    "{{ messages | tojson * 9999 }}",
    "{% for m in messages %}{{ loop(messages) }}{% endfor %}",
)
PIECES = (
    *(
        "{% if false %}",
        "{% endif %}",
        "{% for x in messages %}",
        "{% endfor %}",
        "{{ messages[0].content }}",
        "{#",
        "#}",
    ),
    *("{{ messages[1]['content'] | trim }}", "{{ undefined }}", "{{ undefined.x }}", "{% break %}", "{{ bos_token }}"),
    *("{% set messages = [] %}", "{{ messages[-1].content | upper }}", "{{ messages | length }}", "{% generation %}"),
    *("{% raw %}", "{{ messages[0].content[:3] }}", "{{ messages | map(attribute='content') | join }}", "{{ 1/0 }}"),
    "{%- -%}",
)


class Templates(Kind):
    """Mutants of three templates, and programs that take without end."""

    cases, share, patience = 4_000, 2, 150

    def judge(self, number: int) -> str:
        rng = chance(self.seed, number)
        source = self._source(rng, number)
        texts = [f"§{rng.getrandbits(64):016x}§" for _ in range(rng.choice((1, 2, 3, 4)))]
        roles = ["system", "user", "assistant", "user"][0 if len(texts) == 4 else 1 :]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        started = time.monotonic()
        try:
            parts = ChatTemplate(source, "<s>", "</s>").cut(messages, texts)
        except ModelError as error:
            return refused(error)
        check(time.monotonic() - started < SECONDS, source[:200], "hang")
        # The template's own texts, one more than the user's, have nothing of the user's and nothing of Python.
        own = "".join(parts)
        right = len(parts) == len(texts) + 1 and not any(text in own for text in texts)
        check(right, f"a text came out otherwise: {source[:200]!r}")
        reached = any(mark in own for mark in ("<class", "root:", "uid="))
        check(not reached, f"it reached Python: {own[:100]!r} of {source[:200]!r}")
        return ACCEPTED

    def _source(self, rng: random.Random, number: int) -> str:
        if number % 25 == 0:
            bomb = rng.choice(BOMBS)
            return rng.choice((bomb, bomb + CHATML, CHATML + bomb))
        source = rng.choice((PLAIN, CHATML, TOOLS))
        if rng.random() < 0.5:
            return text_changed(rng, source)
        for _ in range(rng.choice((1, 1, 2, 3))):
            places = [match.start() for match in re.finditer(r"\{[%{]", source)] or [0]
            at = rng.choice(places)
            end = source.find("}", at) + 2
            source = source[:at] + rng.choice((*PIECES, "")) + source[rng.choice((at, end)) :]
        return source
