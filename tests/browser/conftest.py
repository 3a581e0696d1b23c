"""A real server with its dashboard, and Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.server.outside import Outside, started

KEY = "planted-admin-key"
expect.set_options(timeout=15_000)  # ms: a page is slow to come on a busy machine
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        missing = "Chromium is missing: apt-get install chromium fonts-noto-cjk"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """The dashboard over the scripted engine: its pages are real, its drafts are quick."""
    folder: Path = tmp_path_factory.mktemp("dashboard")
    with started(folder, "--admin", SPECULON_SERVE__ADMIN_KEY=KEY) as server:
        server.ready()
        yield server
        assert server.end() == 0, server.stderr
        assert "Traceback" not in server.stderr, server.stderr


def soon(page: Page, true: Callable[[], object], seconds: float = 15) -> bool:
    """Whether it becomes true within this time."""
    for _ in range(int(10 * seconds)):
        if true():
            return True
        page.wait_for_timeout(100)
    return False


def log_in(page: Page, url: str, key: str = KEY) -> None:
    page.goto(url + "/admin/")
    page.get_by_label("Admin key").fill(key)
    page.get_by_role("button", name="Log in").click()
