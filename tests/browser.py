"""A real browser for tests: Debian's chromium, driven by chromedriver over WebDriver's plain HTTP.

It fails where there is no browser, and says what installs one: a test that skipped itself would hide work.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("chromium", "chromium-driver")
"""Debian's names; `make browser` installs them."""

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)

START_SECONDS = 60


class Page:
    """A page as it is shown: `run` evaluates JavaScript, the body of a function."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, path: Path) -> None:
        _ask("POST", f"{self._session}/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        return _ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def messages(self) -> list[str]:
        """What the console was told since the last call: errors of scripts, and whatever did not load."""
        found = _ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [f"{each['level']}: {each['message']}" for each in found]

    def screenshot(self, path: Path) -> None:
        """Of the window; of the whole page where the window is as high as that."""
        path.write_bytes(base64.b64decode(_ask("GET", f"{self._session}/screenshot")))


@contextlib.contextmanager
def browser(width: int, height: int, *, is_phone: bool = False, dark: bool = False) -> Iterator[Page]:
    """A window of ``width`` x ``height`` CSS pixels; is_phone: as a phone lays pages out."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        raise AssertionError(
            f"{' and '.join(missing)} must be installed to look at pages: make browser "
            f"(apt-get install -y {' '.join(PACKAGES)})"
        )
    with tempfile.TemporaryDirectory(prefix="pmoe-browser-") as folder, _driver(Path(folder)) as address:
        options: dict[str, Any] = {
            "binary": shutil.which("chromium"),
            "args": [*ARGUMENTS, f"--user-data-dir={folder}/user", f"--window-size={width},{height}"],
        }
        if is_phone:
            metrics = {"width": width, "height": height, "pixelRatio": 2.0, "mobile": True}
            options["mobileEmulation"] = {"deviceMetrics": metrics}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        found = _ask("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{address}/session/{found['sessionId']}"
        try:
            if not is_phone:
                _command(session, "Emulation.setDeviceMetricsOverride", width=width, height=height,
                         deviceScaleFactor=1, mobile=False)  # fmt: skip
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            _command(session, "Emulation.setEmulatedMedia", features=[scheme])
            yield Page(session)
        finally:
            _ask("DELETE", session)


def _command(session: str, name: str, **params: Any) -> None:
    _ask("POST", f"{session}/goog/cdp/execute", {"cmd": name, "params": params})


@contextlib.contextmanager
def _driver(folder: Path) -> Iterator[str]:
    """The address of a chromedriver of one's own, on a port that it picks."""
    log = folder / "driver.log"
    with open(log, "w") as file:
        process = subprocess.Popen(["chromedriver", "--port=0"], stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + START_SECONDS
        while not (found := re.search(r"started successfully on port (\d+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"chromedriver did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.terminate()
        process.wait(10)


def _ask(method: str, address: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine, whatever the proxy
    try:
        with opener.open(request, timeout=START_SECONDS) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {address}: {error.read().decode()[:2000]}") from None
