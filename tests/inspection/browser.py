"""A headless Chromium, spoken to over its debugging pipe: no driver, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The program, or None where there is none."""


class Browser:
    """One page of a headless Chromium. Closed by `close`."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (to_read, self._write), (self._read, to_write) = os.pipe(), os.pipe()

        # Chromium reads commands from descriptor 3 and writes replies to 4.
        start = (
            f"import os, sys; os.dup2({to_read}, 250); os.dup2({to_write}, 251); "
            "os.dup2(250, 3); os.dup2(251, 4); os.execv(sys.argv[1], sys.argv[1:])"
        )
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._left, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        """Errors and warnings that the page reported: exceptions, refusals of its policy, failed loads."""
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        about = {"targetId": target, "flatten": True}
        self._session = self.call("Target.attachToTarget", about)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises RuntimeError if it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._left:
                part = os.read(self._read, 1 << 20)
                if not part:
                    raise RuntimeError("Chromium has ended")
                self._left += part
            text, _, self._left = self._left.partition(b"\0")
            reply = json.loads(text)
            if reply.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(reply["params"]["exceptionDetails"]))
            if reply.get("method") == "Log.entryAdded":
                self.problems.append(str(reply["params"]["entry"]))
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        result = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        return result["result"].get("value")

    def open(self, address: str) -> None:
        """Load an address."""
        self.call("Page.navigate", {"url": "about:blank"})
        self.call("Page.navigate", {"url": address})

    def wait_for(self, expression: str, seconds: float = 60) -> Any:
        """Wait until an expression is true and return its value. Raises AssertionError with the page's text."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.05)
        raise AssertionError(
            f"{expression} stays false; the page has: {self.evaluate('document.body.innerText')}"
        )

    def press(self, key: str) -> None:
        """Press a key that types a character."""
        for kind in ("keyDown", "keyUp"):
            about = {"type": kind, "key": key, "text": key if kind == "keyDown" else ""}
            self.call("Input.dispatchKeyEvent", about)

    def picture(self, file: Path, *, width: int, is_dark: bool) -> None:
        """Write a screenshot of the page at a width, in its light or dark colours."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)
        time.sleep(0.3)  # charts are drawn again
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)
