"""The chat page: what it is made of, and what it does in a browser."""

import json
import re
import time
from pathlib import Path
from random import Random

import pytest
from server_process import serving

import nanopage.server
import nanopage.view

PAGE = Path(nanopage.server.__file__).with_name("page.html").read_text()
VIEW = Path(nanopage.view.__file__).with_name("view.html").read_text()
NAME = "\u202e<img src=x onerror='window.hurt=1'>" + "W" * 400
HOSTILE = "<script>window.hurt = 1</script> <img src=x onerror='window.hurt = 1'> & &lt;b&gt; "

# Replaces fetch: calls of the chat endpoint get `replies`. One that does not end is silent after its last part.
FAKE = """
window.asked = [];
window.realFetch ??= window.fetch;
window.fetch = async (path, { body, signal }) => {
  if (!path.endsWith("completions")) return window.realFetch(path, { signal });
  asked.push(JSON.parse(body));
  const reply = replies.shift();
  if (reply === undefined) throw new TypeError("no network");
  const parts = reply.parts.map((part) => Uint8Array.from(part));
  const stream = new ReadableStream({
    start(controller) { signal.addEventListener("abort", () => controller.error(signal.reason)); },
    async pull(controller) {
      await null;
      if (parts.length) controller.enqueue(parts.shift());
      else if (reply.ends) controller.close();
      else await new Promise(() => {});
    },
  });
  return new Response(stream, { status: reply.status, headers: reply.headers });
};
"""


# Without a browser


@pytest.mark.parametrize("text", [PAGE, VIEW], ids=["chat", "view"])
def test_the_page_loads_nothing_and_makes_no_html_of_text(text):
    for pattern in (
        r"\bsrc\s*=",
        r"href\s*=\s*[\"']?\s*(https?:|//)",
        r"@import|\burl\(|\bimport\b",
        r"<(link(?! rel=\"icon\" href=\"data:)|iframe|object|embed|base)\b",
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|createContextualFragment",
        r"\beval\b|\bFunction\(|setTimeout\(\s*[\"'`]|localStorage|document\.cookie",
        r"\bon\w+\s*=\s*[\"']",  # handlers in HTML
        r"(call|fetch)\([\"'`]/",  # URLs that a proxy's prefix would break
    ):
        assert not re.search(pattern, text), pattern


def test_the_page_is_served_without_a_key(server):
    reply = server.request("GET", "/", key=None)
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.body.decode() == PAGE
    assert_policy(reply.headers)
    assert server.request("GET", "/v1/models", key=None).status == 401


def assert_policy(headers):
    """No script runs but the page's own, nothing is loaded from elsewhere, and no other site embeds the page."""
    rules = dict(rule.split(maxsplit=1) for rule in headers["content-security-policy"].split(";"))
    assert rules["img-src"] == "data:" and "unsafe-inline" not in rules["script-src"]
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert rules[name] == "'none'"
    assert re.fullmatch(r"'sha256-\S+'", rules["script-src"]) and rules["connect-src"] == "'self'"


