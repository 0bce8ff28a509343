"""The HTML pages, with headers that prevent the shown text from running scripts or loading anything."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response


def page_reply(file: Path, *, links_to_view: bool = False) -> Response:
    """The reply with a page.

    The page's one script is allowed by its hash, so a browser runs no other, whatever text gets into the page. Its icon
    is a data URL.
    """
    html = file.read_bytes()
    if links_to_view:
        html = html.replace(b" hidden>Live view", b">Live view")
    (script,) = re.findall(rb"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; connect-src "
        "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(html, headers=headers, media_type="text/html; charset=utf-8")
