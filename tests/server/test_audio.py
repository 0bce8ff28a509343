"""Transcriptions through the HTTP API, with an engine that says what a test wants."""

import asyncio
import importlib
import json
import sys

import openai
import pytest
from asgi import call, check, get, read_schema
from openai.types.audio import Transcription, TranscriptionVerbose
from speech import END, IDS, FakeAligner, ScriptedLLM, encoded, sound, write_whisper

from nanopage.audio import rules, transcription
from nanopage.server.app import create_app

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
BEGIN, EN, TASK = IDS["<|0.00|>"], IDS["<|en|>"], IDS["<|transcribe|>"]
AA, BB = 256, 257  # " aa", " bb"
FIRST = [EN, TASK, BEGIN, AA, BEGIN + 100, BEGIN + 100, BB, BEGIN + 1490, BEGIN + 1490, AA, END], -0.5, 0.01
SECOND = [EN, TASK, BEGIN, BB, BEGIN + 100, END], -0.5, 0.01
SOUND = encoded(sound(33))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def llm(directory):
    return ScriptedLLM(directory, [FIRST, SECOND])


def form(**fields):
    """A body. Values are texts, lists of texts, or bytes, which are a file."""
    parts = []
    for name, values in ({"file": SOUND} | fields).items():
        for value in values if isinstance(values, list) else [values]:
            if value is not None:
                head = f'--xx\r\nContent-Disposition: form-data; name="{name}"'.encode()
                head += b'; filename="a.wav"\r\nContent-Type: audio/wav' if isinstance(value, bytes) else b""
                parts.append(head + b"\r\n\r\n" + (value if isinstance(value, bytes) else value.encode()) + b"\r\n")
    return b"".join([*parts, b"--xx--\r\n"])


def post(app, path=TRANSCRIPTIONS, content_type="multipart/form-data; boundary=xx", leave_when=None, **fields):
    return asyncio.run(call(app, "POST", path, form(**fields), {"content-type": content_type}, leave_when))


def test_the_openai_sdk_transcribes(app, llm, monkeypatch):
    monkeypatch.setattr(transcription, "Aligner", FakeAligner)

    async def create(kind, **fields):
        library = importlib.import_module(openai.DefaultAsyncHttpxClient.__base__.__module__.split(".")[0])
        transport = library.ASGITransport(app=app)
        async with openai.DefaultAsyncHttpxClient(transport=transport) as client:
            sdk = openai.AsyncOpenAI(base_url="http://localhost:8000/v1", api_key="any", http_client=client)
            reply = await getattr(sdk.audio, kind).create(model="tiny", file=("a.wav", SOUND), **fields)
            return [event async for event in reply] if fields.get("stream") else reply

    def ask(kind="transcriptions", **fields):
        llm.answers = [FIRST, SECOND]
        return asyncio.run(create(kind, **fields))

    plain = ask(prompt="bb", temperature=0.2, language="english")
    assert (plain.text, plain.usage.seconds) == ("aa bb bb", 33)
    Transcription.model_validate(plain.model_dump(), strict=True)
    params = llm.requests[-1][1]
    assert params.temperature == 0.2 and params.structured_outputs.forced == (1 << EN, 1 << TASK)
    verbose = ask(response_format="verbose_json", timestamp_granularities=["segment"])
    TranscriptionVerbose.model_validate(verbose.model_dump(exclude_none=True), strict=True)
    assert (verbose.language, verbose.duration) == ("english", 33)
    assert [(part.start, part.end, part.text) for part in verbose.segments] == [
        (0, 2, " aa"),
        (2, 29.8, " bb"),
        (29.8, 31.8, " bb"),
    ]
    for asked in (["word"], ["word", "segment"]):
        both = ask(response_format="verbose_json", timestamp_granularities=asked)
        TranscriptionVerbose.model_validate(both.model_dump(exclude_none=True), strict=True)
        times = [(part.word, part.start, part.end) for part in both.words]
        assert times == [("aa", 0, 0.5), ("bb", 2, 2), ("bb", 29.8, 30.3)]
        assert bool(both.segments) == ("segment" in asked)
    assert ask(response_format="text") == "aa bb bb\n"
    assert ask(response_format="srt").splitlines()[:3] == ["1", "00:00:00,000 --> 00:00:02,000", "aa"]
    assert ask(response_format="vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.000\naa\n")
    assert ask("translations").text == "aa bb bb"
    assert llm.requests[-1][1].structured_outputs.forced[1] == 1 << IDS["<|translate|>"]
    *deltas, done = ask(stream=True)
    assert [(event.type, event.delta) for event in deltas] == [
        ("transcript.text.delta", "aa bb"),
        ("transcript.text.delta", " bb"),
    ]
    assert (done.type, done.text) == ("transcript.text.done", "aa bb bb")