# In a browser


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """A server with room for long answers."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--dtype", "float32", "--api-key", "secret", "--served-model-name", NAME, "--max-model-len", 1024)
    with serving(model, *options, log=log) as server:
        server.url = server.wait_until_ready()
        yield server


@pytest.fixture
def page(browser, server):
    """The browser with the page, after the key has been entered."""
    browser.open(server.url.removesuffix("v1"))
    browser.wait_for("settings.open && document.activeElement === fields.key")
    browser.type("secret")
    browser.press("Enter")
    browser.wait_for("!settings.open && model !== undefined && document.activeElement === input")
    browser.evaluate("fields.temperature.value = 0")
    browser.problems[:] = [problem for problem in browser.problems if "401" not in problem]  # of the first /v1/models
    assert browser.evaluate("[model, $('model').textContent, $('model').childElementCount]") == [NAME, NAME, 0]
    yield browser
    assert browser.problems == []
    assert not browser.evaluate("window.hurt")


def send(page, text):
    page.type(text)
    page.press("Enter")


def answered(page, num_turns=1):
    page.wait_for(f"!running && messages.length === {2 * num_turns}")
    return page.evaluate("messages.at(-1).content")


def complete(server, messages, **fields):
    """The answer of the API."""
    body = {"messages": messages, "temperature": 0, **fields}
    return server.request("POST", "/v1/chat/completions", body).json["choices"][0]["message"]["content"]


def events(*texts, reasoning=(), done=True, size=0):
    """A fake reply that streams reasoning and these texts.

    Args:
        size: bytes that arrive together. 0: an event at a time.
    """
    deltas = [*({"reasoning": text} for text in reasoning), *({"content": text} for text in texts)]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if done:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"choices": [], "usage": {"completion_tokens": len(texts)}})
    parts = [b": keep-alive\n\n", *(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode() for chunk in chunks)]
    parts += [b"data: [DONE]\n\n"] if done else []
    whole = b"".join(parts)
    return reply([whole[i : i + size] for i in range(0, len(whole), size)] if size else parts)


def reply(parts, status=200, ends=False, **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"parts": [list(part) for part in parts], "status": status, "ends": ends, "headers": names}


def error(status, message, code=None, **headers):
    body = json.dumps({"error": {"message": message, "code": code}}).encode()
    return reply([body], status, True, **headers)


def fake(page, *replies):
    page.evaluate(f"window.replies = {json.dumps(replies)};" + FAKE)


def test_a_conversation_gets_the_answers_of_the_api(page, server):
    page.evaluate("fields.max_tokens.value = 30; fields.system.value = 'the dog'")
    messages = [{"role": "system", "content": "the dog"}]
    for turn, text in enumerate(("Hello there", "<b>the cat</b>"), 1):
        send(page, text)
        messages.append({"role": "user", "content": text})
        expected = complete(server, messages, max_tokens=30)
        assert answered(page, turn) == expected
        messages.append({"role": "assistant", "content": expected})
    assert page.evaluate("[...document.querySelectorAll('.user')].map((node) => node.textContent)") == [
        "Hello there",
        "<b>the cat</b>",
    ]
    shown = page.evaluate("log.lastChild.firstChild.innerText")
    assert shown.split()[:3] == expected.split()[:3]
    assert re.match(
        r"30 tokens · ([\d.]+ tokens/s · )?first after .* s · cut off at the limit",
        page.evaluate("log.lastChild.lastChild.innerText"),
    )
    summary = "summary({ completion_tokens: 3 }, 'length', 0.1, %s)"
    assert page.evaluate(summary % 0.5) == "3 tokens · 4.0 tokens/s · first after 0.10 s · cut off at the limit"
    assert page.evaluate(summary % 0) == "3 tokens · first after 0.10 s · cut off at the limit"  # all in one piece

    retry = "log.lastChild.querySelector('.retry').click(), [messages.length, log.children.length]"
    assert page.evaluate(retry) == [2, 4]
    assert answered(page, 2) == expected
    page.evaluate("$('new').click()")
    assert page.evaluate("[messages.length, log.children.length, document.activeElement === input]") == [0, 0, True]


def test_escape_stops_an_answer_here_and_on_the_server(page, server):
    page.evaluate("""(() => {
      const fetch = window.fetch, endless = (body) => JSON.stringify({ ...JSON.parse(body), ignore_eos: true });
      window.fetch = (path, { body, ...rest }) => fetch(path, { ...rest, body: body && endless(body) });
    })()""")
    send(page, "Hello there")
    page.wait_for("log.lastChild.innerText.length > 20")
    page.press("Escape")
    text = answered(page)
    assert page.evaluate("log.lastChild.lastChild.firstChild.data") == "stopped"
    whole = complete(server, [{"role": "user", "content": "Hello there"}], max_tokens=300, ignore_eos=True)
    assert whole.startswith(text) or text.startswith(whole)  # the latter where it took long to press Escape
    deadline = time.monotonic() + 60
    while not re.search(rb"vllm:num_requests_running\S* 0.0", server.request("GET", "/metrics").body):
        assert time.monotonic() < deadline


def test_shift_enter_breaks_the_line_and_enter_waits_for_the_answer(page):
    fake(page, events("a", done=False), events("b"))
    page.type("one")
    page.press("Enter", shift=True)
    send(page, "two")
    page.wait_for("log.lastChild?.innerText === 'a'")
    assert page.evaluate("[asked[0].messages, $('send').textContent]") == [
        [{"role": "user", "content": "one\ntwo"}],
        "Stop",
    ]
    send(page, "three")
    assert page.evaluate("[asked.length, input.value]") == [1, "three"]
    page.evaluate("$('send').click()")
    assert answered(page) == "a"
    page.press("Enter")
    assert answered(page, 2) == "b"


@pytest.mark.parametrize("size", [0, 1, 7, 1 << 20])
def test_hostile_text_is_shown_as_text_wherever_the_stream_is_cut(page, size):
    texts = [HOSTILE, "é😀 [x](javascript:window.hurt=1) ", "![i](https://example.com/i.png) ", "`", HOSTILE, "`"]
    texts[1] += "<svg/onload=window.hurt=1> [d](data:text/html,<script>window.hurt=1</script>) \u202e\0\u2028"
    fake(page, events(*texts, size=size))
    send(page, HOSTILE)
    assert answered(page) == "".join(texts)
    assert page.evaluate("log.firstChild.textContent") == HOSTILE
    assert page.evaluate("log.lastChild.firstChild.textContent").startswith(HOSTILE + texts[1] + "i ")
    assert page.evaluate("log.querySelector('code').textContent").strip() == HOSTILE.strip()
    assert page.evaluate("[...log.querySelectorAll('script, img, b, svg')].length") == 0
    assert page.evaluate("[...log.querySelectorAll('a')].map((a) => a.href)") == ["https://example.com/i.png"]


def test_a_reload_keeps_the_conversation_and_the_question_without_an_answer(page):
    fake(page, events("**first** answer"), events("half", done=False))
    send(page, "one")
    answered(page)
    send(page, "two")
    page.wait_for("log.lastChild.innerText === 'half'")
    page.reload()
    page.wait_for("model !== undefined")
    assert page.evaluate("[...log.children].map((node) => node.innerText)") == ["one", "first answer\n\nCopy\nRetry"]
    assert page.evaluate("[log.querySelectorAll('strong').length, input.value]") == [1, "two"]
    fake(page, events("second"))
    page.press("Enter")
    assert answered(page, 2) == "second"
    turns = [("user", "one"), ("assistant", "**first** answer"), ("user", "two")]
    assert page.evaluate("asked[0].messages") == [{"role": role, "content": content} for role, content in turns]
    page.evaluate("$('new').click()")
    page.reload()
    page.wait_for("model !== undefined")
    assert page.evaluate("[messages.length, log.children.length, input.value]") == [0, 0, ""]


def test_reasoning_is_folded_above_the_answer(page):
    fake(page, events("4", reasoning=["2 + 2, ", "<b>so</b>"]))
    send(page, "What is 2 + 2?")
    assert answered(page) == "4"
    parts = page.evaluate("[...log.lastChild.children].map((node) => `${node.tagName} ${node.textContent}`)")
    assert parts == ["DETAILS Reasoning2 + 2, <b>so</b>", "DIV 4", "DIV 1 tokenCopyRetry"]
    assert not page.evaluate("log.lastChild.firstChild.open")


def test_whole_answers_are_copied_as_the_model_wrote_them(page):
    fake(page, events("**one**\n\n- item\n"), events("two"))
    page.evaluate("window.copied = []; navigator.clipboard.writeText = async (text) => void copied.push(text)")
    for turn, text in enumerate(("a", "b"), 1):
        send(page, text)
        answered(page, turn)
    buttons = "[...log.querySelectorAll('.meta button')].filter((node) => node.offsetHeight)"
    assert page.evaluate(f"{buttons}.map((node) => node.textContent)") == ["Copy", "Copy", "Retry"]
    page.evaluate(f"{buttons}.slice(0, 2).forEach((node) => node.click())")
    page.wait_for("copied.length === 2")
    assert page.evaluate("copied") == ["**one**\n\n- item\n", "two"]


def test_settings_and_the_model_are_chosen_in_the_dialog(page):
    cards = [{"id": "a", "default_sampling_params": {"temperature": 0.3, "top_k": 7}}, {"id": NAME}]
    page.evaluate(f"""(() => {{
      const fetch = window.fetch, cards = {json.dumps({"data": cards})};
      window.fetch = async (path, options) => path === "v1/models" ? Response.json(cards) : fetch(path, options);
    }})()""")
    page.evaluate("connect()")
    page.wait_for("models.length === 2")
    assert page.evaluate("[model, fields.model.options.length]") == [NAME, 2]  # the model that was chosen before
    page.evaluate("openSettings(); fields.model.value = 'a'; fields.top_p.value = 0.5; fields.temperature.value = ''")
    page.evaluate("fields.seed.value = -3; $('fields').requestSubmit()")
    page.wait_for("!settings.open && model === 'a'")
    placeholders = page.evaluate("[fields.temperature, fields.top_k, fields.min_p].map((field) => field.placeholder)")
    assert placeholders == ["default: 0.3", "default: 7", "default"]
    assert page.evaluate("[document.title, $('model').textContent]") == ["a - nanopage", "a"]
    page.evaluate("window.realFetch = undefined")
    fake(page, events("x"))
    send(page, "Hello")
    answered(page)
    asked = page.evaluate("asked[0]")
    assert {name: asked[name] for name in asked if name not in ("messages", "stream", "stream_options")} == {
        "model": "a",
        "top_p": 0.5,
        "seed": -3,
    }


def test_the_policy_allows_the_icon(page):
    width = page.evaluate("""new Promise((resolve) => {
      const image = new Image();
      image.onload = image.onerror = () => resolve(image.naturalWidth);
      image.src = document.querySelector("link[rel=icon]").href;
    })""")
    assert width > 0


MARKDOWN = r"""# A *title*
Text **bold**, __bold__ and ***both***, _em_, ~~del~~, `a * b`, ``a ` b``, 2 * 3 * 4, snake_case_name, \*no\*.
Its second line: https://example.com/a_b, [a link](https://example.com/x_(y)).

1. one
   - inner
     - deepest
   - [ ] **bold
2. two
   ```python
   def f():
       return "**"
   ```

   more of two
2024. A year
* other

> quoted
> - list

a | b
--|--
`x` | <i>
text | c \| d

***
~~~
# no title
```
~~~
last

