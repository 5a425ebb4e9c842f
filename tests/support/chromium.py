"""A real browser without a window, for tests and benchmarks of the report: Chromium, over its
debugging pipe. Nothing but the standard library; `find_chromium` says whether one is installed.

Every wait has a deadline; leaving the `with` block ends the browser and removes its profile.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TO_BROWSER, _FROM_BROWSER = 3, 4  # the descriptors of --remote-debugging-pipe


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((found for name in _NAMES if (found := shutil.which(name)) is not None), None)


class Chromium:
    """One browser with one page. `messages` are what the page wrote to its console, errors too."""

    def __init__(self, program: str | None = None, *, timeout_s: float = 60.0) -> None:
        self._program = program or find_chromium()
        if self._program is None:
            raise FileNotFoundError("no Chromium is installed (Debian: apt-get install chromium-headless-shell)")
        self._timeout_s = timeout_s
        self._number = 0
        self._read = b""
        self._events: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Chromium:
        self._profile = Path(tempfile.mkdtemp(prefix="toolgrpo-chromium-"))
        to_read, self._write_end = os.pipe()
        self._read_end, to_write = os.pipe()
        script = f'exec "$@" {_TO_BROWSER}<&{to_read} {_FROM_BROWSER}>&{to_write}'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._profile}", "--no-first-run"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", str(self._program), *flags, "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", {})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._write_end)
        os.close(self._read_end)
        shutil.rmtree(self._profile, ignore_errors=True)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Take on a screen of this size, and a colour scheme."""
        phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self._call("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str, *, until: str = "document.documentElement?.dataset.ready === 'yes'") -> float:
        """Load a page; return the seconds until this expression is true in it."""
        began = time.monotonic()
        self._call("Page.navigate", {"url": url})
        self.wait_for(until)
        return time.monotonic() - began

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + self._timeout_s
        while time.monotonic() < end:
            if self.run(expression) is True:
                return
            time.sleep(0.02)
        raise TimeoutError(f"not true in the page within {self._timeout_s:g} s: {expression}; console: {self.messages}")

    def run(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives; a promise is waited for."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self._call("Runtime.evaluate", asked)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {json.dumps(answer['exceptionDetails'])[:800]}")
        return answer["result"].get("value")

    def press(self, key: str, code: str | None = None) -> None:
        """Press a key as a person does."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", {"type": kind, "key": key, "code": code or key, **text})

    def picture(self, to: Path, *, whole_page: bool = False) -> None:
        """Write what is seen as a PNG."""
        taken = self._call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole_page})
        to.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": dict(given)}
        if getattr(self, "_session", None) is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write_end, data) :]
        end = time.monotonic() + self._timeout_s
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._hear(answer)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._read_end], [], [], left)[0]:
                raise TimeoutError(f"the browser did not answer within {self._timeout_s:g} s")
            piece = os.read(self._read_end, 1 << 20)
            if not piece:
                raise RuntimeError("the browser went away")
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))

    def _hear(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(one.get("value", one.get("description"))) for one in given["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(given["exceptionDetails"])[:800])
        elif method == "Log.entryAdded":
            self.messages.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
