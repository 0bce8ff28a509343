"""`nanopage chat` with a server: a stand-in at a URL, and nanopage's own on a socket of the same user."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from helpers import run_chat as chat
from helpers import tiny_model
from seeing import file_of, idefics_model, picture
from server_process import serving

from nanopage.files.local_servers import local_servers, new_file, publish, socket_of
from nanopage.terminal.calls import Server
from nanopage.terminal.commands import WITH_ALIASES
from nanopage.terminal.conversation import Conversation
from nanopage.terminal.loading import FromHere, FromServer
from nanopage.terminal.session import Session
from nanopage.terminal.tools import Toolbox

ROOT = Path(__file__).parents[2]
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}


def event(finish=None, usage=None, **delta) -> dict:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}


WHOLE = [event(role="assistant", content=""), event(content="It is "), event(content="here."), event("stop")]
WHOLE += [{"choices": [], "usage": USAGE}]


class StandIn(ThreadingHTTPServer):
    """A server of OpenAI's API. `script` has what it does for each POST: events to stream, or a function of the
    handler. Without a script it streams WHOLE. `posts` has path, body and key of each."""

    daemon_threads = True
    cards = ({"id": "small"}, {"id": "large"})

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts, self.script, self.left = [], [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/v1/models":
            self.answer(404, {"detail": "Not Found"})
        else:
            self.answer(200, {"data": list(self.server.cards)})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.path, body, self.headers.get("Authorization")))
        action = self.server.script.pop(0) if self.server.script else WHOLE
        if callable(action):
            action(self)
        else:
            self.stream(action)

    def answer(self, status, body, **headers):
        text = body if isinstance(body, str) else json.dumps(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def stream(self, events, done=b"data: [DONE]\n\n"):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for each in events:
            self.wfile.write(b": a comment\n\ndata: " + json.dumps(each).encode() + b"\n\n")
        self.wfile.write(done)

    def hang(self):
        """Wait until the client has gone."""
        self.connection.recv(1)
        self.server.left.set()

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = StandIn()
    yield server
    server.shutdown()
    server.server_close()


def talk(load, model=None, **options) -> Conversation:
    loaded, name, params = load(model)
    options = {"raw": False, "plain": True, "argument": model, "load": load} | options
    return Conversation(loaded, Session(params, model=name), WITH_ALIASES, **options)


@pytest.fixture
def conversation(server):
    return talk(FromServer(Server.at(server.url, "secret"), {}))


def said(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


def one_line(done) -> str:
    return " ".join(done.stderr.split())


def test_a_conversation_with_any_server(server, conversation, capsys):
    conversation.take("where is it?")
    shown = capsys.readouterr()
    assert shown.out == "It is here.\n"
    assert "9 tokens in (5 cached), 4 out, " in shown.err and "context" not in shown.err
    conversation.take("and now?")
    path, body, key = server.posts[-1]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "small",
        "max_tokens": 1024,
        "messages": [
            {"role": "user", "content": "where is it?"},
            {"role": "assistant", "content": "It is here."},
            {"role": "user", "content": "and now?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert conversation.describe_model() == f"small, at {server.url}"
    for command, expected in (
        ("/stats", "tokens in 18, of which 10 came from the prefix cache"),
        ("/show", "the server does not say how long it is"),
        ("/blocks", "the KV blocks are in another process"),
        ("/model tiny", "has no model 'tiny': it has small, large"),
        ("/model large", f"large, at {server.url}"),
    ):
        conversation._take_safely(command)
        assert expected in said(capsys)
    conversation.take("you?")
    assert server.posts[-1][1]["model"] == "large" and len(server.posts[-1][1]["messages"]) == 5


def test_reasoning_is_shown_between_marks_and_not_sent_back(server, conversation, capsys):
    server.script = [
        [event(reasoning_content="One "), event(reasoning="two."), event(content="Three."), event("length")],
    ]
    conversation.take("count")
    assert capsys.readouterr().out == "<think>\nOne two.\n</think>\n\nThree.\n"
    conversation.take("more")
    assert server.posts[-1][1]["messages"][1]["content"] == "Three."
    with pytest.raises(ValueError, match="this server cannot go on with its reply"):
        conversation.last = None
        conversation.take("/continue")


def test_only_what_the_user_has_set_is_sent(server, conversation):
    for setting in ("temperature 1.0", "top_k 5", "seed 3", "stop END", "top_k default"):
        conversation.take(f"/set {setting}")
    conversation.take("hi")
    body = server.posts[-1][1]
    sent = {name: body[name] for name in body.keys() - {"model", "messages", "stream", "stream_options"}}
    assert sent == {"temperature": 1.0, "seed": 3, "stop": ["END"], "max_tokens": 1024}


def test_a_limit_by_another_name(server, conversation):
    """As OpenAI's newer models have it."""
    message = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )
    server.script = [lambda handler: handler.answer(400, {"error": {"message": message}})]
    conversation.take("hi")
    assert conversation.replies[0].text == "It is here."
    assert "max_tokens" not in server.posts[1][1] and server.posts[1][1]["max_completion_tokens"] == 1024


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (lambda h: h.answer(401, {"error": {"message": "no such key"}}), "answers 401: no such key"),
        (lambda h: h.answer(404, {"error": "model 'x' not found"}), "answers 404: model 'x' not found"),
        (
            lambda h: h.answer(429, {"error": {"message": "slow\ndown"}}, Retry_After="7"),
            "answers 429: slow down; try again in 7 s",
        ),
        (lambda h: h.answer(502, "<html><body>\n\nbad</body>"), "answers 502: Bad Gateway"),
        (lambda h: h.answer(308, "", Location="http://else/"), "answers 308: it has moved to http://else/"),
        (lambda h: h.answer(200, {"choices": []}), "does not stream: it answers with text/plain"),
        (lambda h: h.stream([], done=b""), "has broken off the connection"),
        (lambda h: h.stream([], done=b"data: {\n\n"), "streams what is no reply"),
        (lambda h: h.stream([{"choices": 3}]), "streams what is no reply"),
        (lambda h: h.stream([{"error": {"message": "the engine is dead"}}]), ": the engine is dead"),
        (lambda h: h.connection.shutdown(socket.SHUT_RDWR), "has broken off the connection"),
    ],
)
def test_an_error_is_one_line_and_the_user_can_try_again(server, conversation, capsys, action, expected):
    server.script = [action]
    conversation._take_safely("hi")
    shown = capsys.readouterr()
    lines = [line for line in shown.err.split("\n") if line]
    assert expected in " ".join(lines) and server.url in " ".join(lines) and "Traceback" not in shown.err
    assert conversation.session.messages == []
    conversation._take_safely("hi")
    assert [message["content"] for message in conversation.session.messages] == ["hi", "It is here."]


