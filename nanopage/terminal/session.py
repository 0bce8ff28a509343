"""A conversation as data: its turns, system message and sampling settings, and the file that keeps it."""

import ast
import contextlib
import dataclasses
import json
import os
import tempfile
from datetime import datetime
from pathlib import Path

from nanopage.files.model_files import check_file, find_surrogate, read_json
from nanopage.params import SamplingParams
from nanopage.terminal.images import check_images
from nanopage.text.chat_template import normalize_messages
from nanopage.vllm.engine_args import nearest

FORMAT, VERSION = "nanopage chat session", 3  # version 1 has no calls of tools, and version 2 no images
MAX_BYTES = 16 << 20  # of a session file: far more than any context holds
MOST = 20  # conversations that are kept; older ones are deleted
# Settings without an effect in a conversation, where there is one reply, shown as text.
NOT_SETTINGS = ("n", "best_of", "detokenize", "logprobs", "prompt_logprobs", "output_kind")
SETTINGS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in NOT_SETTINGS)


@dataclasses.dataclass
class Session:
    """`messages` are the user's and the assistant's in turn. `first` is the index of the first message that is still
    sent. A message of the assistant may have "steps": the messages that came before its content, which are calls of
    tools and their results. A message of the user may have "images" (images.py)."""

    params: SamplingParams
    system: str | None = None
    messages: list[dict] = dataclasses.field(default_factory=list)
    first: int = 0
    model: str = ""  # the model's name, which is saved with the session

    def prompt(self, messages: list[dict], first: int) -> list[dict]:
        """The conversation to send: the system message, and these messages from `first` on."""
        sent = [{"role": "system", "content": self.system}] if self.system else []
        for message in messages[first:]:
            sent += message.get("steps", [])
            sent.append({name: value for name, value in message.items() if name != "steps"})
        return sent

    def changed(self, name: str, text: str) -> SamplingParams:
        """The settings with one of them changed. Raises ValueError, TypeError in the engine's own words."""
        return dataclasses.replace(self.params, **{name: parse_value(check_setting(name), text)})

    def settings(self) -> dict:
        return {name: getattr(self.params, name) for name in SETTINGS}

    def to_json(self) -> str:
        fields = {name for message in self.messages for name in message}
        data = {
            "format": FORMAT,
            "version": 3 if "images" in fields else 2 if "steps" in fields else 1,
            "model": self.model,
            "system": self.system,
            "messages": self.messages,
            "settings": self.settings(),
        }
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    def save(self, file: Path) -> None:
        """Write a file that only the user can read, whole or not at all. Raises ValueError, OSError. A session at
        `file` is replaced. Anything else there is refused."""
        file = file.expanduser().resolve()
        if not file.parent.is_dir():
            raise FileNotFoundError(f"no directory {file.parent}")
        if file.exists():
            try:
                _read_file(file)
            except ValueError:
                raise ValueError(f"{file} exists and is not a session: not overwritten") from None
        write_atomically(file, self.to_json())

    def load(self, file: Path) -> str:
        """Take over what `file` holds. Returns the name of the model it was saved with. Raises: ValueError, OSError
        naming the file and what is wrong with it; nothing has changed then."""
        file = file.expanduser()
        data = _read_file(file)
        version = data.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError(f"{file}: version must be a positive integer, got {version!r}")
        if version > VERSION:
            raise ValueError(f"{file} was saved by a newer nanopage: version {version}, this one reads up to {VERSION}")
        try:
            model, system, messages, params = _read(data)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged: {error}") from None
        self.system, self.messages, self.params, self.first = system, messages, params, 0
        return model