```c
open **code"""


PIECES = "\n¦\n¦\n\n¦a¦b c¦  ¦    ¦\t¦- ¦* ¦1. ¦2) ¦> ¦# ¦```¦~~~¦`¦*¦**¦_¦~~¦|¦--|--¦---¦|a|b|\n¦[x](¦http://a.b¦[¦]¦)¦\\¦\r\n"


def test_markdown(page):
    html = page.evaluate(f"element('div', {{}}, ...nodes(parse({json.dumps(MARKDOWN)}.split('\\n')))).innerHTML")
    html = re.sub(r' title="[^"]*" target="_blank" rel="noopener noreferrer"| tabindex="0"', "", html)
    html = re.sub(r'<div class="code"><div><span>(\w*)</span><button type="button">Copy</button></div>', r"<\1>", html)
    html = re.sub(r"<tbody>|</tbody>", "", html)
    assert html == (
        "<h1>A <em>title</em></h1>"
        "<p>Text <strong>bold</strong>, <strong>bold</strong> and <strong><em>both</em></strong>, <em>em</em>, "
        "<del>del</del>, <code>a * b</code>, <code>a ` b</code>, 2 * 3 * 4, snake_case_name, *no*.\n"
        'Its second line: <a href="https://example.com/a_b">https://example.com/a_b</a>, '
        '<a href="https://example.com/x_(y)">a link</a>.</p>'
        '<ol start="1"><li><p>one</p><ul><li><p>inner</p><ul><li><p>deepest</p></li></ul></li>'
        "<li><p>[ ] **bold</p></li></ul></li>"
        '<li><p>two</p><python><pre><code>def f():\n    return "**"</code></pre></div><p>more of two</p></li>'
        "<li><p>A year</p></li></ol><ul><li><p>other</p></li></ul>"
        "<blockquote><p>quoted</p><ul><li><p>list</p></li></ul></blockquote>"
        '<div class="table"><table><tr><th>a</th><th>b</th></tr><tr><td><code>x</code></td><td>&lt;i&gt;</td></tr>'
        "<tr><td>text</td><td>c | d</td></tr></table></div><hr>"
        "<><pre><code># no title\n```</code></pre></div><p>last</p><c><pre><code>open **code</code></pre></div>"
    )