def test_a_connection_that_breaks_off_keeps_what_came(server, conversation, capsys):
    server.script = [lambda handler: handler.stream([event(content="It is")], done=b"")]
    conversation.take("hi")
    assert conversation.session.messages[-1]["content"] == "It is"
    assert conversation.last.finish_reason == "error" and "has broken off the connection" in said(capsys)
    server.script = [lambda handler: handler.stream([event(content="It is"), event("stop")], done=b"")]
    conversation.take("/regen")
    assert conversation.last.finish_reason == "stop"  # only `[DONE]` was missing


def test_a_server_that_is_not_there(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    for given, expected in ((url, "cannot be reached: Connection refused"), (f"{server.url}/v2", "answers 404")):
        done = chat_with(given, "-p", "hi")
        assert (done.exit_code, done.stdout) == (1, "") and expected in one_line(done)


def test_ctrl_c_ends_a_reply_by_closing_the_connection(server, conversation, capsys):
    def begin_and_hang(handler):
        handler.stream([event(content="It is")], done=b"")
        os.kill(os.getpid(), signal.SIGINT)
        handler.hang()

    def hang(handler):
        os.kill(os.getpid(), signal.SIGINT)
        handler.hang()

    server.script = [begin_and_hang]
    conversation.take("hi")
    assert conversation.session.messages[-1]["content"] == "It is" and server.left.wait(10)
    assert "stopped by Ctrl-C" in said(capsys)
    server.left.clear()
    server.script = [hang]
    conversation.take("more")
    assert server.left.wait(10) and len(conversation.session.messages) == 2
    assert "Stopped before anything came" in said(capsys)


def test_tools_are_called_by_a_servers_model(server, tmp_path, capsys):
    (tmp_path / "sums.py").write_text(
        'def add(a: int, b: int) -> int:\n    """Add.\n\n    Args:\n        a: One.\n        b: Two.\n    """\n'
        "    return a + b\n"
    )
    toolbox = Toolbox(tmp_path / "sums.py", lambda question: "y")
    conversation = talk(FromServer(Server.at(server.url, None), {}), toolbox=toolbox)

    def part(index, **fields):
        return event(tool_calls=[{"index": index} | fields])

    calls = [
        part(0, id="c1", function={"name": "add", "arguments": '{"a": 2, '}),
        part(0, function={"arguments": '"b": 3}'}),
    ]
    calls += [part(1, id="c2", function={"name": "sub", "arguments": "{}"}), event("tool_calls")]
    server.script = [calls]
    conversation.take("2 and 3?")
    assert "add(a=2, b=3)" in capsys.readouterr().err
    first, second = (body for _, body, _ in server.posts)
    assert first["tools"][0]["function"]["name"] == "add" and "tool_choice" not in first
    _, asked, result, unknown = second["messages"]
    assert [call["id"] for call in asked["tool_calls"]] == ["c1", "c2"]
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"a": 2, "b": 3}
    assert (result["tool_call_id"], result["content"]) == ("c1", "5")
    assert (unknown["tool_call_id"], unknown["content"]) == ("c2", "there is no such function")
    assert conversation.session.messages[-1]["content"] == "It is here."


