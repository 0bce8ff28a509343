"""The process that renders chat templates: its limits, its life, and templates that attack it.

    NANOPAGE_ATTACKS=1000 pytest tests/text/test_template_process.py -s -k attack

renders every template in `ATTACKS` and 1,000 random ones, and counts the outcomes.
"""

import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from nanopage.files.limited_process import PROGRAM
from nanopage.text import chat_template
from nanopage.text.chat_template import TemplateRenderer
from nanopage.text.template_process import create_environment

ROOT = Path(__file__).parents[2]
USER = {"role": "user", "content": "Hello"}
GREETING = "{{ messages[0].content }} {{ bos_token }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the limit on memory")
ATTACK_COUNT = int(os.environ.get("NANOPAGE_ATTACKS", "0"))


@pytest.fixture
def renderer():
    renderer = TemplateRenderer()
    yield renderer
    renderer.process.stop()


def render(renderer: TemplateRenderer, source: str, content: str = "Hello") -> str:
    return renderer.render(source, [{"role": "user", "content": content}], True, {"bos_token": "<s>"})


def children() -> set[int]:
    """The template processes of this program, without those that other tests did not wait for."""
    pids = set()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and str(PROGRAM) in process.cmdline():
                pids.add(process.pid)
    return pids


def process_of(renderer: TemplateRenderer) -> int:
    render(renderer, GREETING)
    return renderer.process._process.pid


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# The life of the process


@pytest.mark.parametrize("early", [False, True])
def test_the_first_rendering_starts_a_process_that_ends_with_its_renderer(early):
    """Or it was started before."""
    before = children()
    renderer = TemplateRenderer()
    assert children() == before
    if early:
        renderer.start()
        assert len(children() - before) == 1
    pid = process_of(renderer)
    assert process_of(renderer) == pid
    assert children() - before == {pid}
    del renderer
    assert not psutil.pid_exists(pid)


def test_two_renderers_have_two_processes(renderer):
    other = TemplateRenderer()
    assert process_of(other) != process_of(renderer)
    del other
    assert render(renderer, GREETING) == "Hello <s>"


def start_program(code: str, **options) -> subprocess.Popen:
    """Start a program with a renderer."""
    start = """
        import os, signal, sys, threading, time
        from nanopage.text import chat_template
        renderer = chat_template.TemplateRenderer()
        renderer.process.limits.cpu_seconds = 0.5
        def render(source):
            return renderer.render(source, [{"role": "user", "content": "Hello"}], True, {})
        render("")
        print(renderer.process._process.pid, flush=True)
    """
    code = textwrap.dedent(start) + textwrap.dedent(code)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env, **options)