def test_a_growing_text_ends_as_it_does_when_it_is_painted_at_once(page):
    random = Random(0)
    texts = [list(MARKDOWN), *(random.choices(PIECES.split("¦"), k=random.randrange(3, 40)) for _ in range(500))]
    different = page.evaluate(f"""{json.dumps(texts)}.filter((pieces) => {{
      const grown = new Answer(element("div")), whole = new Answer(element("div"));
      for (const piece of pieces) {{ grown.text += piece; grown.paint(true); }}
      whole.text = grown.text;
      grown.paint(false);
      whole.paint(false);
      return grown.node.innerHTML !== whole.node.innerHTML;
    }})""")
    assert different == []


def test_what_has_not_ended_is_shown_as_if_it_had(page):
    closed = {
        "a **b": "a <strong>b</strong>",
        "a **": "a ",
        "a **b c*": "a <strong>b c</strong>",
        "a **b c** `d": "a <strong>b c</strong> <code>d</code>",
        "2 ** 3": "2 ** 3",
        "see [this](https://exa": "see this",
        "- a `b": None,
        "```\na **b": None,
    }
    for text, expected in closed.items():
        page.evaluate(f"answer = new Answer(element('div')); answer.text = {json.dumps(text)}; answer.paint(true)")
        html = page.evaluate("answer.node.innerHTML")
        assert html == f"<p>{expected}</p>" if expected else "<code>" in html and "<strong>" not in html


