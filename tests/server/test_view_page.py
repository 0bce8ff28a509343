"""The page of the live view: what it is made of, and what it does in a browser."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_process import serving
from test_page import HOSTILE, NAME, assert_policy
from test_page import PAGE as CHAT
from test_page import VIEW as PAGE

from nanopage.view import export
from nanopage.view.picture import Picture, read_recording


def test_both_pages_have_the_same_icon():
    assert re.search("<link.*", PAGE)[0] == re.search("<link.*", CHAT)[0]


def test_the_page_offers_the_recordings_that_there_are():
    offered = set(re.findall(r'<option value="([\w-]+)">replay', PAGE)) - {"file"}
    assert offered == export.shipped_recordings().keys()


# In a browser


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--dtype", "float32", "--api-key", "secret", "--view", "--served-model-name", NAME)
    blocks = ("--num-gpu-blocks-override", 16, "--block-size", 8, "--preemption-mode", "swap")
    with serving(model, *options, *blocks, log=log) as server:
        server.wait_until_ready()
        yield server


def test_the_page_is_served_with_a_policy(server):
    reply = server.request("GET", "/view", key=None)
    assert reply.body.decode() == PAGE
    assert_policy(reply.headers)


def complete(server, name, max_tokens=30):
    body = {"prompt": [10, 11, 12], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "cache_salt": name}
    return server.request("POST", "/v1/completions", body).json


@pytest.fixture
def page(browser, server):
    """The browser with the page, connected with the key."""
    browser.open(server.url.removesuffix("v1") + "view")
    browser.wait_for("$('settings').open && document.activeElement === $('key')")
    browser.type("secret")
    browser.press("Enter")
    browser.wait_for("!$('settings').open && picture.key && $('mode').textContent === 'live'")
    browser.problems[:] = [problem for problem in browser.problems if "401" not in problem]
    assert browser.evaluate("picture.key.model") == NAME
    yield browser
    assert browser.problems == []
    assert not browser.evaluate("window.hurt")


def test_it_follows_the_engine_and_replays_what_it_has_seen(page, server):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda name: complete(server, str(name)), range(6)))
    page.wait_for("picture.frame.frame === 'step' && picture.queues.flat().length === 0 && picture.outputs === 180")
    assert page.evaluate("[picture.missed, picture.preempted > 0, picture.tables.size, picture.requests.size]") == [
        0,
        True,
        0,
        0,
    ]
    page.evaluate("window.before = [picture.step, picture.outputs, [...picture.cached].sort()]")
    page.evaluate("window.saved = kept.map((frame) => JSON.stringify(frame)).join('\\n')")
    page.evaluate("open(new File([saved], 'run.jsonl'))")
    page.wait_for("source === 'replay' && frames.length > 30")
    page.evaluate("setPlaying(false); seek(frames.length - 1)")
    assert page.evaluate("[picture.step, picture.outputs, [...picture.cached].sort()]") == page.evaluate("before")
    page.evaluate("choose('')")
    page.wait_for("$('mode').textContent === 'live'")


def test_steps_by_the_keyboard_are_told_before_they_run(page, server):
    page.evaluate("document.activeElement.blur()")
    page.press("p")
    page.wait_for("$('mode').textContent === 'paused'")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, server, "steps", 3)
        for _ in range(3):
            page.wait_for("$('why-title').textContent === 'About to happen'")
            before = page.evaluate("picture.step")
            assert not answer.done()
            assert "The step runs" in page.evaluate("$('sentences').innerText")
            page.press(" ")
            page.wait_for(f"picture.step === {before + 1}")
        assert answer.result(timeout=30)["usage"]["completion_tokens"] == 3
    page.press("p")
    page.wait_for("$('mode').textContent === 'live'")


@pytest.mark.parametrize("name", ["continuous-batching", "prefix-sharing", "preemption", "beams"])
def test_the_replays_show_what_python_makes_of_them(page, server, name):
    picture = Picture()
    frames = list(read_recording(export.RUNS / f"{name}.jsonl.gz"))
    page.evaluate(f"choose({json.dumps(name)})")
    page.wait_for(f"source === 'replay' && frames.length === {len(frames)}")
    page.evaluate("setPlaying(false)")
    for index, frame in enumerate(frames):
        picture.apply(frame)
        if index % 9 == 0 or index == len(frames) - 1:
            page.evaluate(f"seek({index})")
            shown = page.evaluate(
                "[[...picture.tables].map(([seq, { owner, blocks }]) => [seq, owner, blocks]), [...picture.cached], "
                "picture.queues, picture.outputs, picture.hits, picture.preempted, picture.missed]"
            )
            tables = {seq: (owner, blocks) for seq, owner, blocks in shown[0]}
            assert tables == picture.tables and set(shown[1]) == picture.cached
            assert shown[2:6] == [picture.queues, picture.output_tokens, picture.hit_tokens, picture.preempted]
            assert shown[6] == 0
    page.evaluate(f"seek({len(frames) // 2}); seek(3)")  # back
    assert page.evaluate("[index, picture.step]") == [3, frames[3]["step"]]
    page.evaluate("choose('')")
    page.wait_for("$('mode').textContent === 'live'")


def test_a_file_with_a_recording_needs_no_server(browser, tmp_path):
    file, lab = tmp_path / "lab.html", ("A lab", [("What does step 12 do?", "No more than step 20.")])
    file.write_bytes(export.make_page(export.find_recording("preemption"), *lab))
    browser.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
    browser.open(file.as_uri())
    browser.wait_for("source === 'replay' && frames.length > 20 && $('recorded').textContent")
    assert browser.evaluate("$('recorded').innerText").startswith("Recorded, not simulated: SmolLM2-135M-Instruct")
    assert browser.evaluate("['run', 'chat', 'save'].map((id) => $(id).offsetHeight)") == [0, 0, 0]
    assert browser.evaluate("isPlaying") is False
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    browser.evaluate("$('questions').querySelector('p button').click()")
    browser.wait_for("picture.step === 12 && $('why-title').textContent === 'Step 12'")
    assert "No more" not in browser.evaluate("$('questions').textContent")
    browser.evaluate("$('questions').querySelector('input').focus()")
    browser.press("Enter")  # without an answer of one's own
    browser.type("It waits.")
    browser.evaluate("window.empty = $('questions').querySelector('.answer').textContent === ''")
    browser.press("Enter")
    browser.wait_for("empty && $('questions').querySelector('.answer').innerText === 'No more than step 20.'")
    assert browser.problems == []
    browser.evaluate("fetch('http://127.0.0.1:9/').catch(() => null)")
    browser.wait_for("true")
    assert any("Content Security Policy" in problem for problem in browser.problems)
    browser.call("Emulation.clearDeviceMetricsOverride")


KEY = {
    "frame": "key",
    "version": 1,
    "time": 0,
    "step": 0,
    "model": HOSTILE,
    "block_size": 8,
    "num_blocks": 24,
    "num_host_blocks": 0,
    "max_num_seqs": 8,
    "why": [],
    "queues": [[], [], []],
    "requests": [],
    "tables": [],
    "host": [],
    "cached": [],
}


@pytest.mark.parametrize(
    "change",
    [
        {"model": HOSTILE * 100, "why": [[HOSTILE, 1, HOSTILE * 1000], ["w" * 9000, 1, "line\n" * 10000]]},
        {"num_blocks": 10**15, "num_host_blocks": 10**15, "host": [[1, 1, [10**15]]], "tables": [[1, 1, [10**15]]]},
        {"tables": [[i, 1, [i]] for i in range(200000)], "num_blocks": 200000},
        {
            "requests": [[i, 2**52, 1, 1, False, 0, 2**52, 0, 0] for i in range(200000)],
            "queues": [[*range(200000)], [], []],
        },
        {
            "requests": [[1, 9, 9, 1, False, 0, 9, 9, 0, [[i, -(2**52)] for i in range(100000)]]],
            "queues": [[], [1], []],
        },
        {"num_blocks": None, "queues": [1, 2], "tables": [[1, 1, 5]]},
    ],
)
def test_a_hostile_recording_is_shown_as_text_or_refused(page, change):
    page.call("Emulation.setDeviceMetricsOverride", width=1000, height=800, deviceScaleFactor=1, mobile=False)
    page.evaluate(f"$('model').textContent = ''; open(new File([{json.dumps(json.dumps(KEY | change))}], 'x'))")
    page.wait_for(
        "$('model').textContent.startsWith('<script>') || $('notice').textContent.includes('cannot be shown')"
    )
    assert page.evaluate("document.querySelectorAll('#model *, #sentences li * *, img').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000
    assert page.evaluate("$('run').getBoundingClientRect().bottom < 300")
    page.call("Emulation.clearDeviceMetricsOverride")
    page.evaluate("choose('')")
    page.wait_for("$('mode').textContent === 'live'")


def test_a_file_that_is_no_recording_is_refused(page):
    lines = [KEY, KEY | {"frame": "step"}, KEY | {"why": 1}, KEY | {"num_blocks": "<b>"}, KEY | {"cached": [[[]], "x"]}]
    lines.append(KEY | {"requests": [[1, 9, 9, 1, False, 0, 9, 9, 0, 5]]})
    lines = [f"{json.dumps(KEY)}\n{json.dumps(line)}" for line in lines[1:]]
    lines += [f"{json.dumps(KEY)}\n{line}" for line in ("null", "[]", '{"why": [], "step": 1e999}', "[" * 100000)]
    for text in ("hello", "{}", json.dumps({"frame": "key", "version": 9}), *lines):
        page.evaluate(f"$('notice').hidden = true; open(new File([{json.dumps(text)}], 'x'))")
        page.wait_for("!$('notice').hidden && $('notice').textContent.startsWith('The recording could not be read')")
    page.evaluate("choose('')")
    page.wait_for("$('mode').textContent === 'live'")


def test_an_idle_engine_says_what_to_do(page):
    page.evaluate(f"picture = new Picture(); receive({json.dumps(KEY | {'model': NAME, 'why': [['run', None, 'x']]})})")
    page.wait_for("$('why-title').textContent === 'Waiting for requests'")
    assert page.evaluate("$('sentences').innerText").startswith("Send a message on the chat page")
    assert page.evaluate("$('sentences').querySelector('a').getAttribute('href')") == "./"
    page.evaluate("choose('')")
    page.wait_for("$('mode').textContent === 'live'")


@pytest.mark.parametrize("width", [400, 800, 1600])
def test_it_fits_the_screen(page, width):
    page.evaluate("choose('preemption')")
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    page.wait_for("source === 'replay' && frames.length > 20")
    page.evaluate("setPlaying(false); seek(frames.length >> 1)")
    page.wait_for(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
    nodes = "[...document.querySelectorAll('canvas, table, header > *')]"
    page.wait_for(f"{nodes}.every((node) => node.getBoundingClientRect().right <= innerWidth)")
    shown = "[...$('numbers').children].filter((node) => node.offsetHeight).length"
    assert page.evaluate(shown) == 6 if width == 400 else page.evaluate(f"{shown} > 10 && !$('fold').offsetHeight")
    page.evaluate("$('fold').click()")
    assert page.evaluate(f"{shown} > 10 && $('fold').ariaExpanded === 'true'")
    page.evaluate("$('fold').click()")
    page.call("Emulation.clearDeviceMetricsOverride")
    page.evaluate("choose('')")
    page.wait_for("$('mode').textContent === 'live'")


def test_the_block_map_can_be_read_with_the_keyboard(page):
    page.wait_for("$('numbers').children.length > 0")  # it has been drawn
    page.evaluate("$('map').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.wait_for("/^Block 1: (cached|free)/.test($('detail').textContent)")
