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

import pytest

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

STARTS = 4
"""Attempts: on a busy machine another program may take chromedriver's port before chromedriver has it."""


class Page:
    """A page as it is shown: `run` evaluates JavaScript, the body of a function."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, path: Path) -> None:
        self.messages()  # those of the page before are not this one's
        _ask("POST", f"{self._session}/url", {"url": path.resolve().as_uri()})

    def resize(self, width: int, height: int, *, is_phone: bool = False, dark: bool = False) -> None:
        """Lays the page out in ``width`` x ``height`` CSS pixels; no page is loaded again for it.

        is_phone: as a phone does, which believes what a page says of its viewport. dark: the user prefers it.
        """
        ratio = 2 if is_phone else 1
        self._command("Emulation.setDeviceMetricsOverride", width=width, height=height,
                      deviceScaleFactor=ratio, mobile=is_phone)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        return _ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def messages(self) -> list[str]:
        """The console's messages since the last call: errors of scripts, and files that did not load."""
        found = _ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [f"{each['level']}: {each['message']}" for each in found]

    def screenshot(self, path: Path) -> None:
        """Of the window; of the whole page where the window is as high as that."""
        path.write_bytes(base64.b64decode(_ask("GET", f"{self._session}/screenshot")))

    def _command(self, name: str, **params: Any) -> None:
        _ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": params})


@pytest.fixture(scope="session")
def browser() -> Iterator[Page]:
    """One window for all tests of a process."""
    with started() as page:
        yield page


@contextlib.contextmanager
def started() -> Iterator[Page]:
    """A window of its own. Raises AssertionError where there is no browser, or it does not start."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        raise AssertionError(
            f"{' and '.join(missing)} must be installed to look at pages: make browser "
            f"(apt-get install -y {' '.join(PACKAGES)})"
        )
    for attempt in range(1, STARTS + 1):
        with contextlib.ExitStack() as stack:
            try:
                session = stack.enter_context(_session())
            except (AssertionError, OSError):
                if attempt == STARTS:
                    raise
                continue
            yield Page(session)
            return


@contextlib.contextmanager
def _session() -> Iterator[str]:
    """The address of a browser's session."""
    with tempfile.TemporaryDirectory(prefix="pmoe-browser-", ignore_cleanup_errors=True) as folder:
        options = {
            "binary": shutil.which("chromium"),
            "args": [*ARGUMENTS, f"--user-data-dir={folder}/user"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        with driver(Path(folder)) as address:
            found = _ask("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
            session = f"{address}/session/{found['sessionId']}"
            try:
                yield session
            finally:
                _ask("DELETE", session)


@contextlib.contextmanager
def driver(folder: Path) -> Iterator[str]:
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
