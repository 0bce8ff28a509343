"""Makes the moving picture in the README: the live view plays a recording in Chromium, step by step.

python docs/view_picture.py        # writes docs/view.webp

Needs Chromium, and Pillow (pip install -e '.[vision]').
"""

import base64
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from nanopage.view.export import find_recording, make_page
from nanopage.view.picture import read_recording

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests" / "server"))

from browser import Browser  # noqa: E402

RECORDING, LAST_STEP = "preemption", 44
WIDTH, HEIGHT = 900, 560
MILLISECONDS, AT_THE_END = 500, 3000
# Only what fits: no controls, no legends, the first row of counters.
STYLE = (
    "header > :not(h1, #mode), .legend, #detail, td .long, #numbers div:nth-child(n + 8) { display: none; } "
    "html { overflow: hidden; } #sentences.long { height: 10.3rem; overflow: hidden; }"
)
PAINTED = "new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))"


def screenshots(browser: Browser, page: Path) -> list[Image.Image]:
    """The page after each of the first steps in which more was decided than who waits."""
    browser.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
    browser.open(page.as_uri())
    browser.wait_for("frames.length > 0")
    browser.evaluate(f"document.head.append(element('style', {{ textContent: '{STYLE}' }}))")
    pictures = []
    for index, frame in enumerate(read_recording(find_recording(RECORDING))):
        if index > LAST_STEP or not {kind for kind, _, _ in frame["why"]} - {"wait", "run"}:
            continue
        # The page says that it plays, but the step is chosen here.
        browser.evaluate(f"[isPlaying, playedAt, lastTable] = [true, Infinity, 0]; seek({index})")
        browser.evaluate(PAINTED)
        png = browser.call("Page.captureScreenshot", format="png")["data"]
        pictures.append(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))
    return pictures


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_bytes(make_page(find_recording(RECORDING), RECORDING))
        browser = Browser(Path(folder) / "profile")
        try:
            first, *rest = screenshots(browser, page)
        finally:
            browser.close()
    file = DOCS / "view.webp"
    durations = [MILLISECONDS] * len(rest) + [AT_THE_END]
    first.save(file, save_all=True, append_images=rest, duration=durations, loop=0, lossless=True, quality=60, method=4)
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
