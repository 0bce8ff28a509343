"""Images of all kinds, also hostile ones, to RGB; and where they come from."""

import io
import re
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image
from seeing import data_url, documented, file_of, picture

from nanopage.vision import images, sources
from nanopage.vision.images import decode, to_rgb
from nanopage.vision.sources import Sources, is_public

RGB = picture(40, 30)


def array(image):
    return np.asarray(image)


@pytest.mark.parametrize("kind", images.FORMATS)
def test_files_of_every_format_are_read(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    image = RGB.quantize(255) if kind == "GIF" else RGB
    expected = Image.open(io.BytesIO(file_of(image, kind, **options))).convert("RGB")
    found = decode(file_of(image, kind, **options))
    assert found.mode == "RGB" and (array(found) == array(expected)).all()


def test_modes_become_rgb():
    gray = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for wide in (gray.astype(np.uint16) << 8) + 7, gray.astype(np.int32) << 8:
        assert (array(to_rgb(Image.fromarray(wide)))[:, :, 0] == gray).all()
    assert (array(decode(file_of(Image.fromarray(gray.astype(np.uint16) * 257))))[:, :, 1] == gray).all()
    for mode in ("L", "1", "P", "CMYK", "YCbCr", "HSV"):
        assert to_rgb(RGB.convert(mode)).mode == "RGB"
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert array(decode(file_of(clear))).min() == 255  # transparency becomes white
    half = Image.new("LA", (4, 4), (0, 128))
    assert set(array(to_rgb(half)).ravel()) == {127}
    palette = RGB.quantize(8)
    assert decode(file_of(palette, transparency=palette.getpixel((5, 5)))).getpixel((5, 5)) == (255, 255, 255)


def test_images_are_turned_as_their_exif_data_say():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    turned = decode(file_of(RGB, exif=exif))
    assert turned.size == (30, 40) and (array(turned) == array(RGB.transpose(Image.Transpose.ROTATE_270))).all()


def png(width, height, data=b""):
    """A PNG of one bit a pixel, with as much data as given."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(data)),
        (b"IEND", b""),
    ]
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


FRAMES = [RGB, RGB.transpose(Image.Transpose.ROTATE_180)]
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
HOSTILE = {
    "not an image": b"hello",
    "empty": b"",
    "PostScript, which Pillow would give to another program": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "svg": SVG,
    "a decompression bomb": png(60_000, 60_000, bytes(1000)),
    "a smaller bomb": png(8000, 7000, bytes(1000)),
    "half a png": file_of(RGB)[:-200],
    "half a jpeg": file_of(RGB, "JPEG")[:400],
    "a png without pixels": png(10, 10),
    "a wrong checksum": file_of(RGB)[:60] + b"x" + file_of(RGB)[61:],
    "an animated gif": file_of(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
    "an animated png": file_of(FRAMES[0], save_all=True, append_images=FRAMES[1:]),
    "an animated webp": file_of(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]),
    "a large file": bytes(images.MAX_BYTES + 1),
}


@pytest.mark.parametrize(("name", "error"), documented("file").items())
def test_hostile_files_are_refused(name, error):
    with pytest.raises(ValueError, match=f"^{re.escape(error)}"):
        decode(HOSTILE[name])


def test_all_hostile_files_are_documented():
    assert documented("file").keys() == HOSTILE.keys()


def test_other_objects_than_images_are_refused():
    for wrong in (None, 5, b"x", np.zeros((4, 4, 3))):
        with pytest.raises(TypeError, match=r"must be a PIL\.Image\.Image"):
            to_rgb(wrong)
    with pytest.raises(ValueError, match="mode F"):
        to_rgb(Image.new("F", (4, 4)))
    with pytest.raises(ValueError, match="0 x 4 pixels"):
        to_rgb(Image.new("RGB", (0, 4)))


def test_data_urls():
    fetch = Sources().fetch
    assert (array(fetch(data_url(RGB))) == array(RGB)).all()
    for wrong in ("data:image/png,abc", "data:image/png;base64", "data:image/png;base64,a%b", "data:;base64,abcde"):
        with pytest.raises(ValueError, match="data URL"):
            fetch(wrong)
    with pytest.raises(ValueError, match="more than 33,554,432"):
        fetch("data:;base64," + "A" * (images.MAX_BYTES * 4 // 3 + 8))
    for wrong in ("", "picture.png", "/etc/passwd", "ftp://a/b", "http://[", "javascript:1"):
        with pytest.raises(ValueError, match=r"is not a URL|images come as"):
            fetch(wrong)


def test_files_come_only_from_the_allowed_directory(tmp_path):
    inside, outside = tmp_path / "in side", tmp_path / "outside"
    for place in inside, outside:
        place.mkdir()
        (place / "a.png").write_bytes(file_of(RGB))
    (inside / "link.png").symlink_to(outside / "a.png")
    with pytest.raises(ValueError, match="allowed_local_media_path"):
        Sources().fetch((inside / "a.png").as_uri())
    fetch = Sources(inside).fetch
    assert fetch((inside / "a.png").as_uri()).size == RGB.size
    for wrong in ("../outside/a.png", "link.png", "..%2Foutside/a.png", "\0"):
        with pytest.raises(ValueError, match="is not within"):
            fetch(f"{inside.as_uri()}/{wrong}")
    with pytest.raises(ValueError, match="is not within"):
        fetch(f"file://elsewhere{inside}/a.png")
    with pytest.raises(ValueError, match="cannot be read"):
        fetch(f"{inside.as_uri()}/missing.png")


class Web(BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"/a.png": file_of(RGB), "/large": bytes(3000)}.get(self.path, b"")
        self.send_response(200 if body else 404 if self.path == "/none" else 302)
        if self.path == "/elsewhere":
            self.send_header("Location", "http://127.0.0.1:1/a.png")
        if self.path in ("/there", "/again"):
            self.send_header("Location", "/a.png" if self.path == "/there" else "/again")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_web_addresses_need_an_allowed_host_with_a_public_address(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://localhost:{server.server_port}"
        with pytest.raises(ValueError, match="'localhost' is not allowed: see allowed_media_domains"):
            Sources().fetch(f"{url}/a.png")
        with pytest.raises(ValueError, match="is not allowed"):
            Sources(domains=frozenset(["host"])).fetch(f"http://host@localhost:{server.server_port}/a.png")
        fetch = Sources(domains=frozenset(["localhost"])).fetch
        with pytest.raises(ValueError, match="not public"):
            fetch(f"{url}/a.png")
        monkeypatch.setattr(sources, "is_public", lambda address: True)
        assert fetch(f"{url}/a.png").size == fetch(f"{url}/there").size == RGB.size
        for path, error in (
            ("none", "the status is 404"),
            ("elsewhere", "'localhost' redirects to another host"),
            ("again", "redirects more than 3 times"),
        ):
            with pytest.raises(ValueError, match=error):
                fetch(f"{url}/{path}")
        with monkeypatch.context() as patched:
            patched.setattr(sources, "SECONDS", 0)
            with pytest.raises(ValueError, match=r"it takes more than 0 s|timed out"):
                fetch(f"{url}/there")
        monkeypatch.setattr(sources, "MAX_BYTES", 2000)
        with pytest.raises(ValueError, match="more than 2,000 bytes"):
            fetch(f"{url}/large")
    finally:
        server.shutdown()
        server.server_close()


def test_which_addresses_are_public():
    assert all(map(is_public, ("8.8.8.8", "2606:4700::1111")))
    private = ("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1")
    assert not any(map(is_public, (*private, "::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::")))
