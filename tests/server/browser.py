"""Headless Chromium, driven over the DevTools protocol."""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), " ": (32, " "), "p": (80, "p"), "ArrowRight": (39, "")}


class Browser:
    """A browser with one page.

    Args:
        profile: a directory for its files.

    Attributes:
        problems: what the page and the browser have reported since the last `open`: console messages and exceptions.
    """

    def __init__(self, profile: Path):
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        options += ("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync")
        command = [CHROMIUM, *options, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        # Chromium reads commands from file descriptor 3 and writes to 4.
        shell = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'
        self.process = subprocess.Popen(
            ["sh", "-c", shell, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.problems: list[str] = []
        self._unread, self._num_calls, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def call(self, method: str, **params: object) -> dict:
        """The result of a command."""
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while True:
            reply = self._read()
            if reply.get("id") == self._num_calls:
                assert "error" not in reply, reply
                return reply["result"]
            if reply.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(reply["params"]))

    def open(self, url: str) -> None:
        """Load a page, in a new session: without what pages stored before."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")
        self.evaluate("sessionStorage.clear()")
        self.problems.clear()
        self.reload()

    def reload(self) -> None:
        """Load the page again, in the same session."""
        self.call("Page.reload")
        self.wait_for("document.readyState === 'complete' && typeof connect === 'function'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, once it is there if it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"not true in {seconds} s: {condition}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def _read(self) -> dict:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self.process.stdout], [], [], 60)
            assert ready, "the browser does not answer"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, "the browser has ended"
            self._unread += data
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)