def _read_file(file: Path) -> dict:
    """The object in a session file."""
    check_file(file)
    if (size := file.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{file} is not a session: it has {size >> 20} MiB, and a session at most {MAX_BYTES >> 20}")
    data = read_json(file)
    if data.get("format") != FORMAT:
        raise ValueError(f"{file} is not a session of nanopage")
    return data


def _read(data: dict) -> tuple[str, str | None, list[dict], SamplingParams]:
    fields = {"format", "version", "model", "system", "messages", "settings"}
    if missing := fields - data.keys():
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    if unknown := data.keys() - fields:
        raise ValueError(f"fields that are not known: {', '.join(sorted(unknown))}")
    model, system, messages, settings = (data[name] for name in ("model", "system", "messages", "settings"))
    if not isinstance(model, str):
        raise TypeError(f"model must be a string, not {model!r}")
    if not (system is None or isinstance(system, str)):
        raise TypeError(f"system must be a string or null, not {system!r}")
    if not isinstance(messages, list) or len(messages) % 2:
        raise ValueError("messages must be a list of pairs, a user's and an assistant's")
    for i, message in enumerate(messages):
        role = ("user", "assistant")[i % 2]
        fields = message.keys() - {("images", "steps")[i % 2]} if isinstance(message, dict) else message
        if not isinstance(message, dict) or {*fields} != {"role", "content"} or message["role"] != role:
            raise ValueError(f"messages[{i}] must be {{'role': '{role}', 'content': ...}}, got {message!r}")
        if "steps" in message:
            message["steps"] = _check_steps(message["steps"], f"messages[{i}]['steps']")
        if "images" in message:
            check_images(message["images"], f"messages[{i}]['images']")
        if not isinstance(message["content"], str):
            raise TypeError(f"messages[{i}]['content'] must be a string, not {message['content']!r}")
    if not isinstance(settings, dict):
        raise TypeError(f"settings must be an object, not {settings!r}")
    params = SamplingParams(**{check_setting(name): _setting(name, value) for name, value in settings.items()})
    return model, system, messages, params


def _check_steps(steps, name: str) -> list[dict]:
    """Calls of tools and their results, as a chat has them. Raises: ValueError, TypeError for other messages."""
    if not isinstance(steps, list) or not steps:
        raise TypeError(f"{name} must be a list of messages")
    steps = normalize_messages(steps)
    if any(message["role"] not in ("assistant", "tool") for message in steps):
        raise ValueError(f"{name} must have the roles assistant and tool")
    return steps


def parse_value(name: str, text: str):
    """The value of a typed setting: JSON, or Python's None, True, False and lists, or else a string."""
    text = text.strip()
    python = {"none": "None", "true": "True", "false": "False"}.get(text.lower(), text)
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = parse(python)
            break
    else:
        value = text
    return _setting(name, value)


def _setting(name: str, value):
    """A setting from its JSON value: keys of logit_bias become integers, and text is checked."""
    if name == "logit_bias" and isinstance(value, dict):
        return {int(key) if str(key).lstrip("-").isdecimal() else key: bias for key, bias in value.items()}
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (at := find_surrogate(text)) >= 0:
            raise ValueError(f"{name} has a lone surrogate, U+{ord(text[at]):04X}: it is no text")
    return value


def check_setting(name: str) -> str:
    if name in NOT_SETTINGS:
        raise ValueError(f"{name} cannot be set here: a conversation has one reply, shown as text")
    if name not in SETTINGS:
        raise ValueError(f"there is no setting {name!r}{nearest(name, SETTINGS)}; settings: {', '.join(SETTINGS)}")
    return name


def write_atomically(file: Path, text: str) -> None:
    """Write a file that appears whole or not at all, readable by the user alone."""
    descriptor, scratch = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")  # creates it with mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(scratch, file)
    except BaseException:
        os.unlink(scratch)
        raise


def state_directory() -> Path:
    """`$XDG_STATE_HOME/nanopage`, by default `~/.local/state/nanopage`. A relative XDG_STATE_HOME is ignored
    (https://specifications.freedesktop.org/basedir-spec)."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "nanopage"


def may_keep() -> bool:
    """Whether typed text may be written to disk: not with NANOPAGE_HISTORY=0. Raises ValueError for other values."""
    value = os.environ.get("NANOPAGE_HISTORY", "1")
    if value not in ("", "0", "1"):
        raise ValueError(f"NANOPAGE_HISTORY must be 0 or 1, got {value!r}")
    return value != "0"


class Kept:
    """The file of the present conversation, and the files of earlier conversations.

    Args: directory: where the files are; made when first needed.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.begin()

    def begin(self, file: Path | None = None, session: Session | None = None) -> None:
        """Make the next `keep` write another conversation: a new one, or `session`, which was read from `file`. A kept
        `file` is then replaced by a file with a new name, because another terminal may be writing to `file`."""
        self._before = file if file is not None and file.parent == self.directory else None
        self._written = session.to_json() if self._before is not None and session is not None else None
        self._file: Path | None = None

    def keep(self, session: Session) -> None:
        """Write the conversation, if there is one and it has changed since the last call. Raises OSError."""
        text = session.to_json()
        if not session.messages or text == self._written:
            return
        if self._file is None:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self.directory / f"{datetime.now():%Y-%m-%d-%H%M%S-%f}.json"
        write_atomically(self._file, text)
        self._written = text
        if self._before is not None:
            self._before.unlink(missing_ok=True)
            self._before = None
        for old in self._files()[MOST:]:
            old.unlink(missing_ok=True)

    def earlier(self) -> list[Path]:
        """The kept conversations, the latest first, except for the one that this process writes."""
        return [file for file in self._files() if file != self._file]

    def _files(self) -> list[Path]:
        ages = []
        for file in self.directory.glob("[0-9]*.json"):
            with contextlib.suppress(OSError):  # another process has just replaced it
                ages.append((file.stat().st_mtime_ns, file))
        return [file for _, file in sorted(ages, reverse=True)]