def test_a_long_answer_is_painted_whole(page):
    """16,000 characters of ordinary text, and of what models in a loop say."""
    texts = ["word ", "- item\n", "```\ncode ", "*", "`", "> ", "- ", "[", "[a](", "a\n\n", "| a ", "_a", "http://"]
    texts.append("` ")
    lengths = page.evaluate(f"""{json.dumps(texts)}.map((text) => {{
      const answer = new Answer(element("div"));
      log.replaceChildren(answer.node);
      answer.text = text.repeat(16000 / text.length);
      answer.paint(true);
      return answer.node.textContent.replace(/\\s/g, "").length;
    }})""")
    assert lengths[0] == 16000 * 4 // 5 and len(lengths) == len(texts)


@pytest.mark.parametrize(
    "text",
    [
        "'~'.repeat(N) + '`'",
        "'# ' + ' '.repeat(N) + '\\u2028'",
        "'|\\n' + ' '.repeat(N) + 'x'",
        "'**a' + ' '.repeat(N) + 'x'",
        "'[a](x'.repeat(N / 5) + ' '",
        "'` '.repeat(N / 2)",
        "'|'.repeat(3000) + '\\n' + '|--'.repeat(3000) + '|\\n' + '|\\n'.repeat(9000)",
        "'x\\n'.repeat(N)",
        "'-\\n1.\\n'.repeat(N / 5)",
    ],
)
def test_a_text_made_to_take_long_is_painted(page, text):
    """Backtracking, layout in quadratic time or rows times columns would hang the browser."""
    page.evaluate(f"""(() => {{
      const N = 200000, answer = new Answer(element("div"));
      log.replaceChildren(answer.node);
      answer.text = {text};
      answer.paint(true);
      answer.paint(false);
    }})()""")
    assert page.evaluate("log.scrollHeight > 0 && log.querySelectorAll('*').length < 100000")
    page.evaluate("$('new').click()")


def test_the_view_follows_only_from_the_end(page):
    fake(page, events("line\n\n" * 200, "more " * 200, done=False))
    send(page, "Hello")
    page.wait_for("log.lastChild.innerText.includes('more')")
    assert page.evaluate("log.scrollHeight - log.scrollTop - log.clientHeight < 5 && log.scrollTop > 0")
    page.evaluate("log.scrollTop = 100")
    page.press("Escape")
    answered(page)
    assert page.evaluate("log.scrollTop") == 100