def test_images_are_sent_with_their_files(server, conversation, tmp_path, capsys):
    files = {kind: tmp_path / f"a cat.{kind}" for kind in ("png", "jpeg", "webp", "gif", "bmp")}
    for kind, file in files.items():
        file.write_bytes(file_of(picture(30, 20), kind))
        conversation.take(f"/image {file}")
    content = [{"type": "image_url", "image_url": {"url": url_of(kind, file)}} for kind, file in files.items()]
    content.append({"type": "text", "text": "which cat?"})
    server.script = [lambda handler: handler.answer(400, {"error": {"message": "the model\nreads text"}})]
    capsys.readouterr()
    conversation._take_safely("which cat?")
    assert said(capsys) == f"{server.url} answers 400: the model reads text"
    assert conversation.session.messages == [] and len(conversation.attached) == len(files)
    conversation.take("which cat?")
    conversation.take("and now?")
    assert [body["messages"][0]["content"] for _, body, _ in server.posts] == [content] * 3
    assert server.posts[-1][1]["messages"][2]["content"] == "and now?"
    done = chat_with(server.url, "--image", files["png"], "which", "cat?")
    assert done.exit_code == 0 and server.posts[-1][1]["messages"][0]["content"] == [content[0], content[-1]]


def url_of(kind, file) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def chat_with(url, *arguments, **options):
    return chat("--model", "small", "--url", url, *arguments, **options)


def test_one_answer_of_a_server(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    done = chat_with(server.url.removesuffix("/v1"), "--temperature", "0.5", "--json", stdin="hi")
    reply = json.loads(done.stdout)
    assert (reply["text"], reply["model"], reply["num_prompt_tokens"]) == ("It is here.", "small", 9)
    assert (server.posts[0][1]["temperature"], server.posts[0][2]) == (0.5, "Bearer of the environment")
    server.script = [[{"choices": [{"text": " and on", "finish_reason": "length"}]}]]
    done = chat_with(server.url, "--raw", "--api-key", "mine", "-p", "on")
    assert done.stdout == " and on\n" and done.stderr.split("\n")[0] == "cut at max_tokens 1024"
    path, body, key = server.posts[-1]
    assert (path, body["prompt"], key) == ("/v1/completions", "on", "Bearer mine")


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--url", "http://localhost", "--dtype", "float32"], 2, "dtype='float32' is for an engine in this process"),
        (["--url", "http://localhost", "--no-attach"], 2, "--no-attach loads the model in this process"),
        (["--api-key", "k", "--no-attach"], 2, "--api-key is for a server"),
        (["--api-key", "k"], 1, "no nanopage server of yours here has this model"),
        (["--url", "localhost:8000"], 1, "not a URL such as http://localhost:8000/v1"),
        (["--url", "http://localhost:99999"], 1, "not a URL such as"),
        (["--url", "http://me:secret@localhost"], 1, "give the key with --api-key"),
        (["--url", "http://localhost", "--api-key", "a\nb"], 1, "the API key is empty, or has characters"),
    ],
)
def test_options_that_do_not_go_together(arguments, code, expected):
    done = chat("--model", "tiny", *arguments, "-p", "hi")
    assert (done.exit_code, done.stdout) == (code, "") and expected in one_line(done)