def test_replies_are_what_openapi_json_says(app, llm):
    schema = read_schema(app)
    for path in (TRANSCRIPTIONS, TRANSLATIONS):
        llm.answers = [FIRST, SECOND]
        check(schema, path, [post(app, path, response_format="verbose_json").json])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"file": None}, "file"),
        ({"file": "text"}, "file"),
        ({"file": b""}, "file"),
        ({"file": b"RIFF, and nothing else"}, "file"),
        ({"file": SOUND[:44]}, "file"),
        ({"file": [SOUND, SOUND]}, "file"),
        ({"sound": SOUND}, "sound"),
        ({"language": "klingon"}, "language"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "1.5"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": ["0", "1"]}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities[]"),
        ({"timestamp_granularities[]": "word", "response_format": "json"}, "timestamp_granularities[]"),
        ({"timestamp_granularities[]": "page", "response_format": "verbose_json"}, "timestamp_granularities[]"),
        ({"include[]": "logprobs"}, "include[]"),
        ({"include": "logprobs"}, "include"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy[type]"),
        ({"seed": "1"}, "seed"),
        ({"prompt": "x" * 70_000}, "prompt"),
        ({f"field{index}": "1" for index in range(70)}, None),
    ],
)
def test_what_is_wrong_is_named(app, llm, fields, param):
    reply = post(app, **fields)
    assert reply.status == 400 and reply.error["param"] == param and not llm.requests
    assert param is None or param in reply.error["message"]


def test_bodies_that_are_no_forms(app):
    for content_type in ("application/json", "multipart/form-data", "multipart/form-data; boundary=yy"):
        assert post(app, content_type=content_type).status == 400, content_type
    body = form()[:-100]  # the file does not end
    headers = {"content-type": "multipart/form-data; boundary=xx"}
    assert asyncio.run(call(app, "POST", TRANSCRIPTIONS, body, headers)).error["param"] == "file"
    assert asyncio.run(call(app, "POST", TRANSCRIPTIONS, None, headers | {"content-length": "26300000"})).status == 413
    assert asyncio.run(call(app, "POST", "/v1/completions", None, {"content-length": "4194304"})).status == 400
    assert asyncio.run(call(app, "POST", "/v1/completions", None, {"content-length": "4194305"})).status == 413


def test_other_fields_are_listed_or_refused(app, state):
    reply = post(app, user="me", vad="on", chunking_strategy="auto")
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "vad"
    state.strict_fields = True
    assert post(app, vad="on").error["code"] == "unknown_field"
    assert post(app, model="other").error["code"] == "model_not_found"


def test_what_fails_while_it_runs(app, llm, state):
    llm.answers = []
    reply = post(app)
    assert reply.status == 500 and reply.error["code"] == "request_failed"
    broken = encoded(sound(40), subtype="FLOAT")
    broken = broken[:-100] + b"\xff" * 100  # NaN, at the end
    llm.answers = [FIRST]
    assert post(app, file=broken).error["code"] == "invalid_audio"
    llm.answers = [FIRST]
    *events, last = post(app, file=broken, stream="true").body.decode().split("\n\n")[:-2]
    assert len(events) == 1 and json.loads(last.removeprefix("data: "))["error"]["param"] == "file"
    assert state.num_active == 0 and state.num_entering == 0


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_goes_away_aborts_its_request(app, llm, state, stream):
    llm.waits = True
    post(app, stream=stream, leave_when=lambda reply: bool(llm.requests))
    assert (llm.num_aborted, state.num_disconnects, state.num_active) == (1, 1, 0)


def test_metrics_and_salts(app, llm, state):
    state.salt_per_key = True
    guarded = create_app(state, api_keys=["secret"])
    headers = {"content-type": "multipart/form-data; boundary=xx", "authorization": "Bearer secret"}
    assert asyncio.run(call(guarded, "POST", TRANSCRIPTIONS, form(), headers)).status == 200
    assert len({*llm.salts}) == 1 and llm.salts[0]
    llm.metrics = type("Metrics", (), {"collect": lambda self: []})()
    page = get(app, "/metrics").body.decode()
    assert "nanopage:transcribed_seconds_total 33.0" in page
    assert f'handler="{TRANSCRIPTIONS}",method="POST",status="200"' in page


def test_models_and_endpoints_that_do_not_fit_are_named(app, llm, monkeypatch):
    monkeypatch.setattr(rules, "generation_fields", lambda path: {"is_multilingual": False})
    reply = post(app, TRANSLATIONS)
    assert (reply.status, reply.error["code"]) == (404, "not_served") and "English alone" in reply.error["message"]
    assert post(app, language="de").error["param"] == "language"
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/embeddings", {"input": "Hello"}),
    ):
        llm.engine.model_config.pooling = None
        reply = asyncio.run(call(app, "POST", path, body))
        assert reply.status == 404 and "transcripts" in reply.error["message"] and path in reply.error["message"]
    llm.engine.model_config.architecture = "LlamaForCausalLM"
    for path in (TRANSCRIPTIONS, TRANSLATIONS):
        reply = post(app, path)
        assert (reply.status, reply.error["code"]) == (404, "not_served") and "hears nothing" in reply.error["message"]


def test_a_server_without_the_extra_says_so(app, monkeypatch):
    for module in ("python_multipart.exceptions", "soundfile"):
        monkeypatch.setitem(sys.modules, module, None)
        reply = post(app)
        assert reply.status == 404 and module in reply.error["message"] and "nanopage[audio]" in reply.error["message"]
