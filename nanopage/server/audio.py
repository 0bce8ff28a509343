"""/v1/audio/transcriptions and /v1/audio/translations: a sound file to text (the extra "audio").

The form is read in a thread, and the file opened there, before the reply begins. It is decoded window by window. A
reply that streams has an event for each window with text.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from nanopage.aio.async_llm import AsyncLLM, EngineDeadError
from nanopage.audio import WHISPER
from nanopage.audio.files import AudioError, Sound, import_libraries
from nanopage.audio.formats import FORMATS, as_json, as_verbose_json
from nanopage.audio.languages import language_code
from nanopage.audio.rules import read_speech_tokens
from nanopage.audio.transcription import Options, Transcription
from nanopage.server.errors import ApiError, ClientGoneError, invalid, json_response, unsupported
from nanopage.server.fields import WITHOUT_EFFECT, ignored_header
from nanopage.server.middleware import AUDIO_PATHS
from nanopage.server.protocol import CommonBody
from nanopage.server.shapes import TranscriptEvent, TranscriptReply, replies
from nanopage.server.state import ServerState
from nanopage.server.streaming import GONE, EventStream, unless_gone, whole_reply

logger, calls = logging.getLogger("nanopage"), logging.getLogger("nanopage.calls")

MAX_SECONDS = 4 * 3600  # of a sound
MAX_FIELDS, MAX_FIELD_SIZE = 64, 65_536  # of a form, apart from the file
FORM = "multipart/form-data"
FIELDS = ("model", "language", "prompt", "response_format", "temperature", "stream")
GRANULARITIES = "timestamp_granularities[]"
# Fields of OpenAI's API, and of other endpoints -> (the values that ask for nothing, why others are refused)
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(CommonBody.model_fields, ((), "Whisper's rules decide how to sample: use temperature")),
    "include[]": ((), "log-probabilities are not returned"),
    "chunking_strategy": (("auto",), "windows follow the timestamps of the text"),
    "known_speaker_names[]": ((), "speakers are not told apart"),
    "known_speaker_references[]": ((), "speakers are not told apart"),
    "keywords[]": ((), "use prompt"),
    "languages[]": ((), "use language"),
    "task": ((), f"use {AUDIO_PATHS['translate']} to translate"),
}


def add_audio(app: FastAPI, state: ServerState) -> None:
    """Add both endpoints. For a model that hears nothing, they give a 404 that says so."""
    properties = {name: {"type": "string"} for name in FIELDS} | {"file": {"type": "string", "format": "binary"}}
    schema = {"type": "object", "properties": properties, "required": ["file"]}
    for path in AUDIO_PATHS.values():

        @app.post(
            path,
            responses=replies(TranscriptReply, TranscriptEvent),
            openapi_extra={"requestBody": {"required": True, "content": {FORM: {"schema": schema}}}},
        )
        async def transcribe(request: Request) -> Response:
            return await _transcribe(state, request)


@dataclass
class Form:
    """The fields of a form, checked. Raises: ApiError naming the field that is wrong."""

    fields: dict[str, list[str]]
    files: dict[str, bytes]
    ignored: list[str] = field(default_factory=list)

    def __post_init__(self):
        for name, values in self.fields.items():
            # Some libraries send a list without brackets. OpenAI's SDK sends an object as chunking_strategy[type] etc.
            plain = name.partition("[")[0]
            neutral, why = REFUSED.get(name) or REFUSED.get(f"{plain}[]") or REFUSED.get(plain) or ((), "")
            if name in FIELDS:
                if len(values) > 1:
                    raise ApiError(400, f"{name} is given {len(values)} times", param=name)
            elif why and not {*values}.issubset(neutral):
                raise unsupported(name[:100], why)
            elif not why and name not in (*WITHOUT_EFFECT, GRANULARITIES, GRANULARITIES[:-2], "file"):
                self.ignored.append(name[:100])
        for name in self.files:
            if name != "file":
                raise ApiError(400, f"{name[:50]} is a file: send it as file", param=name)
        if "file" not in self.files:
            raise ApiError(400, "file is missing, or is not sent as a file", param="file")

    def get(self, name: str, default: str = "") -> str:
        return self.fields.get(name, [""])[0] or default

    @property
    def streams(self) -> bool:
        if (value := self.get("stream", "false").lower()) not in ("true", "false"):
            raise ApiError(400, "stream must be true or false", param="stream")
        return value == "true"

    @property
    def granularities(self) -> set[str]:
        return {*(self.fields.get(GRANULARITIES) or self.fields.get(GRANULARITIES[:-2]) or [])}

    def response_format(self) -> str:
        """Also checks what depends on it."""
        wanted = self.get("response_format", "json")
        if wanted not in FORMATS:
            raise ApiError(400, f"response_format must be one of {', '.join(FORMATS)}", param="response_format")
        if self.streams and wanted not in ("json", "text"):
            raise ApiError(400, f"stream=true has events of text: there are none in {wanted}", param="stream")
        if not self.granularities <= {"word", "segment"}:
            raise ApiError(400, f"{GRANULARITIES} must be word or segment", param=GRANULARITIES)
        if self.granularities and wanted != "verbose_json":
            raise ApiError(400, f"{GRANULARITIES} needs response_format=verbose_json", param=GRANULARITIES)
        return wanted

    def options(self, task: str) -> Options:
        try:
            language = language_code(self.get("language")) if self.get("language") else None
            temperature, words = float(self.get("temperature", "0")), "word" in self.granularities
            return Options(language, task, self.get("prompt"), temperature, words=words)
        except ValueError as error:
            if str(error).startswith("could not convert"):
                raise ApiError(400, "temperature must be a number", param="temperature") from None
            raise invalid(error, FIELDS) from None


def read_form(headers: Mapping[str, str], body: bytes) -> Form:
    """Read the form in a body. Raises: ApiError; ImportError without the extra."""
    try:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import FormParser, parse_options_header
    except ImportError as error:
        raise ImportError(f"forms need python-multipart: {error}; pip install 'nanopage[audio]'") from None

    kind, options = parse_options_header(headers.get("content-type", ""))
    if kind != FORM.encode() or not options.get(b"boundary"):
        raise ApiError(400, f"the body must be a form, with the content-type {FORM}")
    fields: dict[str, list[str]] = {}
    files: dict[str, bytes] = {}

    def add_field(part: Any) -> None:
        name, value = _text(part.field_name, "a field's name"), part.value or b""
        if len(value) > MAX_FIELD_SIZE:
            raise ApiError(400, f"{name[:50]} has {len(value):,} bytes: at most {MAX_FIELD_SIZE:,}", param=name)
        fields.setdefault(name, []).append(_text(value, name))
        if sum(map(len, fields.values())) > MAX_FIELDS:
            raise ApiError(400, f"the form has more than {MAX_FIELDS} fields")

    def add_file(part: Any) -> None:
        name = _text(part.field_name, "a field's name")
        if name in files:
            raise ApiError(400, f"{name[:50]} is given twice: a call has one file", param=name)
        part.file_object.seek(0)
        files[name] = part.file_object.read()

    in_memory = {"MAX_MEMORY_FILE_SIZE": len(body)}
    parser = FormParser(FORM, add_field, add_file, boundary=options[b"boundary"], config=in_memory)
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise ApiError(400, f"the form is not valid: {error}") from None
    return Form(fields, files)


def _text(value: bytes | None, name: str) -> str:
    try:
        return (value or b"").decode()
    except UnicodeDecodeError:
        raise ApiError(400, f"{name[:50]} is not UTF-8", param=name) from None


def _open(state: ServerState, llm: AsyncLLM, request: Request, body: bytes) -> tuple[Transcription, Form]:
    """Check a call, and open its file. Runs in a thread. Raises: ApiError."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    task = next(task for task, served in AUDIO_PATHS.items() if served == path)
    try:
        import_libraries()
        form = read_form(request.headers, body)
    except ImportError as error:
        raise ApiError(404, f"{path} is not served: {error}", code="not_served") from None
    state.model_name(form.get("model") or None)
    if form.ignored and state.strict_fields:
        raise ApiError(400, f"unknown field {form.ignored[0]!r}", param=form.ignored[0], code="unknown_field")
    tokens = read_speech_tokens(llm.engine)
    if task == "translate" and not tokens.languages:
        raise _not_served(f"The model {state.model_names[0]!r} knows English alone: it does not support {path}.")
    form.response_format()  # raises what is wrong with it
    options = form.options(task)
    salt = request.scope["nanopage.key"] if state.salt_per_key else ""
    try:
        sound = Sound(form.files.pop("file"), MAX_SECONDS)
        try:
            return Transcription(llm, tokens, sound, options, salt), form
        except ValueError as error:
            sound.close()
            raise invalid(error, ("language", "prompt")) from None
    except AudioError as error:
        raise _bad_file(error) from None


