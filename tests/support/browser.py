"""Chromium, driven over its DevTools pipe: pages as people see them, with what they said on the console and what they asked of the network.

Needs no driver and no port. Every wait has a deadline.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking --disable-component-update --disable-sync"
    " --disable-quic --disable-extensions --remote-debugging-pipe"
)


class Browser:
    """One headless Chromium with one page. Use as a context manager."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 1000) -> None:
        read_fd, self._out = os.pipe()
        self._in, write_fd = os.pipe()
        flags = [*FLAGS.split(), f"--window-size={width},{height}", f"--user-data-dir={folder}/chromium", "about:blank"]
        script = f'exec chromium "$@" 3<&{read_fd} 4>&{write_fd}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *flags], pass_fds=(read_fd, write_fd), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_fd)
        os.close(write_fd)
        self._rest = b""
        self._number = 0
        self._session = ""
        self._width, self._height = width, height
        self.console: list[str] = []
        """What went wrong: errors and warnings of scripts, of the policy, of the network."""
        self.requests: list[str] = []

    def __enter__(self) -> Browser:
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)

    def open(self, url: str, settle_s: float = 0.0) -> float:
        """Load a page; seconds until its load event."""
        self.console.clear()
        self.requests.clear()
        began = time.monotonic()
        failed = self._call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'", 60, f"{url} has loaded")
        took_s = time.monotonic() - began
        if settle_s:
            self._read_for(settle_s)
        return took_s

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, deadline_s: float, why: str) -> Any:
        """The first true value of an expression; AssertionError with `why` after deadline_s."""
        end = time.monotonic() + deadline_s
        while not (value := self.ask(expression)):
            assert time.monotonic() < end, f"not within {deadline_s} s: {why}"
            self._read_for(0.1)
        return value

    def dark(self, on: bool) -> None:
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}])

    def scripts(self, on: bool) -> None:
        self._call("Emulation.setScriptExecutionDisabled", value=not on)

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text="\r" if key == "Enter" else "")

    def tab_stops(self, most: int = 60) -> list[str]:
        """What the tabulator key reaches, in order: tag and name."""
        found = []
        name = "(e.getAttribute('aria-label')||e.textContent).trim().slice(0,80)"
        describe = f"(function(){{var e=document.activeElement;return e===document.body?'':e.tagName+' '+{name}}})()"
        for _ in range(most):
            self.press("Tab", 9)
            here = self.ask(describe)
            if not here:
                break
            found.append(here)
        return found

    def picture(self, path: Path, whole: bool = False) -> None:
        """The page as a PNG: what fits the window, or all of it."""
        height = min(int(self.ask("document.documentElement.scrollHeight")), 6000) if whole else self._height
        self.resize(self._width, height)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))
        self.resize(self._width, self._height)

    def paint_ms(self) -> float:
        """When the first contents were painted, by the page's own clock."""
        return float(self.ask("(performance.getEntriesByName('first-contentful-paint')[0]||{startTime:-1}).startTime"))

    def axe(self) -> list[str]:
        """Violations that axe-core finds: WCAG 2 A and AA, and its best practices. Empty: none."""
        import axe_core_python

        self.ask((Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8") + ";true")
        found = self.ask(
            "axe.run(document,{runOnly:['wcag2a','wcag2aa','wcag21a','wcag21aa','best-practice']}).then(function(r){return JSON.stringify(r.violations)})"
        )
        return [f"{one['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:300]}" for one in json.loads(found) for node in one["nodes"]]

    # -- the pipe --------------------------------------------------------------------------------------------------------------

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": self._session} if self._session else {})}
        self._write_all(json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 90
        while True:
            answer = self._next(end - time.monotonic())
            assert answer is not None, f"Chromium does not answer {method}"
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]  # type: ignore[no-any-return]

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._out, data) :]

    def _read_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            self._next(left_s)

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, its news noted; None where none comes in time."""
        end = time.monotonic() + max(0.0, timeout_s)
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, news: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(news["request"]["url"])
        elif method == "Log.entryAdded" and news["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{news['entry']['text']} {news['entry'].get('url', '')}")
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(news["exceptionDetails"].get("exception", {}).get("description") or news["exceptionDetails"]["text"]))
        elif method == "Runtime.consoleAPICalled" and news["type"] in ("error", "warning", "assert"):
            self.console.append(str(news["args"]))
