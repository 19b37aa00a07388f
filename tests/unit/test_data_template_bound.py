"""Chat templates are rendered as transformers renders them, and are stopped if they produce too much."""

from __future__ import annotations

import json
import random
import resource
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_command
from harness.tokenizer_folders import CHATML, PLAIN, THINKING, make_folder

from mcore_prefix_tree.data import ChatError, template_bound
from mcore_prefix_tree.data.turns import THINKING as THINKING_NAMES

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

LOOPS = """
{%- set ns = namespace(system='', tools=[], index=messages|length - 1, n=0) %}
{%- macro shown(value, level=0) -%}
{%- if value is mapping -%}
{ {%- for key, inner in value|dictsort %}{{ key|trim }}:{{ shown(inner, level + 1) }},{% endfor -%} }
{%- elif value is iterable and value is not string -%}[{{ value|map('string')|join(', ') }}]
{%- else -%}{{ value|string|upper if level is odd else value }}{%- endif -%}
{%- endmacro %}
{%- for message in messages[::-1] if message.role != 'system' %}
    {%- set ns.n = ns.n + 1 %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {%- if message['role'] == 'tool' %}{% continue %}{% endif %}
    {%- set ns.system = ns.system ~ message.role ~ loop.revindex ~ ns.n * 2 ~ '%' %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}{{ '\\n<%s>' % call.function.name }}{{ shown(call.function.arguments) }}
        {{- call | tojson(indent=2) }}{{ call.function.arguments.items() | list }}{% endfor %}
    {%- else %}
        {%- set text = (message.content or '') | trim %}
        {%- if loop.previtem is defined and loop.previtem.role == 'user' %}
        {{- '{0}:{0!r:>12}'.format(message.role) }}{% endif %}
        {{- text.split('</think>')[-1].lstrip('\\n').replace('e', 'E') | indent(2) }}
        {%- generation %}{{ text[:3] + '...' + text[-2:] }}{% endgeneration %}
    {%- endif %}
    {{- loop.cycle('-', '+') * loop.index }}
    {%- if loop.changed(message.role) %}{{ loop.length }}{% endif %}
{%- endfor %}
{%- for tool in tools or [] recursive %}{{ tool | tojson }}
{%- if tool.function %}{{ loop([tool.function]) }}{% endif %}{% endfor %}
{%- set words %}{% for n in range(3) %}{{ n ** 2 }} {{ 7 % (n + 2) }} {% endfor %}{% endset %}
{%- set pair = (words.strip(), [1, 'a', none, true, 2.5]) %}{{ pair[0] ~ pair[1] ~ {'a': [1], 'b': undefined_name} }}
{%- filter upper %}end {{ extra | default('none') }}{{ flag }}{% endfilter %}
{%- call(x) shown_twice('é😀') %}<{{ x }}>{% endcall %}
{%- macro shown_twice(x) %}{{ caller(x) }}{{ caller(x ~ x) }}{% endmacro %}
"""
FORMATS = (
    "{{ '%-5s|%05d|%.2f|%%|%(a)s' % {'a': 1} if false else '%-5s|%05d|%.2f|%%' % ('a', 3, 2.5) }}\n"
    "   {% for row in messages|batch(2, 'x') %}\n{{ row|length }}{% endfor %}\n"
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(' | ') }}"
    "{{ messages|groupby('role')|map('first')|list|sum(start='')|string if false else '' }}"
    "{{ [[1], [2, 3]]|sum(start=[]) }}{{ [3, 1, 2]|sort|reverse|list }}{{ dict(a=1, **{'b': 2})|items|list }}"
    "{{ 'a b c'|wordcount }}{{ 'word ' * 3|int }}{{ ('x ' * 30)|wordwrap(10) }}"
    "{{ 'a'|center(9) }}{{ 3.14159|round(2) }}"
    "{{ '<b>'|e }}{{ 'a'.rjust(4) ~ 'b'.zfill(3) ~ '\\t|'.expandtabs(3) ~ 'a-b'.join(['1', '2']) }}"
    "{{ messages[0]|tojson(indent=1, sort_keys=true) }}{{ messages|pprint }}{{ 2 ** 70 }}{{ -7 // 2 }}{{ 1 / 4 }}"
)
FALLS = (
    "{{ raise_exception('no tools here') if tools else messages[0].nothing.at_all }}",
    "{{ 1 / 0 }}",
    "{{ messages.append(1) }}",
)
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "n": 1e30}}}
TOO_MUCH = [
    "{{ 'a' * 10**10 }}",
    "{% set x = 10**10 * [0] %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.1000000000f' | format(1.5) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{0:{1[0]}}'.format('a', [1000000000]) }}",
    "{{ ('{0}' * 99999).format('a' * 9999) }}",
    "{{ ('%(a)s' * 99999) % {'a': 'a' * 9999} }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a\nb' | indent(width=1000000000) }}",
    "{{ range(99999) | map('center', 99999) | list }}",
    "{{ range(99999) | map('string') | join('a' * 99999) }}",
    "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "{{ ('\t' * 99999).expandtabs(9999999) }}",
    "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "{{ 'a'.encode().ljust(1000000000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ {'a': [1, 2]} | tojson(indent=1000000000) }}",
    "{{ range(9) | batch(1000000000, 'x') | list }}",
    "{{ range(9) | slice(1000000000) | list }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ 10 ** 10000000000 }}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set t %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = t %}"
    "{% endfor %}",
    "{% generation %}{{ 'a' * 10**10 }}{% endgeneration %}",
    "{% filter center(1000000000) %}a{% endfilter %}",
    "{% autoescape true %}{{ '<' * 10**10 }}{% endautoescape %}",
    "{{ messages[0].content * 10**10 }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]


def loaded(folder: str, template: str, **given: Any) -> Any:
    from transformers import AutoTokenizer

    from mcore_prefix_tree.data.chat_template import ChatTemplates

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    stock = AutoTokenizer.from_pretrained(folder)
    stock.chat_template = template
    return ChatTemplates(tokenizer, folder, given), stock


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_folder(tmp_path_factory.mktemp("template") / "folder", PLAIN))


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    texts = ["", " a\nb ", "<think>\nhm\n</think>\n\nyes", "é😀\u2028", "%s {x} {{ y }} <|im_end|>", "line\r\n" * 3]
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 7)):
        role = rng.choice(["system", "user", "assistant", "tool"])
        message: dict[str, Any] = {"role": role, "content": rng.choice(texts)}
        if role == "assistant" and rng.random() < 0.5:
            arguments = {"id": 7, "deep": [1, {"x": None}], "text": rng.choice(texts)}
            call = {"id": "a1", "type": "function", "function": {"name": "find", "arguments": arguments}}
            message |= {"content": "", "tool_calls": [call]}
        if role == "assistant" and rng.random() < 0.3:
            message |= dict.fromkeys(THINKING_NAMES, "because")
        messages.append(message)
    return messages


