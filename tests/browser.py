"""A headless Chromium, driven over its debugging pipe: what a page looks like, and its pixels."""

import base64
import fcntl
import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from matplotlib.image import imread

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DESKTOP, PHONE = (1280, 900), (360, 740)  # CSS pixels


class Browser:
    """One tab.

    Args:
        profile: an empty folder for the browser's own files.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        ours, theirs = os.pipe(), os.pipe()  # commands, answers; each (read, write)
        # Above 9, so that moving them to 3 and 4 overwrites neither.
        inside = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ours[0], theirs[1])]

        def place() -> None:
            os.dup2(inside[0], 3)
            os.dup2(inside[1], 4)

        self._process = subprocess.Popen(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe",
                f"--user-data-dir={profile}", "about:blank",
            ],
            preexec_fn=place, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (ours[0], theirs[1], *inside):
            os.close(fd)
        self._commands, self._answers = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self._count, self._tab = 0, ""
        self.events: list[dict[str, Any]] = []
        tab = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._tab = self._call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, size: tuple[int, int], *, dark: bool = False) -> None:
        """Shows a file at a size in CSS pixels and waits until it has loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0], height=size[1], deviceScaleFactor=1, mobile=size[0] < 600,
        )  # fmt: skip
        self.events.clear()
        self._call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, to: Path | None = None) -> np.ndarray:
        """The whole page, (height, width, 3) uint8, one pixel a CSS pixel."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        png = base64.b64decode(data)
        if to is not None:
            to.write_bytes(png)
        return np.round(255 * imread(io.BytesIO(png))[..., :3]).astype(np.uint8)

    def requests(self) -> list[str]:
        """What the page asked for since it was opened."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[dict[str, Any]]:
        """What the browser's console says since the page was opened."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        self._commands.close()
        self._answers.close()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters}
        if self._tab:
            command["sessionId"] = self._tab
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message, which ends with a zero byte."""
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has gone"
            message += byte
        return json.loads(message)
