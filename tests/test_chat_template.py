"""Chat templates render as in transformers, and hostile ones cost little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import pytest
from forked import posix_only
from transformers.utils.chat_template_utils import render_jinja_template

from taper.errors import RequestError
from taper.models import chat_template
from taper.models.chat_template import ChatTemplate
from taper.models.limited_process import Limits

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
USER = {"role": "user", "content": "Was ist 'das'? \"<b>\" 日本 😀 {{ 1 }}"}
ASSISTANT = {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nThis."}
CONVERSATIONS = {
    "one": [USER],
    "turns": [SYSTEM, USER, ASSISTANT, USER],
    "long": [SYSTEM, *[USER, ASSISTANT] * 300, USER],
    "large": [{"role": "user", "content": "word and " * 100_000}],
}

# Idioms of today's models' templates, rewritten.
IDIOMS = {
    "last query": """
{%- set ns = namespace(found=false, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.found, ns.last = true, index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if '</think>' in message.content %}
        {%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set rest = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- message.role ~ ':' ~ (thought if loop.index0 > ns.last or loop.last else '') ~ rest }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '\\n' + message.content|trim + '<|end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}{{ ns.last }}""",
    "system and tools": """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system, messages = messages[0]['content']|trim, messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{%- if tools is not none and tools|length %}{{ tools|tojson(indent=4) }}{% endif %}
{%- if not date is defined %}{%- set date = strftime_now('%d %b') if 0 else '26 Jul' %}{% endif %}
{{- "<|header|>%s<|body|>\\n{}{:>8}".format(system, date) % 'x' }}
{%- for m in messages %}{{ m | tojson }}{{ m.items()|list|length }}{{ m.get('name', 'none') }}{% endfor %}""",
    "alternating roles": """
{%- for message in messages if message.role != 'system' %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
    {%- set lead = loop.nextitem.role ~ '|' if loop.first and not loop.last else '' %}
    {{- lead + '[INST] ' * (message.role == 'user') + message.content.strip() + eos_token }}
{%- endfor %}""",
    "macros and blocks": """
{%- macro show(content, depth=0) %}{% for line in content.split('\\n') %}{{ '  ' * depth }}{{ line|upper }}
{% endfor %}{% endmacro %}
{%- macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}
{%- for message in messages %}{% set text %}{{ show(message.content, loop.index % 3) }}{% endset %}
{%- filter indent(2) %}{{ text }}{% endfilter %}
{%- if loop.index > 3 %}{% break %}{% endif %}{% generation %}{{ message.role }}{% endgeneration %}{% endfor %}
{%- call twice() %}!{% endcall %}{{ messages|map(attribute='role')|unique|join(', ') }}
{{- (messages|selectattr('role', 'equalto', 'user')|list)|length }} {{ [1, 2, 3]|sum }} {{ 7 // 2 ** 1 }}
{{- messages[0].content[:10] ~ messages[-1].role[::-1] }} {{ {'a': [1, (2, 3)]} }} {{ messages is iterable }}
{{- '%-5s|%05.1f' % ('a', 2.5) }}{{ 'a-b'.replace('-', '+') }}{{ messages[0] is mapping }}""",
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_real_templates_do_renders_as_transformers_does(idiom, conversation):
    template, messages = IDIOMS[idiom], CONVERSATIONS[conversation]
    expected, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **TOKENS)
    given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True, **TOKENS}
    ours = ChatTemplate(template)
    assert [ours.render(given), ours.render(given)] == expected * 2


def repeated(start: str, step: str, end: str = "") -> str:
    """A value that each of many rounds makes from the one before."""
    begin = "{% set ns = namespace(x=" + start + ") %}{% for i in range(20000) %}{% set ns.x = "
    return begin + step + " %}{% endfor %}" + end


def rounds(body: str) -> str:
    return "{% for i in range(30000) %}{% for j in range(30000) %}" + body + "{% endfor %}{% endfor %}"


