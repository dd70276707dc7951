"""Tests chat templates: rendering, splitting at markers, and failing templates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from notes_cli.errors import ModelError
from notes_cli.text import rendering
from notes_cli.text.template import ChatTemplate

from .wild import DAY, WILD, plainly

TALK = [
    *({"role": "system", "content": "SYS"}, {"role": "user", "content": "U1"}, {"role": "assistant", "content": "A1"}),
    {"role": "user", "content": "U2"},
]


@pytest.mark.parametrize(
    ("source", "folds", "rendered"),
    [
        (
            "GEMMA",
            True,
            "<s><start_of_turn>user\nSYS\n\nU1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n"
            "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("DROPS", True, "[INST] SYS\n\nU1 [/INST] A1</s>[INST] U2 [/INST]"),
        *(("MISTRAL", True, "<s>[INST] SYS\n\nU1[/INST] A1</s>[INST] U2[/INST]"), ("CHATML", False, None)),
        *(("QWEN", False, None), ("LLAMA3", False, None)),
        ("", False, "<s>SYS\n\nQuestion: U1\nAnswer: A1\n\nQuestion: U2\nAnswer:"),
    ],
)
def test_without_a_system_role(templates: SimpleNamespace, source: str, folds: bool, rendered: str | None) -> None:
    template = ChatTemplate(getattr(templates, source) if source else "", bos="<s>", eos="</s>", now=DAY)
    assert template.folds_system is folds
    assert rendered is None or template.render(TALK) == rendered


def test_what_hugging_face_and_llama_cpp_give_to_templates() -> None:
    """They append to a list, loop over missing tools, encode iterators; the next rendering is not affected. tojson
    without HTML escapes, loop controls, generation blocks, missing tools."""
    source = (
        "{% set ids = [] %}{% for m in messages %}{{ ids.append(m.role) or '' }}{% endfor %}{{ ids | tojson }}"
        "{{ messages | map(attribute='content') | tojson }}{{ messages[0].nothing | tojson }}{{ messages.append(1) }}"
        "{% for tool in tools %}{{ tool }}{% endfor %}"
    )
    expected = '["system", "user"]["SYS", "U1"]nullNone'
    assert [ChatTemplate(source)._render(TALK[:2], prompt) for prompt in (True, False)] == [expected, expected]
    source = (
        "{{ {'a': '<é>'} | tojson }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools is none }}"
    )
    assert ChatTemplate(source)._render(TALK, False) == '{"a": "<é>"}SYSTrue'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *(("{% for %}", "cannot be read"), ("{{ raise_exception('No thanks') }}", "failed: No thanks")),
        *(("{{ raise_exception('\x1b[2J\n\nNo') }}", "failed: \\?\\[2J No"), ("{{ messages[9].content }}", "failed")),
        *(("{{ 1 // 0 }}", "failed"), ("no content", "drops or changes the content")),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "drops or changes"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "repeats"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "reorders"),
    ],
)
def test_a_template_that_makes_trouble_is_said(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ChatTemplate(source).render(TALK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        *("{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}"),
        *("{{ cycler.__init__.__globals__.os.system('id') }}", "{% include '/etc/passwd' %}"),
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    """A model file is untrusted; its template reaches only the messages."""
    with pytest.raises(ModelError):
        ChatTemplate(source + "{% for m in messages %}{{ m.content }}{% endfor %}").render(TALK)


def test_all_templates_of_llama_cpp_render_as_without_limits() -> None:
    """The limits do not affect honest templates: the same text, or the same refusal."""
    assert len(WILD) >= 60, "run: make test"
    rendered = 0
    for path in WILD:
        source = path.read_text()
        for talk, prompt in ((TALK, True), (TALK[1:], False), (TALK[:1], False), (TALK[1:2], True)):
            expected = plainly(source, talk, prompt)
            rendered += expected is not None
            try:
                found = ChatTemplate(source, "<s>", "</s>", now=DAY)._render(talk, prompt)
            except ModelError:
                found = None
            assert found == expected, path.name
    assert rendered > 150


def doubled(start: str, double: str, times: int = 60) -> str:
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range({times}) %}}{{% set ns.x = {double} %}}{{% endfor %}}"
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "says"),
    [
        *(("{{ 'x' * 10**9 }}", "MiB of memory"), ("{{ 'x' | center(10**10) }}", "MiB of memory")),
        *(("{{ '%9999999999d' % 1 }}", "MiB of memory"), ("{{ '{:9999999999}'.format(1) }}", "MiB of memory")),
        (doubled("'xy'", "ns.x ~ ns.x"), "MiB of memory"),
        ("{% for a in range(9999) %}{{ 'x' * 999 }}{% endfor %}", "renders more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{{ " + "-" * 99_999 + "1 }}", "nested too deeply"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{% if 1 %}" * 900 + "{% endif %}" * 900, "nested too deeply"),
        ("x" * 2_000_000, "cannot be read: it is longer than"),
    ],
)
def test_a_template_that_takes_too_much_is_said(source: str, says: str) -> None:
    """One line names it, whichever instruction takes the time or the memory; the next one is rendered as usual."""
    with pytest.raises(ModelError, match=r"^the template of x") as caught:
        ChatTemplate(source + "{{ messages[0].content }}", name="the template of x").render(TALK)
    assert says in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert ChatTemplate("").render(TALK[1:2]) == "Question: U1\nAnswer:"


@pytest.mark.process
def test_a_template_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a single instruction. The child of this test has one second."""
    rendering._usual._end(rendering._usual._start())
    more = "import serve; from notes_cli.text import rendering; rendering.SECONDS = 0"
    monkeypatch.setattr(rendering, "_CHILD", rendering._CHILD.replace("import serve", more))
    try:
        with pytest.raises(rendering.RenderError, match="it takes more than 2 seconds"):
            rendering.render("{{ 10**(10**7) }}", "{}")
        assert rendering.render("b", "{}") == "b"
    finally:
        rendering._usual._end(rendering._usual._start())  # other tests have their two seconds


def test_an_interrupt_while_it_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is not lost, and a late reply does not become the text of the next template."""
    child = rendering._usual._start()

    class Interrupted:
        """A child that does not reply before Ctrl-C."""

        stdin, poll, wait, kill = child.stdin, child.poll, child.wait, child.kill

        class stdout:
            close = child.stdout.close  # type: ignore[union-attr]

            @staticmethod
            def readline() -> bytes:
                raise KeyboardInterrupt

    monkeypatch.setattr(rendering._usual, "_child", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        rendering.render("a", "{}")
    assert rendering.render("b", "{}") == "b" and child.poll() is not None