def test_a_chat_with_a_server_imports_nothing_slow(server):
    """Not torch, whose import takes longer than many an answer."""
    code = (
        "import sys; sys.argv = ['chat.py', '--url', sys.argv[1], '-p', 'hi']; import runpy\n"
        "try: runpy.run_path('chat.py', run_name='__main__')\n"
        "finally: print(*{'torch', 'transformers', 'numpy', 'tokenizers', 'jinja2', 'asyncio'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code, server.url], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "It is here.\n\n", done.stderr


# nanopage's own server


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny model with a server, and the server's process."""
    path = tiny_model(tmp_path_factory.mktemp("model"), eos_token_id=None)
    with serving(path, log=tmp_path_factory.mktemp("log") / "log") as server:
        server.wait_until_ready()
        wait_for(lambda: servers_of(server.process))
        yield path, server.process


def of(path) -> list:
    return ["--model", path, "--eager"]


def servers_of(process) -> list[Path]:
    return [file for file, entry in local_servers() if entry.pid == process.pid]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


SAME = ["--max-model-len", "128", "--temperature", "0", "--max-tokens", "12"]


def test_a_chat_uses_the_server_that_has_its_model(served):
    path, process = served
    attached = chat(*of(path), *SAME, "--system", "Be brief.", stdin="where is the cat?")
    assert f"Using the nanopage server that runs here (pid {process.pid}); --no-attach" in " ".join(
        attached.stderr.split()
    )
    own = chat(*of(path), *SAME, "--no-attach", "--system", "Be brief.", stdin="where is the cat?")
    assert (attached.exit_code, attached.stdout_bytes) == (0, own.stdout_bytes)
    assert "Using" not in own.stderr
    for more in (["--raw"], ["--temperature", "1", "--seed", "5"]):
        attached, alone = (chat(*of(path), *SAME, *more, *how, "the cat") for how in ([], ["--no-attach"]))
        assert attached.stdout_bytes == alone.stdout_bytes != own.stdout_bytes
        assert "Using" in attached.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "it has --max-model-len 128"),
        (["--max-model-len", "128", "--dtype", "float64"], "it was started without --dtype"),
        (["--max-model-len", "128", "--kv-cache-gib", "0.1"], "it was started without --kv-cache-gib"),
    ],
)
def test_a_server_with_other_options_is_not_used(served, options, why):
    done = chat(*of(served[0]), *options, "--max-tokens", "3", "hi")
    assert done.exit_code == 0 and f"is not used: {why}." in one_line(done)


def test_a_conversation_with_nanopages_server_lacks_nothing(served, capsys):
    path, process = served
    options = {"max_model_len": 128, "enforce_eager": True}
    load = FromHere(options, {"temperature": 0.0, "max_tokens": 6}, False, False, True)
    conversation = talk(load, str(path))
    assert conversation.describe_model() == f"{path.name}, by the nanopage server that runs here (pid {process.pid})"
    conversation.take("where is the cat?")
    first = conversation.replies[0]
    assert (first.num_output_tokens, first.finish_reason) == (6, "length")
    conversation.take("/continue")
    assert conversation.session.messages[1]["content"].startswith(first.text)
    assert conversation.replies[1].num_prompt_tokens > first.num_prompt_tokens
    capsys.readouterr()
    conversation.take("/show")
    assert "128 tokens; when the context is full" in said(capsys)
    conversation.take("/blocks")
    assert "blocks of 16 tokens" in said(capsys)
    for i in range(12):
        conversation.take(f"{i} the cat and the dog")
        if "no longer sent" in said(capsys):
            break
    assert 0 < conversation.session.first < len(conversation.session.messages)
    with pytest.raises(ConnectionError, match=r"answers 400.*vocabulary"):
        conversation.take("/set allowed_token_ids [99999]")
        conversation.take("hi")