def outcome(render: Any) -> str:
    try:
        return str(render())
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ChatError) else error
        return f"{type(cause).__name__}: {cause}"


@pytest.mark.parametrize("template", [CHATML, PLAIN, THINKING, LOOPS, FORMATS, *FALLS])
def test_rendering_is_that_of_transformers(folder: str, template: str) -> None:
    given = {"flag": [1, {"a": "b"}], "bos_token": "<s>"}
    ours, stock = loaded(folder, template, **given)
    rng = random.Random(1)
    for number in range(20):
        messages, prompt = conversation(rng), number % 2 == 0
        tools = [TOOL] * rng.randint(0, 2) or None
        expected = outcome(
            lambda messages=messages, tools=tools, prompt=prompt: stock.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **given
            )
        )
        found = outcome(
            lambda messages=messages, tools=tools, prompt=prompt: ours.render(
                messages, tools, add_generation_prompt=prompt
            )
        )
        assert found == expected, json.dumps(messages)


@pytest.mark.parametrize("template", TOO_MUCH)
def test_template_that_produces_too_much_ends_in_a_sentence(
    folder: str, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its text, also on a machine on which its seconds would end first."""
    monkeypatch.setattr(template_bound, "SECONDS", 100.0)
    ours, _ = loaded(folder, template)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatError, match=r"it produces far more text than the conversation has; limit its repetitions$"):
        ours.render([{"role": "user", "content": "hi"}], None, add_generation_prompt=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


def test_silent_loops_end_too(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bound, "SECONDS", 2.0)
    ours, _ = loaded(
        folder, "{% set l = range(99999)|list %}{% for i in range(99999) %}{% set x = -1 in l %}{% endfor %}"
    )
    with pytest.raises(ChatError, match="it takes more than 2 s"):
        ours.render([{"role": "user", "content": "hi"}], None, add_generation_prompt=True)


def test_long_conversations_are_rendered(folder: str) -> None:
    template = (
        "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x + m.content %}"
        "{% for other in messages %}{% if other == m and messages|length > 3 %}{% endif %}{% endfor %}"
        "{% endfor %}{{ n.x }}"
    )
    ours, _ = loaded(folder, template)
    messages = [{"role": "user", "content": f"{number:010}" * 100} for number in range(400)]
    text = ours.render(messages, None, add_generation_prompt=True)
    assert text == "".join(message["content"] for message in messages)


def test_command_refuses_a_line_in_a_sentence(tmp_path: Path) -> None:

    folder = make_folder(tmp_path / "folder", "{{ 'a' * 10**10 }}")
    data = tmp_path / "chat.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    result = run_command("inspect", data, "--tokenizer", folder)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {data}:1: field 'messages' does not fit the chat template of tokenizer ")