def _not_served(message: str) -> ApiError:
    return ApiError(404, message, param="model", code="not_served")


def _bad_file(error: AudioError) -> ApiError:
    return ApiError(400, f"file: {error}", param="file", code="invalid_audio")


async def _transcribe(state: ServerState, request: Request) -> Response:
    """Run a call: check it and open its file, then stream or reply as a whole."""
    started, name = time.perf_counter(), f"trsc-{uuid.uuid4().hex}"
    llm, path = state.require(), request.url.path
    if llm.engine.model_config.architecture != WHISPER:
        raise _not_served(f"The model {state.model_names[0]!r} hears nothing: it does not support {path}.")
    entering = [llm.engine.max_model_len]
    state.enter(llm, entering)
    try:
        job, form = await unless_gone(request, llm.in_thread(_open, state, llm, request, await request.body()))
    except ClientGoneError:
        state.num_disconnects += 1
        raise
    finally:
        state.leave(entering)
    headers, wanted = ignored_header(form.ignored[:50]), form.response_format()
    state.num_active += 1

    async def end(how: str) -> None:
        state.num_active -= 1
        state.num_disconnects += how == GONE
        state.transcribed_seconds += job.position
        request.scope["nanopage.call"] = {"id": name, "end": how, "sound_seconds": round(job.position, 2)}
        calls.info(f"{path} {name}: {how} after {time.perf_counter() - started:.2f} s, {job.position:.1f} s of sound")
        await asyncio.to_thread(job.sound.close)

    if form.streams:
        return EventStream(_events(job), ApiError.body, headers, end)

    async def reply() -> Response:
        async for _ in _events(job):
            pass
        if wanted not in ("json", "verbose_json"):
            return PlainTextResponse(FORMATS[wanted][1](job), headers=headers)
        made = as_json(job) if wanted == "json" else as_verbose_json(job)
        if form.granularities == {"word"}:  # words, and no segments
            del made["segments"]
        return json_response(made, headers=headers)

    return await whole_reply(request, reply(), end)


async def _events(job: Transcription) -> AsyncIterator[dict]:
    """The events of a stream. Raises: ApiError, EngineDeadError."""
    sent = 0
    try:
        async for _ in job.run():
            if delta := job.text[sent:]:
                yield {"type": "transcript.text.delta", "delta": delta}
            sent += len(delta)
    except AudioError as error:
        raise _bad_file(error) from None
    except EngineDeadError:
        raise
    except RuntimeError as error:
        logger.error(str(error))
        message = "the sound could not be transcribed: the server's log says why"
        raise ApiError(500, message, code="request_failed") from None
    yield {"type": "transcript.text.done"} | as_json(job)
