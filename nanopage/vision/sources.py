"""Where images come from: data URLs, and files and web addresses that the engine's options allow.

A server that fetches what clients name could be led into its own network. So hosts and directories are allowed one by
one, only addresses of the public internet are asked, and a redirect must stay on its host.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from nanopage import escaped
from nanopage.files.model_files import check_file, shown
from nanopage.vision.images import MAX_BYTES, decode

if TYPE_CHECKING:
    from PIL.Image import Image

SECONDS = 10.0  # for a download
REDIRECTS = 3


@dataclass(frozen=True)
class Sources:
    """Fetches images.

    directory: files within it are allowed. None: no files. domains: hosts whose images are allowed.
    """

    directory: Path | None = None
    domains: frozenset[str] = frozenset()

    def fetch(self, url: str) -> Image:
        """The image of a URL. Raises: ValueError saying why there is none."""
        if url.startswith("data:"):
            return decode(_read_data(url))
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ValueError(f"{shown(url)} is not a URL") from None
        if parts.scheme in ("http", "https"):
            return decode(self._download(url))
        if parts.scheme == "file":
            return decode(self._read_file(parts))
        raise ValueError(f"{shown(url)}: images come as data URLs, or by http, https or file")

    def _read_file(self, parts: SplitResult) -> bytes:
        if self.directory is None:
            raise ValueError("files are not allowed: see allowed_local_media_path")
        try:
            path = Path(unquote(parts.path)).resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a null character
            path = Path("/")
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(self.directory.resolve()):
            raise ValueError(f"{shown(parts.path)} is not within allowed_local_media_path")
        try:
            check_file(path)
            with open(path, "rb") as file:
                return file.read(MAX_BYTES + 1)
        except (OSError, ValueError):
            raise ValueError(f"{shown(parts.path)} cannot be read") from None

    def _download(self, url: str) -> bytes:
        """The bytes at a web address. Raises: ValueError."""
        end = time.monotonic() + SECONDS
        for _ in range(REDIRECTS + 1):
            parts = urlsplit(url)
            host = (parts.hostname or "").lower()
            if host not in self.domains:
                raise ValueError(f"the host {shown(host)} is not allowed: see allowed_media_domains")
            try:
                connection = _connect(parts, host, end)
                try:
                    target = parts.path or "/"
                    target += f"?{parts.query}" if parts.query else ""
                    connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "nanopage"})
                    reply = connection.getresponse()
                    if reply.status not in (301, 302, 303, 307, 308):
                        return _read_reply(reply, end)
                    url = urljoin(url, reply.getheader("Location") or "")
                finally:
                    connection.close()
            except (OSError, HTTPException, UnicodeError) as error:
                raise ValueError(f"{shown(url)} cannot be fetched: {escaped(str(error)[:200])}") from None
            if urlsplit(url).scheme not in ("http", "https") or (urlsplit(url).hostname or "").lower() != host:
                raise ValueError(f"{shown(host)} redirects to another host")
        raise ValueError(f"{shown(url)} redirects more than {REDIRECTS} times")


def _read_data(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError("a data URL must be data:image/...;base64,...")
    if len(data) > MAX_BYTES * 4 // 3 + 4:
        raise ValueError(f"the file has more than {MAX_BYTES:,} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the data URL is not valid base64") from None


def _connect(parts: SplitResult, host: str, end: float) -> HTTPConnection:
    """A connection to a host. Its address is checked before anything is asked. Raises: OSError, ValueError."""
    make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = make(host, parts.port, timeout=max(0.1, end - time.monotonic()))
    connection.connect()
    if not is_public(connection.sock.getpeername()[0]):
        connection.close()
        raise ValueError(f"the host {shown(host)} has an address that is not public")
    return connection


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_global and not ip.is_multicast


def _read_reply(reply: HTTPResponse, end: float) -> bytes:
    """The body of a reply. Raises: OSError, ValueError."""
    if reply.status != 200:
        raise OSError(f"the status is {reply.status}")
    data = b""
    while piece := reply.read1(2**16):
        data += piece
        if len(data) > MAX_BYTES:
            raise ValueError(f"the file has more than {MAX_BYTES:,} bytes")
        if time.monotonic() > end:
            raise OSError(f"it takes more than {SECONDS:g} s")
    return data


def check_directory(path: str) -> Path | None:
    """The directory of allowed_local_media_path; None if it is empty. Raises: ValueError if there is none."""
    if not path:
        return None
    if not os.path.isdir(path):
        raise ValueError(f"allowed_local_media_path={path!r} is not a directory")
    return Path(path)
