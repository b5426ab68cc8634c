"""Hostile templates: each must end in a TemplateError, soon and without much memory."""

import re

import pytest

from diptych.engine.text import sandbox
from diptych.engine.text.sandbox import Marked, TemplateSandbox
from diptych.ground.clock import VirtualClock
from diptych.ground.errors import TemplateError

MESSAGE = Marked({"role": "user", "content": "Hi"}, ("message", 0))


def render(source: str, **variables: object) -> str:
    box = TemplateSandbox()
    pieces = box.pieces(box.compile_source(source), {"messages": [MESSAGE], **variables})
    return "".join(piece.text for piece in pieces)


REACHING = [
    "{{ ''.__class__.__mro__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].content.foo.bar }}",
    "{{ lipsum.__globals__ }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ self.__init__.x }}",
    "{{ messages[0]._source.index }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ ('%s' % messages).__class__.x }}",
    "{{ strftime_now.__globals__.x }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{{ (''|attr('__class__')).x }}",
]


@pytest.mark.parametrize("source", REACHING)
def test_reaching_for_what_is_not_given_is_refused(source):
    """A checkpoint from a stranger must not run code or change what it is given."""
    with pytest.raises(TemplateError):
        render(source)
    assert dict(MESSAGE) == {"role": "user", "content": "Hi"}


ENDLESS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f() %}{% for i in range(9999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) %}{% set x = range(99999)|list|sort|join %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "y" * 5000 + "{% endfor %}{% endset %}",
    "{% call(x) [1]|map('string')|first() %}{% endcall %}{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
]
LARGE = [
    "{{ 'x' * 10**10 }}",
    "{{ 10**9 * 'x' }}",
    "{{ [0] * 10**9 }}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[0]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=['x']) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "{{ 'x'|center(10**9) }}",
    "{{ 'x'.rjust(10**9) }}",
    "{{ 'x'|indent(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ 'x\\t'.expandtabs(10**9) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ ('%s' * 100000) % (('x' * 100000,) * 100000) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10**9) }}",
    "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "{{ '{a}{a}{a}'.format_map({'a': 'x' * 16000000}) }}",
    "{{ 10**10**10 }}",
    "{{ (['x' * 1000000] * 100000)|join }}",
    "{{ ('x' * 1000000).join(['y'] * 100000) }}",
    "{{ ['x' * 1000000] * 100000 }}",
    "{{ (['x' * 1000000] * 100000)|tojson }}",
    "{{ ('a' * 1000000).replace('a', 'x' * 1000000) }}",
    "{{ ('a' * 1000000)|replace('a', 'x' * 1000000) }}",
    "{{ 'aaaa'.replace('', 'x' * 9999999) }}",
]


@pytest.mark.parametrize("source", ENDLESS + LARGE, ids=lambda source: re.sub(r"\W+", "_", source)[:40])
def test_endless_and_giant_templates_are_stopped(source):
    """One template must not take the server's time or memory; the engine's own limits end each of these."""
    with pytest.raises(TemplateError):
        render(source)


def test_time_is_watched():
    """Few but slow turns are stopped by the clock, not by the count."""

    class SlowClock(VirtualClock):
        def now_s(self) -> float:
            self.advance(0.1)
            return super().now_s()

    box = TemplateSandbox(SlowClock())
    template = box.compile_source("{% for i in range(900) %}{% endfor %}")
    with pytest.raises(TemplateError, match="more than 10 s"):
        box.pieces(template, {})


def test_long_but_honest_templates_pass():
    """The limits are far from what real prompts need: 5,000 messages of 1,000 characters."""
    messages = [Marked({"role": "user", "content": "word " * 200}, ("message", i)) for i in range(5000)]
    text = render("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}", messages=messages)
    assert len(text) == 5000 * (6 + 999)


def test_filters_and_statements_of_real_templates_work():
    """What Hugging Face's own environment offers."""
    source = (
        "{%- for x in [3, 1, 2] %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}"
        "{% endfor %}{{ {'b': '<é>'}|tojson }}{{ {'b': 1}|tojson(indent=2) }}{{ 'a' ~ 1 ~ none }}"
        "{% generation %}G{{ x is defined }}{% endgeneration %}{{ messages|map(attribute='role')|join(',') }}"
        "{{ '%s-%03d'|format('a', 7) }}{{ '{} {b}'.format(1, b=2) }}{{ strftime_now('%Y')|length }}{{ [1, 2]|join('+') }}"
    )
    assert render(source) == '32{"b": "<é>"}{\n  "b": 1\n}a1NoneGFalseusera-0071 241+2'


def test_rendering_again_begins_a_new_count(monkeypatch):
    """The counters belong to a rendering, not to the template: a loop in one must not use up the other's turns."""
    box = TemplateSandbox()
    template = box.compile_source("{% for i in range(9000) %}{% endfor %}x")
    monkeypatch.setattr(sandbox, "MAX_TURNS", 20000)
    for _ in range(3):
        assert "".join(piece.text for piece in box.pieces(template, {})) == "x"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ a b }}", "{% for x in %}", "(" * 5 + "{{" + "(" * 500, "{% else %}"]
)
def test_syntax_errors_are_template_errors(source):
    """A damaged template file gets a message with its line."""
    with pytest.raises(TemplateError, match=r"line|compiled"):
        TemplateSandbox().compile_source(source)


def test_how_many_messages_there_are_costs_nothing_to_ask() -> None:
    """Qwen3's template asks in every turn of its loops: conversations of 400 messages were refused."""
    messages = [Marked({"role": "user", "content": "x"}, ("message", i)) for i in range(2000)]
    source = (
        "{% for m in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}{% endfor %}"
        "{% for m in messages %}{% if m == messages|first or loop.index0 > messages|count - 2 %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    assert render(source, messages=messages)


def test_what_a_filter_reads_of_a_generator_is_counted() -> None:
    with pytest.raises(TemplateError, match="turns"):
        render("{% for i in range(9) %}{{ range(90000)|map('string')|first }}{% endfor %}")