@pytest.mark.parametrize(
    "code",
    [
        "",
        "os._exit(0)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        f"threading.Thread(target=render, args=({ENDLESS!r},)).start(); time.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
    ids=["exit", "_exit", "killed", "killed while rendering"],
)
def test_the_process_ends_with_the_program(code):
    with start_program(code) as program:
        wait_until_gone(int(program.stdout.readline()))


def test_a_fork_renders_in_a_process_of_its_own():
    code = """
        first, source = renderer.process._process.pid, "{{ messages[0].content }}"
        if os.fork() == 0:
            del renderer
            os._exit(0)
        if os.fork() == 0:
            assert render(source) == "Hello" and renderer.process._process.pid != first
            del renderer
            os._exit(0)
        print(*(os.wait()[1] for _ in range(2)), render(source), renderer.process._process.pid == first)
    """
    with start_program(code) as program:
        assert program.stdout.read().split()[1:] == ["0", "0", "Hello", "True"]


def test_ctrl_c_stops_a_rendering_and_the_next_one_works(renderer):
    """A terminal sends SIGINT to all processes of the group in its foreground."""
    assert os.getpgid(process_of(renderer)) != os.getpgid(0)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            render(renderer, ENDLESS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert render(renderer, GREETING) == "Hello <s>"


def test_a_process_that_somebody_killed_is_replaced(renderer):
    os.kill(process_of(renderer), signal.SIGKILL)
    renderer.process._process.wait()
    assert render(renderer, GREETING) == "Hello <s>"


def test_a_process_that_is_killed_while_rendering_is_an_error(renderer):
    timer = threading.Timer(0.2, os.kill, (process_of(renderer), signal.SIGKILL))
    timer.start()
    with pytest.raises(ValueError, match="the chat template failed: its process ended with status -9"):
        render(renderer, ENDLESS)
    assert render(renderer, GREETING) == "Hello <s>"


def test_a_process_that_cannot_be_started_is_an_error(renderer, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(RuntimeError, match=r"cannot start the process that runs template_process.*/no/such/python"):
        render(renderer, GREETING)


def test_the_process_runs_no_code_from_the_current_directory_or_the_environment(renderer, tmp_path, monkeypatch):
    for name in ("json", "signal", "jinja2", "markupsafe", "sitecustomize", "usercustomize", "nanopage"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert render(renderer, GREETING) == "Hello <s>"
    assert not (tmp_path / "ran").exists()


def test_threads_get_their_own_renderings(renderer):
    texts = collections.defaultdict(list)

    def work(name: str):
        for i in range(20):
            texts[name].append(render(renderer, GREETING, f"{name} {i}"))

    threads = [threading.Thread(target=work, args=(f"thread {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {f"thread {n}": [f"thread {n} {i} <s>" for i in range(20)] for n in range(8)}


# Limits


MEMORY = "it needs more than 64 MiB"
TIME = "it took more than 0.2 s of CPU time"
OUTPUT = "it wrote more than 8,000,000 characters"
LIMITS = {
    "references to one string": ("{{ (['b' * 900000] * 9000) | join | length }}", MEMORY),
    "a long translation": ("{{ ('a' * 900000).translate({97: 'b' * 900000}) | length }}", MEMORY),
    "an indent in JSON": ("{{ ('x' * 9000) | list | tojson(indent=900000) | length }}", MEMORY),
    "a repeated string": ("{{ 'a' * 10 ** 9 }}", MEMORY),
    "a wrapped line": ("{{ ('a' * 900000) | wordwrap(1) | length }}", TIME),
    "nested loops": (ENDLESS, TIME),
    "powers": ("{{ 9 ** (9 ** 9) }}", TIME),
    "a long output": ("{% for a in range(90) %}{{ 'a' * 100000 }}{% endfor %}", OUTPUT),
}


@LINUX
@pytest.mark.parametrize("name", LIMITS)
def test_a_template_that_exceeds_a_limit_is_an_error_and_the_next_one_works(renderer, name):
    source, reason = LIMITS[name]
    limits = renderer.process.limits  # a slow machine takes seconds to fill the memory
    limits.cpu_seconds, limits.seconds = 0.2 if reason == TIME else 60, 120
    limits.memory = 64 << 20 if reason == MEMORY else limits.memory
    with pytest.raises(ValueError, match=f"^the chat template failed: {reason}$"):
        render(renderer, source)
    assert render(renderer, GREETING) == "Hello <s>"


def test_without_a_limit_on_cpu_time_there_is_one_on_waiting(renderer, monkeypatch):
    renderer.process.limits.cpu_seconds, renderer.process.limits.seconds = 1000, 0.5
    with pytest.raises(ValueError, match=r"^the chat template failed: it took more than 0.5 s$"):
        render(renderer, ENDLESS)


@LINUX
def test_a_process_that_keeps_memory_is_replaced(renderer, monkeypatch):
    renderer.process.limits.memory = 64 << 20
    pid = process_of(renderer)
    assert process_of(renderer) == pid
    large = "{% if messages | length > 1 %}" + "x" * 5_000_000 + "{% endif %}"  # the process keeps the last template
    assert render(renderer, large + GREETING) == "Hello <s>"
    assert process_of(renderer) != pid


def test_a_prompt_of_a_megabyte_is_far_from_the_limits(renderer, monkeypatch):
    renderer.process.limits.cpu_seconds /= 5
    renderer.process.limits.memory //= 5
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", chat_template.MAX_CHARACTERS // 5)
    for letter in ("a", "語", "🙂"):
        contents = [letter * (1_000_000 // 500 // len(letter.encode())) for _ in range(500)]
        messages = [{"role": "user", "content": content} for content in contents]
        source = "{% for m in messages %}{% set content = m.role + m.content | trim %}{{ content + '\n' }}{% endfor %}"
        assert renderer.render(source, messages, True, {}) == "".join(f"user{content}\n" for content in contents)


@pytest.mark.parametrize("source", ["{{ raise_exception('x' * 10 ** 6) }}", "{{ {}['x' * 10 ** 6].y }}"])
def test_a_template_cannot_write_long_errors(renderer, source):
    with pytest.raises(ValueError, match=r"^the chat template failed: .*x{300}") as raised:
        render(renderer, source)
    assert len(str(raised.value)) < 600


def test_a_template_cannot_write_to_the_terminal(renderer, capfd):
    assert render(renderer, "{{ 'yes' if messages else 1[1:] }}") == "yes"  # Python warns of an index of a number
    assert capfd.readouterr() == ("", "")


def test_lone_surrogates_of_a_template_are_errors_that_can_be_printed(renderer):
    for source in ("{{ '\\ud800' }}", "\ud800", "{{ raise_exception('\\ud800') }}", "{{ \ud800 }}"):
        with pytest.raises(ValueError, match=r"the chat template failed: .*\\ud800") as raised:
            render(renderer, source)
        str(raised.value).encode()
    assert render(renderer, "{{ '\\ud83d\\ude42' | length }}") == "2"


# Attacks

ATTACKS = {
    # Loops and recursion
    "nested loops": ENDLESS,
    "three nested loops": "{% for a in range(99) %}{% for b in range(999) %}{% for c in range(999) %}"
    + "{% endfor %}" * 3,
    "loops over lists of lists": "{% for a in [[0] * 99999] * 99999 %}{% for b in a %}{% endfor %}{% endfor %}",
    "loops over letters": "{% for a in 'a' * 99999 %}{% for b in 'a' * 99999 %}{% endfor %}{% endfor %}",
    "a loop with a condition": "{% for a in range(99999) if range(99999) | list | length < 0 %}{% endfor %}",
    "loops in a macro": "{% macro f() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}"
    "{% for a in range(99999) %}{{ f() }}{% endfor %}",
    "a recursive loop": "{% for a in [0] recursive %}"
    "{% if loop.depth < 6 %}{{ loop(range(999)) }}{% endif %}{% endfor %}",
    "a recursive loop without end": "{% for a in [0] recursive %}{{ loop([0]) }}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "macros that call each other": "{% macro f() %}{{ g() }}{% endmacro %}"
    "{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that is its own argument": "{% macro f(g) %}{{ g(g) }}{{ g(g) }}{% endmacro %}{{ f(f) }}",
    "a block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a block that calls its parent": "{% block a %}{{ super() }}{% endblock %}",
    "a caller that calls itself": "{% macro f() %}{{ caller() }}{% endmacro %}"
    "{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
    "a huge range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "a huge range as a list": "{{ range(999999999) | list | length }}",
    "ranges of ranges": "{{ range(99999) | map('string') | map('list') | list | length }}",
    "loop.changed": "{% for a in range(99999) %}{{ loop.changed(range(99999) | list) }}{% endfor %}",
    "loop.cycle": "{% for a in range(99999) %}{{ loop.cycle(*range(99999)) }}{% endfor %}",
    # Growth
    "a repetition from the left": "{{ 1000000000 * 'a' }}",
    "a repetition of a literal": "{{ 'a' * 1000000000 }}",
    "a repeated list": "{{ ([0] * 1000000000) | length }}",
    "a repeated tuple": "{{ ((0,) * 1000000000) | length }}",
    "repetitions of repetitions": "{{ (('a' * 999999) * 99999) | length }}",
    "references to one string": "{{ (['b' * 900000] * 9000) | string | length }}",
    "references printed prettily": "{{ (['b' * 900000] * 9000) | pprint | length }}",
    "references in JSON": "{{ (['b' * 900000] * 9000) | tojson | length }}",
    "references joined": "{{ (['b' * 900000] * 9000) | join('c') | length }}",
    "references joined by a method": "{{ ','.join(['b' * 900000] * 9000) | length }}",
    "references in references": "{% set ns = namespace(a=[0]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
    "references in references as JSON": "{% set ns = namespace(a=[0]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a | tojson }}",
    "a sum of lists": "{{ ([[0] * 9999] * 9999) | sum(start=[]) | length }}",
    "additions": "{% set ns = namespace(s='a' * 9999) %}"
    "{% for a in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "concatenations": "{% set ns = namespace(s='a' * 9999) %}"
    "{% for a in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a slow concatenation": "{% set ns = namespace(s='') %}"
    "{% for a in range(99999) %}{% set ns.s = 'é' ~ ns.s ~ 'a' * 99 %}{% endfor %}",
    "slices": "{% set s = 'a' * 9999999 %}{% for a in range(99999) %}{% set x = s[:-1] %}{% endfor %}",
    "slices that are kept": "{% set s = 'a' * 999999 %}{% set ns = namespace(l=[]) %}"
    "{% for a in range(99999) %}{% set ns.l = ns.l + [s[a:]] %}{% endfor %}",
    "an output in a loop": "{% for a in range(50000) %}{{ 'a' * 99999 }}{% endfor %}",
    "an output of control characters": "{{ '\\x00' * 7999999 }}",
    "an output of emoji": "{{ '🙂' * 7999999 }}",
    "an output of quotes": "{{ '\"' * 7999999 }}",
    "an output of newlines": "{{ '\\n' * 7999999 }}",
    "an output that is just too long": "{{ 'a' * 8000001 }}",
    "a macro that doubles": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='a' * 9999) %}"
    "{% for a in range(40) %}{% set ns.s = f(ns.s) %}{% endfor %}",
    "set blocks that double": "{% set s = 'a' * 9999 %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 40,
    "filter blocks that double": "{% filter replace('a', 'aa') %}" * 40 + "a" + "{% endfilter %}" * 40,
    # Filters
    "batch": "{{ messages | batch(100000000, 0) | list | length }}",
    "batch of references": "{{ range(99999) | batch(1) | map('batch', 99999, 'x' * 9999) | map('list') | list }}",
    "slice": "{{ messages | slice(999999999) | list | length }}",
    "slice filled": "{{ range(99999) | slice(99999, 'x' * 9999) | list | string | length }}",
    "center": "{{ 'a' | center(1000000000) | length }}",
    "center many": "{{ (['a'] * 99999) | map('center', 99999) | list | length }}",
    "replace": "{{ ('a' * 900000) | replace('a', 'b' * 900000) | length }}",
    "replace of nothing": "{{ ('a' * 900000) | replace('', 'b' * 9000) | length }}",
    "replace in a row": "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s | replace('a', 'aaaa') %}{% endfor %}",
    "format with a width": "{{ '%1000000000d' | format(1) | length }}",
    "format with an argument for the width": "{{ '%*d' | format(1000000000, 1) | length }}",
    "format with a precision": "{{ '%.1000000000f' | format(1.5) | length }}",
    "format of references": "{{ ('%s' * 9000) | format(*(['a' * 900000] * 9000)) | length }}",
    "indent": "{{ 'a\\nb' | indent(1000000000) | length }}",
    "indent of many lines": "{{ ('a\\n' * 900000) | indent('b' * 900000) | length }}",
    "wordwrap": "{{ ('a' * 900000) | wordwrap(1) | length }}",
    "wordwrap of words": "{{ ('a ' * 900000) | wordwrap(1, wrapstring='b' * 90000) | length }}",
    "wordwrap without breaks": "{{ ('a-' * 900000) | wordwrap(1, break_long_words=false) | length }}",
    "urlize": "{{ ('http://a.b ' * 900000) | urlize | length }}",
    "urlize of brackets": "{{ ('(' * 900000 + 'http://a.b' + ')' * 900000) | urlize | length }}",
    "urlize with a long rel": "{{ ('http://a.b ' * 90000) | urlize(rel='x' * 90000) | length }}",
    "urlize of mail": "{{ ('a' * 90000 + '@' * 90000) | urlize | length }}",
    "striptags": "{{ ('<' * 900000) | striptags | length }}",
    "striptags of comments": "{{ ('<!--' * 900000) | striptags | length }}",
    "tojson with an indent": "{{ ('x' * 9000) | list | tojson(indent=900000) | length }}",
    "tojson with a huge indent": "{{ [1] | tojson(indent=1000000000) | length }}",
    "tojson with separators": "{{ range(99999) | list | tojson(separators=('a' * 99999, 'b')) | length }}",
    "tojson of a deep list": "{% set ns = namespace(a=[]) %}{% for i in range(99999) %}"
    "{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a | tojson }}",
    "string of a deep list": "{% set ns = namespace(a=[]) %}{% for i in range(99999) %}"
    "{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
    "pprint of a deep list": "{% set ns = namespace(a=[]) %}{% for i in range(99999) %}"
    "{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a | pprint }}",
    "a comparison of deep lists": "{% set ns = namespace(a=[], b=[]) %}{% for i in range(99999) %}"
    "{% set ns.a = [ns.a] %}{% set ns.b = [ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "a hash of a deep tuple": "{% set ns = namespace(a=()) %}{% for i in range(99999) %}"
    "{% set ns.a = (ns.a,) %}{% endfor %}{{ {ns.a: 1} | length }}",
    "an error about a deep list": "{% set ns = namespace(a=[]) %}{% for i in range(99999) %}"
    "{% set ns.a = [ns.a] %}{% endfor %}{{ raise_exception(ns.a) }}",
    "pprint of a wide list": "{{ range(99999) | list | pprint | length }}",
    "pprint of long text": "{{ ('a b ' * 900000) | pprint | length }}",
    "groupby": "{{ ([{'a': 'b' * 99999}] * 99999) | groupby('a') | string | length }}",
    "groupby of nothing": "{{ range(99999) | groupby('a.b.c') | list | length }}",
    "groupby of a long path": "{{ range(999) | groupby('a.' * 99999) | list | length }}",
    "sort": "{{ ('a' * 9999999) | sort | length }}",
    "sort by long keys": "{{ ([{'a': 'B' * 99999}] * 9999) | sort(attribute='a,a,a,a') | length }}",
    "sort of references": "{{ (['B' * 900000] * 9000) | sort | length }}",
    "unique": "{{ (['B' * 900000] * 9000) | unique | list | length }}",
    "unique numbers": "{{ range(99999) | map('string') | unique(case_sensitive=true) | list | length }}",
    "dictsort": "{{ dict(a='B' * 9999999, b='B' * 9999999) | dictsort(by='value') | length }}",
    "map of upper": "{{ (['a' * 900000] * 9000) | map('upper') | list | length }}",
    "map of map": "{{ ([range(99999)] * 9999) | map('map', 'string') | map('list') | list | length }}",
    "map of attributes": "{{ range(99999) | map(attribute='a' * 99999, default='b') | list | length }}",
    "select": "{{ range(99999) | select('in', range(99999) | list) | list | length }}",
    "reject": "{{ ([['a' * 900000]] * 9000) | reject('eq', ['a' * 899999 + 'b']) | list | length }}",
    "a test of order": "{{ ('a' * 900000) is in(('a' * 450000 + 'b') * 99) }}",
    "join of an attribute": "{{ ([{'a': 'b' * 900000}] * 9000) | join(attribute='a') | length }}",
    "round": "{{ 1 | round(999999999, 'ceil') }}",
    "round of text": "{{ ('9' * 999999) | round }}",
    "filesizeformat": "{{ (10 ** 999) | filesizeformat }}",
    "xmlattr": "{{ dict(a='<' * 900000) | xmlattr | length }}",
    "xmlattr of many": "{% set ns = namespace(d={}) %}{% for i in range(9999) %}"
    "{% set ns.d = dict(ns.d, **{'a' ~ i: '<' * 9999}) %}{% endfor %}{{ ns.d | xmlattr | length }}",
    "escape": "{{ ('<' * 9999999) | escape | escape | escape | escape | length }}",
    "forceescape": "{{ ('&' * 9999999) | forceescape | length }}",
    "urlencode": "{{ ('é' * 9999999) | urlencode | length }}",
    "urlencode of pairs": "{{ ([['é' * 99999, 'é' * 99999]] * 9999) | urlencode | length }}",
    "wordcount": "{{ ('a ' * 9999999) | wordcount }}",
    "title": "{{ ('a ' * 9999999) | title | length }}",
    "truncate": "{{ ('a' * 9999999) | truncate(9999998, true, 'b' * 99999999) | length }}",
    "reverse": "{{ ([0] * 9999999) | reverse | list | reverse | list | length }}",
    "random": "{{ range(99999) | list | random }}",
    "lipsum": "{{ lipsum(999999999) | length }}",
    "lipsum of long paragraphs": "{{ lipsum(1, false, 99999998, 99999999) | length }}",
    "safe and repeated": "{{ (('<' * 9999) | safe * 99999999) | length }}",
    "markup of references": "{{ ('%s' * 9000) | safe | format(*(['<' * 900000] * 9000)) | length }}",
    # Methods and operators
    "translate": "{{ ('a' * 900000).translate({97: 'b' * 900000}) | length }}",
    "ljust": "{{ 'a'.ljust(1000000000) | length }}",
    "zfill": "{{ 'a'.zfill(1000000000) | length }}",
    "expandtabs": "{{ ('\\t' * 99999).expandtabs(99999) | length }}",
    "split": "{{ ('a,' * 9999999).split(',') | length }}",
    "splitlines": "{{ ('\\n' * 9999999).splitlines() | length }}",
    "partition": "{% set s = 'a' * 9999999 %}{% for a in range(99999) %}{{ s.rpartition('b') | length }}{% endfor %}",
    "count": "{% set s = 'ab' * 999999 %}{% for a in range(99999) %}{{ s.count('ba') }}{% endfor %}",
    "find": "{{ ('a' * 999999).find('a' * 499999 + 'b' + 'a' * 499999) }}",
    "join of letters": "{{ ('a' * 99999).join('b' * 99999) | length }}",
    "encode": "{{ ('a' * 9999999).encode('utf-32') | length }}",
    "encode as punycode": "{{ ('é' * 999999).encode('punycode') | length }}",
    "encode as idna": "{{ ('é' * 999999).encode('idna') | length }}",
    "decode of bombs": "{{ ('a' * 999999).encode().decode('unicode_escape') | length }}",
    "encode as bz2": "{{ 'a'.encode('bz2_codec') }}",
    "a width in %": "{{ ('%1000000000d' % 1) | length }}",
    "a width in format()": "{{ '{:1000000000}'.format(1) | length }}",
    "a width in an argument of format()": "{{ '{:{}}'.format(1, 1000000000) | length }}",
    "format() of references": "{{ ('{0}' * 9000).format('a' * 900000) | length }}",
    "format_map": "{{ ('{a}' * 9000).format_map({'a': 'a' * 900000}) | length }}",
    "nested fields of format()": "{{ ('{' * 9999 + '}' * 9999).format(1) }}",
    "a conversion of format()": "{{ '{0!r:>1000000000}'.format('a') | length }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "powers of a variable": "{% set n = messages | length + 8 %}{{ (n ** (n ** n)) | length }}",
    "powers of powers": "{{ (2 ** 99999) ** 99999 }}",
    "a negative power": "{{ 9 ** -(9 ** 99) }}",
    "pow": "{{ (9).__pow__(999999999) }}",
    "squares of squares": "{% set ns = namespace(n=10) %}"
    "{% for a in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "a huge remainder": "{% set a = 7 ** 99999 %}{% for i in range(99999) %}{{ a % (a // 3) }}{% endfor %}",
    "an integer of long text": "{{ ('9' * 9999999) | int }}",
    "an integer in base 2": "{{ ('1' * 9999999) | int(base=2) | string | length }}",
    "an integer in base 36": "{{ ('z' * 999999) | int(base=36) }}",
    "a float of long text": "{{ ('9' * 9999999) | float }}",
    "text of a huge integer": "{{ (10 ** 99999) | string | length }}",
    "a huge literal": "{{ " + "9" * 99999 + " }}",
    "a huge literal in another base": "{{ 0x" + "f" * 999999 + " | string | length }}",
    "infinity": "{{ 1e999 }} {{ -1e999 | int }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') | length }}",
    "dict of many": "{{ dict(range(99999) | map('string') | map('center', 2) | map('list')) | length }}",
    "dict.fromkeys": "{{ dict.fromkeys(range(99999), 'a' * 99999) | string | length }}",
    "namespaces in namespaces": "{% set ns = namespace() %}{% for i in range(99999) %}"
    "{% set ns.a = namespace(a=ns.a, b=range(99) | list) %}{% endfor %}{{ ns }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.ns = ns %}{{ ns }}{{ ns | tojson }}",
    "a namespace in its list": "{% set ns = namespace() %}{% set ns.l = [ns] %}{{ ns.l }}{{ ns.l | pprint }}",
    "a namespace with odd names": "{% set ns = namespace(__class__=1, __html__=2, __len__=3) %}"
    "{{ ns }}{{ ns | length }}",
    "cycler": "{{ cycler(*(['a' * 900000] * 9000)).items | join | length }}",
    "a cycler without end": "{% set c = cycler(1) %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{{ c.next() }}{% endfor %}{% endfor %}",
    "joiner": "{% set j = joiner('a' * 9999999) %}{% for a in range(99999) %}{{ j() }}{% endfor %}",
    "a long comparison": "{{ " + " < ".join(["1"] * 9999) + " }}",
    "in": "{% for a in range(99999) %}{{ 'b' in 'a' * 9999999 }}{% endfor %}",
    "arguments": "{% macro f() %}{{ varargs | length }}{% endmacro %}{{ f(*([0] * 99999999)) }}",
    "keyword arguments": "{% macro f() %}{{ kwargs | length }}{% endmacro %}{{ f(**dict.fromkeys('abc' * 999999)) }}",
    "strftime": "{{ strftime_now('%Y' * 9999999) | length }}",
    "strftime with a width": "{{ strftime_now('%999999999d') | length }}",
    "strftime of a null byte": "{{ strftime_now('%Y\\x00%d') }}",
    "strftime of a number": "{{ strftime_now(1) }}",
    "an exception with a huge message": "{{ raise_exception('a' * 99999999) }}",
    "an exception that is no text": "{{ raise_exception(messages) }}{{ raise_exception() }}",
    "an exception of an exception": "{{ raise_exception(raise_exception) }}",
    # Ways out
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a class by item": "{{ ''['__class__'] }}",
    "a class by attr": "{{ ''|attr('__cla' ~ 'ss__')|attr('__mro__') }}",
    "a class by map": "{{ messages|map(attribute='__class__')|list }}",
    "a class by groupby": "{{ messages|groupby('__class__') }}",
    "a class by sort": "{{ messages|sort(attribute='__class__') }}",
    "a class by sum": "{{ messages|sum('__class__') }}",
    "a class by format()": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "a class by format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "a class by a kept format": "{% set f = ['{0.__class__}'.format] %}{{ f[0](1) }}",
    "a class by map of format": "{{ ['{0.__class__}']|map('attr', 'format')|list }}",
    "a class by safe format": "{{ ('{0.__class__}'|safe).format(1) }}",
    "a class by safe %": "{{ ('%(__class__)s'|safe) % messages[0] }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of lipsum": "{{ lipsum.__globals__.os.popen('id').read() }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "a frame": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "the environment": "{{ self._TemplateReference__context.environment }}{{ self.environment }}",
    "a change to the messages": "{{ messages.append(messages) }}{{ messages }}",
    "a change by update": "{{ messages[0].update(content=messages) }}",
    "include": "{% include '/etc/passwd' %}",
    "include of itself": "{% include self %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "extends": "{% extends '/etc/passwd' %}",
    "extends itself": "{% extends self %}",
    "extends text": "{% extends messages[0].content %}",
    "an unknown extension": "{% do messages.append(1) %}{% debug %}{% trans %}a{% endtrans %}",
    # Sources
    "an empty source": "",
    "null bytes": "\x00{{ '\x00' }}{{ \x00 }}",
    "control characters": "".join(map(chr, range(32))) + "{{ messages }}" + "\x7f\x9b\u2028\u202e",
    "surrogates": "\ud800{{ '\udfff' }}",
    "surrogates in pairs": "\ud83d\ude42{{ '\ud83d' ~ '\ude42' }}",
    "bytes that are no UTF-8": b"\xff\xfe{{ messages }}\x80".decode(errors="surrogateescape"),
    "a megabyte of text": "a" * 1_000_000,
    "a megabyte of expressions": "{{ 1 }}" * 150_000,
    "a megabyte of variables": "".join(f"{{{{ a{i} }}}}" for i in range(99_999)),
    "a megabyte of sets": "{% set a = 1 %}" * 70_000,
    "a megabyte of macros": "{% macro f() %}{% endmacro %}" * 35_000,
    "a megabyte of blocks": "".join(f"{{% block a{i} %}}{{% endblock %}}" for i in range(30_000)),
    "a megabyte of additions": "{{ " + "1+" * 500_000 + "1 }}",
    "a megabyte of concatenations": "{{ " + "a~" * 500_000 + "a }}",
    "a megabyte of attributes": "{{ a" + ".a" * 500_000 + " }}",
    "a megabyte of filters": "{{ a" + "|a" * 500_000 + " }}",
    "a megabyte of known filters": "{{ 'a'" + "|list" * 200_000 + " }}",
    "a megabyte of items": "{{ [" + "1," * 500_000 + "] }}",
    "a megabyte of arguments": "{{ f(" + "1," * 500_000 + ") }}",
    "a megabyte of comments": "{#" + "a" * 1_000_000 + "#}",
    "a megabyte of open comments": "{#" * 500_000,
    "a megabyte of open braces": "{{" * 500_000,
    "a megabyte of minus signs": "{{ " + "-" * 1_000_000 + "1 }}",
    "a megabyte of nots": "{{ " + "not " * 250_000 + "1 }}",
    "a megabyte of spaces": "{{ " + " " * 1_000_000,
    "a megabyte of lines": "\n" * 1_000_000 + "{{ nothing.at_all }}",
    "a megabyte of quotes": "{{ '" + "\\'" * 500_000 + " }}",
    "a megabyte of one name": "{{ " + "a" * 1_000_000 + ".b.c }}",
    "a megabyte in an unknown tag": "{% " + "a" * 1_000_000 + " %}",
    "deep parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "deep brackets": "{{ " + "[" * 100_000 + "1" + "]" * 100_000 + " }}",
    "deep braces": "{{ " + "{1:" * 100_000 + "1" + "}" * 100_000 + " }}",
    "deep loops": "{% for a in messages %}" * 10_000 + "{% endfor %}" * 10_000,
    "deep conditions": "{% if messages %}" * 10_000 + "{% endif %}" * 10_000,
    "many elifs": "{% if a %}" + "{% elif a %}" * 50_000 + "{% endif %}",
    "deep conditional expressions": "{{ " + "1 if a else " * 50_000 + "1 }}",
    "loops just deep enough": "{% for a in range(9) %}" * 19 + "{{ 'a' * 999 }}" + "{% endfor %}" * 19,
    "raw without an end": "{% raw %}" * 99_999,
    "an unfinished tag": "{% for",
    "a broken string": "{{ 'a }}",
}


ENVIRONMENT = create_environment()
FILTERS, TESTS = sorted(ENVIRONMENT.filters), sorted(ENVIRONMENT.tests)
METHODS = sorted({name for kind in (str, list, dict, int) for name in dir(kind) if not name.startswith("_")})
OPERATORS = ("+", "-", "*", "//", "%", "**", "~", "==", "<", "in", "and")
VALUES = ("text", "items", "table", "number", "range(number)", "messages", "'%s{}'", "','", "1", "-1", "true")
BODIES = (
    "{{ EXPRESSION }}",
    "{% for text in OTHER %}{{ EXPRESSION }}{% endfor %}",
    "{% macro f(text) %}{{ EXPRESSION }}{% endmacro %}{{ f(OTHER) }}",
    "{% set n = namespace(x=text) %}{% for text in [n.x] * number %}{% set n.x = EXPRESSION %}{% endfor %}{{ n.x }}",
    "{% filter FILTER %}{{ EXPRESSION }}{% endfilter %}",
)
SMALL = "{% set text, items, table, number = 'a <b>', ['x', 'Y'], {'a': 'b', 97: 'c'}, 3 %}"
LARGE = """{% set number = 9998 + messages | length %}{% set text = 'ab <b> http://a.b ' * number %}
{% set items, table = ['x' * 999, 'Y' * 999] * number, {'a': text, 97: 'c' * number} %}"""


def random_expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(VALUES)
    left = random_expression(rng, depth - 1)
    arguments = ", ".join(random_expression(rng, rng.randrange(depth)) for _ in range(rng.choice([0, 0, 1, 2])))
    expression = rng.choice(
        [
            f"{left} | {rng.choice(FILTERS)}({arguments})",
            f"{left} | {rng.choice(FILTERS)}({arguments}) | list",
            f"{left} | map('{rng.choice(FILTERS)}') | list",
            f"{left}.{rng.choice(METHODS)}({arguments})",
            f"{left} {rng.choice(OPERATORS)} {random_expression(rng, depth - 1)}",
            f"{left}[{rng.choice(['0', '-1', '1:', '::-1'])}]",
            f"{left} is {rng.choice(TESTS)}({arguments})",
            f"[{left}, {left}]",
        ]
    )
    return f"({expression})"


def random_body(rng: random.Random) -> str:
    body = rng.choice(BODIES).replace("FILTER", rng.choice(FILTERS))
    body = body.replace("OTHER", random_expression(rng, 2))
    return body.replace("EXPRESSION", random_expression(rng, rng.randint(1, 4)))


def random_attack(renderer: TemplateRenderer, seed: int) -> str:
    """A template that renders with small values, and has large ones."""
    rng = random.Random(seed)
    while True:
        body = random_body(rng)
        with contextlib.suppress(ValueError):
            render(renderer, SMALL + body)
            return LARGE + body


LEAKS = ("<class", "<module", "<code", "<frame", "<_io", "__builtins__", "root:")


def outcome_of_attack(renderer: TemplateRenderer, source: str) -> str:
    """What became of a template: text or a clean error, and then the next template is rendered as ever."""
    try:
        text, outcome = render(renderer, source), "rendered"
    except ValueError as error:
        text = str(error)
        assert len(text) < 600
        text.encode()
        reason = re.match(
            "the chat template failed: (it [a-z]+ more than|its process ended with status -?[0-9]+)?", text
        )
        outcome = reason[1] or "another error"
    assert not any(leak in text for leak in LEAKS)
    assert render(renderer, GREETING) == "Hello <s>"
    return outcome


def peak_memory() -> int:
    """Bytes this process has held at most since `forget_peak_memory`."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def forget_peak_memory() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@LINUX
@pytest.mark.skipif(not ATTACK_COUNT, reason="takes minutes: set NANOPAGE_ATTACKS")
def test_attacks_render_or_fail_cleanly_and_take_little_of_this_process(renderer, monkeypatch):
    renderer.process.limits.cpu_seconds = 0.5  # for speed
    forget_peak_memory()
    before = peak_memory()
    sources = ATTACKS | {f"random {seed}": random_attack(renderer, seed) for seed in range(ATTACK_COUNT)}
    outcomes = collections.Counter()
    for name, source in sources.items():
        try:
            outcomes[outcome_of_attack(renderer, source)] += 1
        except AssertionError as error:
            raise AssertionError(f"{name}: {source[:500]}") from error
    print(
        f"\n{json.dumps(outcomes, indent=4)}\nThis process took {(peak_memory() - before) >> 20} MiB more at its peak."
    )
    assert peak_memory() - before < 400 << 20