ONE_LINERS = r"""
{{ '%2000000000s'|format('x') }}
{{ '%.2000000000f' % 1 }}
{{ '%*s' % (2000000000, 'x') }}
{{ ('%(' * 400000) % {} }}
{{ ('%s' * 90000) % ((('x' * 90000),) * 90000) }}
{{ '{:2000000000}'.format(1) }}
{{ '{:{}}'.format(1, 2000000000) }}
{{ '{a:2000000000}'.format_map({'a': 1}) }}
{{ 'x' * 2000000000 }}
{{ 2000000000 * [0] }}
{{ 10 ** 100000000 % 7 }}
{{ 'x'|center(2000000000) }}
{{ 'x'.ljust(2000000000) }}
{{ '1'.zfill(2000000000) }}
{{ ('\t' * 99999).expandtabs(99999) }}
{{ [1]|slice(2000000000)|list }}
{{ [1]|tojson(indent=2000000000) }}
{{ 1.5|round(2000000000, 'floor') }}
{{ ([[1]] * 29000)|sum(start=[]) }}
{{ lipsum(n=100000000) }}
{{ ('ü' * 999999).encode('punycode') }}
{{ (1).to_bytes(2000000000, 'big') }}
{{ ('a' * 999999).translate({97: 'b' * 999999}) }}
{{ range(0, 60000000000000000000000, 2305843009213693951)|unique|list }}
{{ range(30000)|map('string')|map('center', 900000)|list }}
{{ strftime_now('%c' * 200000) }}
{% filter center(2000000000) %}x{% endfilter %}
{% for i in range(30000) %}{% for j in range(30000) if false %}{% endfor %}{% endfor %}
{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(80) }}
{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}
"""
ROUNDS = """
{{ messages }}
{{ range(30000)|list|length }}
{{ range(30000)|select('odd')|last }}
{{ range(30000)|map(attribute='real')|max }}
{% if 'b' in 'a' * 900000 %}{% endif %}
{% set x = ('a' * 900000)[::2] %}
{{ ('a' * 900000).count('b') }}
{{ loop.changed([messages] * 9000) }}
"""
BOMBS = [
    *ONE_LINERS.strip().splitlines(),
    *map(rounds, ROUNDS.splitlines()),
    rounds("{% set x %}" + "t" * 9000 + "{% endset %}"),
    *(repeated("'ab'", step) for step in ("ns.x ~ ns.x", "ns.x + ns.x", "[ns.x, ns.x]|join", "ns.x.join('abc')")),
    *(
        repeated("'ab'", step)
        for step in ("ns.x|replace('a', ns.x)", "ns.x.replace('', ns.x)", "'%s%s' % (ns.x, ns.x)")
    ),
    *(repeated("3", "ns.x * ns.x"), repeated("[1]", "ns.x + ns.x"), repeated("[]", "ns.x + ['x' * 900000 ~ i]")),
    *(repeated("['a']", "[ns.x, ns.x]", end) for end in ("{{ ns.x }}", "{{ ns.x|tojson }}")),
    repeated("('a',)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    repeated("{'a': 1}", "{'a': ns.x.items(), 'b': ns.x.values()}", "{{ ns.x }}"),
    repeated("{'a': 1}", "{'a': ns.x.items().mapping, 'b': ns.x.items().mapping}", "{{ ns.x }}"),
    repeated("1", "(ns.x,)", "{{ {ns.x: 1} }}"),
    repeated("{}", "{'a': ns.x}", "{{ ns.x }}"),
    "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 40 + "x" + "{% endcall %}" * 40,
    # Much work in one round of a loop, in one operation, or when what was made lazily is used.
    "{% set x %}" + rounds("a{% if 1 %}b{% endif %}" * 2500) + "{% endset %}",
    rounds("{% set x = 'a' * 900000 %}" + "{% if 'b' in x %}{% endif %}" * 2000),
    "{% set x = 'a' * 99 %}{% for i in range(30000) if " + "'b' in x * 9000 or " * 200 + "0 %}{% endfor %}",
    "{{ range(30000)|map(attribute='" + "real." * 9000 + "real')|list }}",
    "{% set x = 'a' * 900000 %}{{ range(30000)|map(attribute='no', default=x)|join }}",
    "{% set x = 'a' * 900000 %}{{ (messages * 9000)|reverse|join(x) }}",
    "{% set x = 'a' * 900000 %}{% for i in range(30000) %}{{ loop|join(x) }}{% endfor %}",
    "{% macro f() %}{{ varargs }}{% endmacro %}{% set x = 'a' * 900000 %}{{ f(" + "x, " * 9000 + "x) }}",
    "{% set x = 'a' * 900000 %}{{ " + "x ~ " * 9000 + "x }}",
    *("x" * 70_000, "{{ " + "(" * 30_000 + " }}", "{{ " + "not " * 15_000 + "x }}", "{% if 1 %}" * 2000),
]

# Harmless when they are run; they were not in every version of jinja2.
HARMLESS = [
    r"{{ ('\n' * 99999)|indent(99999) }}",
    "{{ [1]|batch(2000000000)|list }}",
    "{{ (('<!--' * 200000)|safe).striptags() }}",
    repeated("['a']", "[ns.x, ns.x]", "{{ ns.x == [ns.x] }}"),
]

RUN = """
import json, re, resource, sys
from taper.errors import RequestError
from taper.models import chat_template
from taper.models.limited_process import Limits
chat_template._PROCESS.limits = Limits(0.2, 512)
seconds = 0.0
for template in json.load(sys.stdin):
    try:
        chat_template.ChatTemplate(template).render({"messages": [{"role": "user", "content": "hi"}]})
        message = "rendered"
    except RequestError as error:
        message = str(error)
    chat_template._PROCESS.stop()
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    before, seconds = seconds, sum(usage.ru_utime + usage.ru_stime for usage in usages)
    own = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])  # ru_maxrss counts the fork too
    print(json.dumps([seconds - before, max(own, usages[1].ru_maxrss), message]))
"""


@posix_only
@pytest.mark.ci
def test_hostile_templates_are_refused_within_seconds_and_a_gigabyte():
    """With a limit of a fifth of a second of processor time."""
    import resource

    templates = [*BOMBS, *HARMLESS]
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))  # noqa: E731
    process = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(templates), text=True, capture_output=True, preexec_fn=limit
    )
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) == len(templates), (templates[len(results)], process.stderr[-1000:])
    for template, (seconds, kilobytes, message) in zip(templates, results, strict=True):
        refused = message.startswith("the model's chat template")
        assert refused or (template in HARMLESS and message == "rendered"), (template[:200], message)
        assert seconds < 2, (template[:200], seconds)
        assert kilobytes < 600_000, (template[:200], kilobytes)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("x" * 65_537, "has 65537 characters; at most 65536"),
        ("{{ 'x' * 2000000 }}", r"writes more than 10\d{5} characters"),
        ("{{ 'x' * 2000000000 }}", "needs more than 512 MB"),
        (rounds(""), r"takes more than 0\.5 seconds"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_each_limit_is_named(monkeypatch, template, says):
    chat_template._PROCESS.stop()
    monkeypatch.setattr(chat_template._PROCESS, "limits", Limits(0.5, chat_template.MAX_MEGABYTES))
    with pytest.raises(RequestError, match=says):
        ChatTemplate(template).render({"messages": [USER]})


@pytest.mark.parametrize("end", ["too long", "too much", "killed meanwhile"])
def test_a_refused_rendering_leaves_the_template_as_it_was(end):
    template = ChatTemplate("{{ 'x' * n }}")
    assert template.render({"n": 3}) == "xxx"
    if end == "killed meanwhile":
        process = chat_template._PROCESS._idle
        process.kill()
        process.wait()
    else:
        with pytest.raises(RequestError):
            template.render({"n": 10 ** (8 if end == "too long" else 10)})
    assert template.render({"n": 3}) == "xxx"


@posix_only
def test_threads_and_forked_processes_render_at_the_same_time():
    template = ChatTemplate("{% for i in range(3000) %}{{ n }},{% endfor %}")

    def check(number: int) -> bool:
        return all(template.render({"n": number}) == f"{number}," * 3000 for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(check, number) for number in range(4)]
        forks = [os.fork() for _ in range(2)]  # while threads render
        if 0 in forks:
            os._exit(0 if check(os.getpid()) else 1)
        assert all(thread.result() for thread in threads)
    assert [os.waitpid(child, 0)[1] for child in forks] == [0, 0]


def test_messages_that_are_not_json_are_refused_and_surrogates_pass():
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="messages must be JSON"):
        template.render({"messages": [{"content": object()}]})
    assert template.render({"messages": [MappingProxyType({"content": "\ud800"})]}) == "\ud800"


@pytest.mark.skipif(not os.path.exists("/proc"), reason="processes are looked for in /proc")
def test_nothing_is_left_of_a_process_that_rendered():
    code = "from taper.models import chat_template as c; c.ChatTemplate('').render({}); print(c._PROCESS._idle.pid)"
    for ending in ("", "; import os; os.kill(os.getpid(), 9)"):
        command = [sys.executable, "-uc", code + ending]
        worker = int(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
        deadline = time.monotonic() + 10
        while is_alive(worker):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()  # not a zombie that nobody waits for
    except FileNotFoundError:
        return False


def test_rendering_again_is_quick():
    template, messages = ChatTemplate(IDIOMS["last query"]), CONVERSATIONS["turns"]
    template.render({"messages": messages})
    started = time.process_time()
    for _ in range(20):
        template.render({"messages": messages})
    assert time.process_time() - started < 0.5
