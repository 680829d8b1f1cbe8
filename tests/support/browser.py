"""A page in headless Chromium, told what to do by its DevTools protocol over a pair of pipes."""

import fcntl
import json
import os
import shutil
import signal
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ALARMING = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.requestWillBeSent")
READ, WRITE = 3, 4  # where Chromium reads commands and writes answers
FREE = 10  # descriptors from here on are in nobody's way


class Page:
    """A tab.

    Attributes:
        complaints: What was written to the console, thrown, or asked of a network since the page was opened.
    """

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._session: str | None = None
        self._sent = 0
        self.complaints: list[str] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> Any:
        self._sent += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._sent, "method": method, "params": parameters, **session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (heard := self._hear()).get("id") != self._sent:
            pass
        assert "error" not in heard, f"{method}: {heard['error']}"
        return heard["result"]

    def open(self, file: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        phone = width < 500
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        self.do("Emulation.setTouchEmulationEnabled", enabled=phone, maxTouchPoints=2)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.do("Emulation.setEmulatedMedia", features=features)
        self.complaints = []
        self.do("Page.navigate", url=file.as_uri())
        while self._hear().get("method") != "Page.loadEventFired":
            pass
        self.value("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    def value(self, script: str) -> Any:
        """What an expression comes to, once it is no promise any more."""
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """What can be read in an element, as it is seen; empty if it is hidden."""
        found = f"document.querySelector({json.dumps(selector)})"
        return str(self.value(f"((one) => (one.checkVisibility() ? one.innerText : ''))({found})"))

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.do("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def fingers(self, kind: str, *places: tuple[float, float]) -> None:
        """Puts fingers on places of the window, moves them there, or ends the touch."""
        self.do("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=[{"x": x, "y": y} for x, y in places])

    def key(self, name: str) -> None:
        text = {"text": name} if len(name) == 1 else {}
        self.do("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        self.do("Input.dispatchKeyEvent", type="keyUp", key=name)

    def picture(self, file: Path, *, whole: bool = True) -> None:
        found = self.do("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        file.write_bytes(b64decode(found["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        size = self.do("Page.getLayoutMetrics")["cssContentSize"] if whole else None
        return {"clip": {**size, "scale": 1}} if size else {}

    def _hear(self) -> dict[str, Any]:
        raw = b""
        while not raw.endswith(b"\0"):
            byte = self._answers.read(1)
            assert byte, "Chromium is gone"
            raw += byte
        heard: dict[str, Any] = json.loads(raw[:-1])
        if heard.get("method") in ALARMING and not is_the_page(heard):
            self.complaints.append(json.dumps(heard["params"]))
        return heard


def is_the_page(event: dict[str, Any]) -> bool:
    """Whether an event is that the file itself was asked for, or what is in an address itself."""
    url = event["params"].get("request", {}).get("url", "")
    return url.startswith("data:") or event["params"].get("type") == "Document"


@contextmanager
def browser() -> Iterator[Page]:
    """A page in a Chromium of its own, with a folder of its own, that ends with the block."""
    assert CHROMIUM is not None
    their_commands, commands = raised(os.pipe())
    answers, their_answers = raised(os.pipe())
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ["--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        options += ["--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
        options += ["--no-sandbox"] if os.getuid() == 0 else []
        ways = [(os.POSIX_SPAWN_DUP2, their_commands, READ), (os.POSIX_SPAWN_DUP2, their_answers, WRITE)]
        quiet = [(os.POSIX_SPAWN_OPEN, out, os.devnull, os.O_WRONLY, 0) for out in (1, 2)]
        spawned = os.posix_spawn(
            CHROMIUM, [CHROMIUM, *options], os.environ, file_actions=[*quiet, *ways], setpgroup=0
        )
        os.close(their_commands)
        os.close(their_answers)
        try:
            with os.fdopen(answers, "rb") as heard, os.fdopen(commands, "wb", buffering=0) as told:
                yield Page(told, heard)
        finally:
            os.killpg(spawned, signal.SIGKILL)
            os.waitpid(spawned, 0)


def raised(pipe: tuple[int, int]) -> tuple[int, int]:
    """The ends of a pipe under numbers that are not those of Chromium's own."""
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FREE) for end in pipe)
    for end in pipe:
        os.close(end)
    return read, write