def test_a_server_is_not_used_if_the_model_was_written_again(served):
    path, _ = served
    config = path / "config.json"
    before = config.stat()
    os.utime(config, ns=(0, 0))
    done = chat(*of(path), *SAME, "hi")
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert done.exit_code == 0 and "the model's files have changed since it read them" in one_line(done)


def test_a_server_with_a_key_removes_its_files_when_it_ends(tmp_path):
    path = tiny_model(tmp_path / "model", eos_token_id=None)
    with serving(path, "--api-key", "secret", log=tmp_path / "log") as server:
        server.wait_until_ready()

        wait_for(lambda: servers_of(server.process))
        (file,) = servers_of(server.process)
        done = chat(*of(path), *SAME, "hi")
        assert done.exit_code == 0 and "is not used: it needs --api-key." in one_line(done)
        done = chat(*of(path), *SAME, "--api-key", "secret", "hi")
        assert done.exit_code == 0 and "Using" in done.stderr
        done = chat(*of(path), *SAME, "--api-key", "wrong", "hi")
        assert done.exit_code == 1 and "answers 401" in done.stderr
        server.process.terminate()
        server.process.wait(60)
        assert not [*file.parent.glob(f"{file.stem}.*")]


def test_the_latest_server_that_answers_is_used(served, monkeypatch):
    path, process = served
    monkeypatch.setattr("nanopage.terminal.loading.PROBE_SECONDS", 0.1)
    ((_, entry),) = [each for each in local_servers() if each[1].pid == process.pid]
    file = new_file()
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(socket_of(file)))
        hanging.listen()
        publish(file, msgspec.structs.replace(entry, pid=1, started=entry.started + 1))
        done = chat(*of(path), *SAME, "hi")
    assert done.exit_code == 0 and f"Using the nanopage server that runs here (pid {process.pid})" in one_line(done)


def test_a_server_gets_images_if_its_model_sees_them(served, tmp_path, capsys):
    image, seeing = tmp_path / "cat.png", tmp_path / "model"
    image.write_bytes(file_of(picture(60, 40)))
    done = chat(*of(served[0]), *SAME, "--image", image, "hi")
    assert (done.exit_code, done.stdout) == (1, "") and f"{served[0].name} sees no images" in one_line(done)
    idefics_model(seeing, preprocessor={"size": {"longest_edge": 64}})
    with serving(seeing, "--max-model-len", 160, log=tmp_path / "log") as server:
        server.wait_until_ready()
        wait_for(lambda: servers_of(server.process))
        same = ["--max-model-len", "160", "--temperature", "0", "--max-tokens", "12", "--image", image, "a"]
        attached, own = (chat(*of(seeing), *how, *same) for how in ([], ["--no-attach"]))
        assert "Using" in attached.stderr and attached.stdout_bytes == own.stdout_bytes != b"\n"
        options = {"max_model_len": 160, "enforce_eager": True}
        conversation = talk(FromHere(options, {"temperature": 0.0, "max_tokens": 6}, False, False, True), str(seeing))
        with pytest.raises(ValueError, match=f"the conversation has images, and {served[0]} sees no images"):
            conversation.take(f"/image {image}")
            conversation.take(f"/model {served[0]}")
        conversation.take("a")
        conversation.take("and now?")
        assert "of the context is used, and the server does not count what would fit." in said(capsys)
    assert len(conversation.session.messages) == 4 and conversation.replies[1].num_cached_tokens > 30  # also the image


def test_a_server_that_was_killed_costs_nothing(served, capsys):
    """The last test of this server."""
    path, process = served
    options = {"max_model_len": 128, "enforce_eager": True, "device": "auto"}
    conversation = talk(FromHere(options, {"max_tokens": 3}, False, False, True), str(path))
    process.kill()
    process.wait()
    conversation._take_safely("hi")
    assert "the nanopage server that runs here cannot be reached: Connection refused" in said(capsys)
    assert conversation.session.messages == []
    conversation.take(f"/model {path.name}")
    assert conversation.describe_model() == f"{path.name}, float32 on cpu" and not servers_of(process)
    conversation.take("hi")
    assert conversation.replies[0].num_output_tokens == 3