def test_it_fits_a_narrow_screen(page):
    wide = "```\n" + "x = 1; " * 50 + "\n```\n\n" + "a" * 200 + "\n\n" + "| column " * 30 + "\n" + "|--" * 30 + "|\n"
    fake(page, events(MARKDOWN, "\n```\n", wide))
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
    send(page, "Hello " + "a" * 200)
    answered(page)
    overhang = "(node) => node.scrollWidth - node.clientWidth"
    assert page.evaluate(f"[document.documentElement, document.body, log].map({overhang})") == [0, 0, 0]
    assert page.evaluate("[innerWidth, $('send').getBoundingClientRect().right <= 360]") == [360, True]
    for message in ("w" * 5000, "line\n" * 10000):
        fake(page, error(400, message))
        page.evaluate(f"input.value = {json.dumps(message)}; $('composer').requestSubmit()")
        page.wait_for("!running && !$('notice').hidden")
        assert page.evaluate(f"[document.documentElement, document.body, log].map({overhang})") == [0, 0, 0]
        boxes = "[input, $('send'), $('open')].map((node) => node.getBoundingClientRect())"
        assert page.evaluate(f"{boxes}.every((box) => box.top >= 0 && box.bottom <= innerHeight && box.right <= 360)")
        page.evaluate("input.value = ''")
    page.call("Emulation.clearDeviceMetricsOverride")


def test_errors_are_told_in_plain_words(page):
    refused = (
        (error(429, "8 requests wait", retry_after="7"), "The server is busy. Try again in 7 s."),
        (error(400, "temperature is 9", "bad"), "The server could not answer: temperature is 9"),
        (reply([b"<html>Bad gateway"], 502, ends=True), "The server could not answer: status 502"),
        (None, "The server cannot be reached. Is it running?"),
    )
    for answer, notice in refused:
        fake(page, *([answer] if answer else []))
        send(page, "Hello")
        page.wait_for("!running && !$('notice').hidden")
        assert page.evaluate("[$('notice').textContent, input.value, log.children.length]") == [notice, "Hello", 0]
        page.evaluate("input.value = ''")
    broken = b'data: {"error": {"message": "out of luck", "code": "request_failed"}}\n\ndata: [DONE]\n\n'
    for end, notice in (
        (broken, "The server could not finish: out of luck"),
        (b"data: {", "The server ended the connection in the middle of the answer."),
    ):
        page.evaluate("$('new').click()")
        parts = [b'data: {"choices": [{"delta": {"content": "half"}}]}\r\n\r\n', end]
        fake(page, reply(parts, ends=True))
        send(page, "Hello")
        assert answered(page) == "half"
        assert page.evaluate("[$('notice').textContent, log.lastChild.innerText]") == [
            notice,
            "half\n\nincomplete\nCopy\nRetry",
        ]


def test_a_message_waits_for_a_model_that_is_loading(page):
    fake(page, error(503, "the model is loading", "loading", retry_after="5"), events("here"))
    send(page, "Hello")
    page.wait_for("$('notice').textContent.startsWith('The model is loading')")
    assert answered(page) == "here"
    assert page.evaluate("[asked.length, $('notice').hidden]") == [2, True]


def test_a_wrong_key_is_asked_for_again(page):
    page.evaluate("openSettings(); fields.key.value = 'wrong'; $('fields').requestSubmit()")
    page.wait_for("settings.open && $('reason').textContent === 'The server does not accept this API key.'")
    page.press("Escape")
    page.wait_for("!settings.open")
    send(page, "Hello")
    page.wait_for("settings.open && !running")
    page.problems.clear()
    page.evaluate("fields.key.value = 'secret'; $('fields').requestSubmit()")
    page.wait_for("!settings.open && $('notice').hidden")
    assert page.evaluate("[input.value, log.children.length, sessionStorage.getItem('key')]") == ["Hello", 0, "secret"]
