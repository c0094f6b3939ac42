"""A real Chromium, driven over its DevTools protocol: pages, clicks, keys, pictures.

Nothing here waits for a time: `wait` asks until something is so, with a generous limit.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

WAIT_SECONDS = 90
_POLL_SECONDS = 0.03
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
# Finds what a person would: an element that can be seen, by a selector and the beginning of its name.
_FIND = """
window.__find = (selector, name) => {
  const named = (one) => one.getAttribute("aria-label") || one.textContent.trim() || one.value || "";
  const seen = [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility());
  const open = document.querySelector("dialog[open]");
  const near = open ? seen.filter((one) => open.contains(one)) : seen;
  return near.find((one) => name === null || named(one).startsWith(name)) || null;
};
"""


def executable() -> str | None:
    """Where Chromium is on this machine; None where it is not installed."""
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


def until(is_so: Callable[[], Any], what: str) -> Any:
    """The first true answer; AssertionError when there is none in time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"it never came: {what}"
        time.sleep(_POLL_SECONDS)
    return found


class Chromium:
    """One browser; each page has cookies and storage of its own."""

    def __init__(self, process: subprocess.Popen[bytes], connection: ClientConnection) -> None:
        self._process = process
        self._connection = connection
        self._next = 0
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of the protocol; events that come before it are kept."""
        self._next += 1
        command: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        self._connection.send(json.dumps(command))
        while True:
            message = json.loads(self._connection.recv(timeout=WAIT_SECONDS))
            if message.get("id") == self._next:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            if "method" in message:
                self._events.append(message)

    def events(self, session: str) -> list[dict[str, Any]]:
        """What a page has told so far."""
        return [one for one in self._events if one.get("sessionId") == session]

    @contextlib.contextmanager
    def page(self, url: str, width: int = 1280, height: int = 860, *, dark: bool = False) -> Iterator[Page]:
        """A new page at this address, closed at the end."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, url)
        page.open(width, height, dark)
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)
            self._events.clear()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        self._process.wait(WAIT_SECONDS)


class Page:
    """One tab, as a person uses it."""

    def __init__(self, browser: Chromium, session: str, url: str) -> None:
        self._browser = browser
        self._session = session
        self.url = url

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def open(self, width: int, height: int, dark: bool) -> None:
        """Loads the address."""
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Page.addScriptToEvaluateOnNewDocument", source=_FIND)
        self.resize(width, height)
        self.prefer(dark=dark)
        self.go("")

    def resize(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def prefer(self, *, dark: bool) -> None:
        """What the reader's system prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self._call("Emulation.setEmulatedMedia", features=[scheme, still])

    def go(self, hash_: str) -> None:
        """Goes to a page of the console, as a link would; the first time it is loaded."""
        if hash_ and self.evaluate("location.href").startswith(self.url):
            self.evaluate(f"location.hash = {json.dumps(hash_)}")
        else:
            self._call("Page.navigate", url=self.url + hash_)
            self.wait("document.readyState === 'complete' && document.querySelector('#nav a') !== null")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        # `userGesture` lets it use the clipboard, as a click would.
        found = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Until an expression is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := self.evaluate(f"(() => {{ try {{ return {condition}; }} catch {{ return false; }} }})()")):
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body.innerText")
                raise AssertionError(f"it never came: {condition}; the page shows\n{shown[:3000]}")
            time.sleep(_POLL_SECONDS)
        return found

    def see(self, text: str, selector: str = "body") -> None:
        """Until this text can be seen."""
        shows = f"one.checkVisibility() && one.innerText.includes({json.dumps(text)})"
        self.wait(f"[...document.querySelectorAll({json.dumps(selector)})].some((one) => {shows})")

    def gone(self, text: str, selector: str = "main") -> None:
        """Until this text cannot be seen."""
        shows = f"one.innerText.includes({json.dumps(text)})"
        self.wait(f"![...document.querySelectorAll({json.dumps(selector)})].some((one) => {shows})")

    def click(self, selector: str, name: str | None = None) -> None:
        """Clicks what can be seen, and is not covered or disabled; finding and clicking are one step."""
        found = f"window.__find({json.dumps(selector)}, {json.dumps(name)})"
        self.wait(
            f"""(() => {{
              const one = {found};
              if (!one || one.disabled) return false;
              one.scrollIntoView({{ block: "center", behavior: "instant" }});
              const box = one.getBoundingClientRect();
              const middle = box.x + Math.min(box.width, innerWidth) / 2;
              const hit = document.elementFromPoint(middle, box.y + box.height / 2);
              if (!hit || !(one.contains(hit) || hit.contains(one))) return false;
              one.focus({{ preventScroll: true }});
              one.click();
              return true;
            }})()"""
        )

    def fill(self, selector: str, text: str, name: str | None = None) -> None:
        """Writes into a field, as typing would."""
        self.wait(
            f"""(() => {{
              const one = window.__find({json.dumps(selector)}, {json.dumps(name)});
              if (!one || one.disabled) return false;
              one.focus();
              one.value = {json.dumps(text)};
              one.dispatchEvent(new Event("input", {{ bubbles: true }}));
              one.dispatchEvent(new Event("change", {{ bubbles: true }}));
              return one.value === {json.dumps(text)};
            }})()"""
        )

    def press(self, key: str) -> None:
        """A key, wherever the focus is."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else "")

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """What the page looks like, as PNG."""
        options: dict[str, Any] = {"format": "png", "optimizeForSpeed": False}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "scale": 1, **_extent(size)}}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **options)["data"]))

    def complaints(self) -> list[str]:
        """Exceptions of scripts, and what the policy has blocked."""
        self.evaluate("1")  # what was told before has arrived
        found: list[str] = []
        for event in self._browser.events(self._session):
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["source"] != "network":
                found.append(json.dumps(event["params"]["entry"])[:500])
        return found


def _extent(size: dict[str, float]) -> dict[str, float]:
    return {"width": size["width"], "height": size["height"]}


@contextlib.contextmanager
def chromium() -> Iterator[Chromium]:
    """A browser with an empty profile, gone at the end."""
    found = executable()
    assert found is not None, "Chromium is not installed"
    with tempfile.TemporaryDirectory(prefix="tidelog-chromium-", ignore_cleanup_errors=True) as profile:
        arguments = [found, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            port_file = Path(profile, "DevToolsActivePort")
            lines = until(lambda: port_file.exists() and port_file.read_text().split("\n"), "the port of Chromium")
            while len(lines) < 2:
                lines = port_file.read_text().split("\n")
            address = f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            with connect(address, max_size=None, open_timeout=WAIT_SECONDS, proxy=None) as connection:
                browser = Chromium(process, connection)
                try:
                    yield browser
                finally:
                    browser.close()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
