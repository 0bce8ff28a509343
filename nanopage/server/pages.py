"""The HTML pages, with headers that prevent the shown text from running scripts or loading anything."""

from pathlib import Path

from starlette.responses import Response

from nanopage.view.export import policy


def page_reply(file: Path, *, links_to_view: bool = False) -> Response:
    """The reply with a page. The page may send requests to this server, and no other site can embed it."""
    html = file.read_bytes()
    if links_to_view:
        html = html.replace(b" hidden>Live view", b">Live view")
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": f"{policy(html)}; connect-src 'self'; frame-ancestors 'none'",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(html, headers=headers, media_type="text/html; charset=utf-8")
