"""A recording as one HTML file: the page of the live view with the recording in it. It needs no server and loads
nothing.

The file has the frames as JSON lines, gzipped and in base64. A policy in the file lets a browser run the page's own
script and nothing else, and forbids every request.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nanopage.view.picture import Picture, read_recording

VIEW = Path(__file__).parent
PAGE, RUNS = VIEW / "view.html", VIEW / "runs"  # `runs`: the recordings that come with nanopage
MAX_BYTES = 2**28  # of the frames: the page reads no more


def shipped_recordings() -> dict[str, Path]:
    """name -> file, of the recordings that come with nanopage."""
    return {file.name.removesuffix(".jsonl.gz"): file for file in sorted(RUNS.glob("*.jsonl.gz"))}


def find_recording(name: str) -> Path:
    """The file with this path, or the recording of this name that comes with nanopage.

    Raises: FileNotFoundError that names them all.
    """
    shipped, file = shipped_recordings(), Path(name).expanduser()
    if not file.is_file() and name in shipped:
        return shipped[name]
    if not file.exists():
        raise FileNotFoundError(f"no file {name}, and no recording of this name: there are {', '.join(shipped)}")
    return file


def make_page(recording: Path, title: str, questions: Sequence[tuple[str, str]] = ()) -> bytes:
    """The HTML file of a recording.

    Args:
        questions: (question, answer) as plain text. The page shows an answer once the reader has tried one. "step 12"
            in them becomes a button that shows this step.

    Raises: ValueError that names the recording if it is none, is empty or is larger than MAX_BYTES; OSError.
    """
    picture, lines, size = Picture(), [], 0
    for number, frame in enumerate(read_recording(recording), 1):
        try:
            picture.apply(frame)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{recording}, line {number}: {type(error).__name__}: {error}") from None
        lines.append(msgspec.json.encode(frame) + b"\n")
        size += len(lines[-1])
        if size > MAX_BYTES:
            raise ValueError(f"{recording} has more than {MAX_BYTES >> 20} MiB of frames, too many for a page")
    if not lines:
        raise ValueError(f"{recording} is empty")
    packed = base64.b64encode(gzip.compress(b"".join(lines), mtime=0)).decode()
    data = msgspec.json.encode({"recording": packed, "title": title, "questions": questions}).replace(b"<", rb"\u003c")
    page = PAGE.read_bytes()
    rules = f'<meta http-equiv="content-security-policy" content="{policy(page)}">'.encode()
    page = page.replace(b'<meta charset="utf-8">', b'<meta charset="utf-8">\n' + rules, 1)
    element = b'<script id="recording" type="application/json">' + data + b"</script>\n"
    return page.replace(b"<script>", element + b"<script>", 1)


def policy(page: bytes) -> str:
    """A content security policy: the browser runs the page's one script, which it knows by its hash, and no other,
    whatever text gets into the page. The page may show data URLs, such as its icon, and requests nothing."""
    (script,) = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
