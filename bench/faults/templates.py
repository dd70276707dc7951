"""Hostile chat templates: programs in models, rendered within limits."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence

from bench.faults.frame import ACCEPTED, REFUSED, Budget, Row, Verdict, chance, tried
from bench.faults.mutate import text_changed
from notes_cli.errors import ModelError
from notes_cli.text.template import PLAIN, ChatTemplate

TITLE = (
    "Chat templates (the plain one, ChatML, one with macros and namespaces), mutated as texts and by statements, and "
    "programs that take without end: loops in loops, powers, long strings, deep nesting, recursion, the insides of "
    "Python."
)
FAILS = (
    "an exception other than the one-line refusal, more than 60 s, or a wrong accept: a text of the user that comes "
    "out changed, twice, out of order or not at all, and is not refused, or a template that reaches Python through the "
    "sandbox."
)
CASES, SHARE = 4_000, 2
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
    *(
        "{{ messages[1]['content'] | trim }}",
        "{{ undefined }}",
        "{{ undefined.x }}",
        "{% break %}",
        "{% set messages = [] %}",
    ),
    *(
        "{{ messages[-1].content | upper }}",
        "{{ messages | length }}",
        "{% generation %}",
        "{{ bos_token }}",
        "{% raw %}",
    ),
    *("{{ messages[0].content[:3] }}", "{{ messages | map(attribute='content') | join }}", "{{ 1/0 }}", "{%- -%}"),
)


def run(budget: Budget, seed: int) -> Row:
    return tried(Templates(seed), budget, patience=150, say="templates")


class Templates:
    """Judges mutants of three templates, and the bombs."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, number: int) -> Verdict:
        rng = chance(self.seed, number)
        source = self._source(rng, number)
        texts = [f"§{rng.getrandbits(64):016x}§" for _ in range(rng.choice((1, 2, 3, 4)))]
        roles = ["system", "user", "assistant", "user"]
        if len(texts) < 4:
            roles = roles[1 : 1 + len(texts)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        begun = time.monotonic()
        try:
            parts = ChatTemplate(source, "<s>", "</s>").cut(messages, texts)
        except ModelError as error:
            said = str(error)
            if "\n" in said or len(said) > 1000:
                return Verdict("wrong", f"no clear line: {said[:200]!r}")
            return REFUSED
        if time.monotonic() - begun > 60:
            return Verdict("hang", source[:200])
        return self._checked(parts, texts, source)

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

    def _checked(self, parts: Sequence[str], texts: Sequence[str], source: str) -> Verdict:
        """The template's own texts, one more than the user's, hold nothing of the user's and nothing of Python."""
        own = "".join(parts)
        if len(parts) != len(texts) + 1 or any(text in own for text in texts):
            return Verdict("wrong", f"a text came out otherwise: {source[:200]!r}")
        if "<class" in own or "root:" in own or "uid=" in own:
            return Verdict("wrong", f"it reached Python: {own[:100]!r} of {source[:200]!r}")
        return ACCEPTED
