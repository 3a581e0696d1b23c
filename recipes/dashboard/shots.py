"""All pictures of the documents: python -m recipes.dashboard.shots [--parts dashboard] [--pages overview,log]

- dashboard: starts `speculon serve --model demo --admin`, sends some requests, and takes each page with
  Chromium, light and dark, wide and narrow, into docs/images/dashboard/. There `menu.json` records the digest
  of each picture and the menu that it shows, so that a test finds pictures of an older dashboard.
- chat: the conversation of docs/chat.md (`recipes.charts.chat`).
- charts: those of docs/benchmarks, from the recorded runs (`recipes.charts.readme`).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from recipes.charts import chat, readme

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs/images/dashboard"
MODELS = ROOT / "tests" / "models"
RECORD = "menu.json"  # picture -> its digest, and the entries of its menu
LISTENS = re.compile(r"listens on (http://\S+)")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync".split()
SIZES = {"wide": (1280, 800), "narrow": (380, 800)}
TALLEST = 1600  # pixels of a picture
SHORTER = {"requests": 440, "log": 560}  # much small text
MOST_BYTES = 60_000
SECONDS = 120.0  # for the server to load
PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "import json\n\n\ndef read(path):\n    with open(path) as file:\n        ",
    "import os\nimport sys\n\n\ndef main():\n    ",
)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a server on a free port."""
    log = folder / "stderr.txt"
    command = [sys.executable, "-m", "speculon.cli", "serve", "--model", "demo", "--admin", "--port", "0"]
    with log.open("wb") as out:
        env = {**os.environ, "SPECULON_MODELS": str(MODELS)}
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=out)
    try:
        until = time.monotonic() + SECONDS
        while (found := LISTENS.search(log.read_text())) is None or not ready(found[1]):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server did not start: {log.read_text()}")
            time.sleep(0.2)
        yield found[1], process.pid
    finally:
        process.terminate()
        process.wait(30)


def ready(url: str) -> bool:
    try:
        with urlopen(url + "/ready"):
            return True
    except OSError:
        return False


def post(url: str, body: dict[str, object]) -> dict[str, object]:
    sent = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(sent) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def ask(url: str, prompt: str, tokens: int) -> str:
    """The id of the answer."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0.8}
    answer = post(url + "/v1/completions", body | {"speculation": {"explain": True}})
    return str(answer["id"])


def load(url: str, rounds: int) -> str:
    """Several streams at a time; the id of the last answer."""
    with ThreadPoolExecutor(4) as threads:
        for _ in range(rounds):
            last = list(threads.map(lambda prompt: ask(url, prompt, 96), PROMPTS))[0]
            time.sleep(0.5)
    return last


def opened(browser: Browser, url: str, size: tuple[int, int], theme: str) -> Page:
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, locale="en-GB")
    context.add_cookies([{"name": "speculon_theme", "value": theme, "url": url + "/admin"}])
    return context.new_page()


def compare(page: Page) -> None:
    """One prompt without drafts, and by lookups."""
    page.get_by_label("Prompt").fill(PROMPTS[1])
    page.locator("[data-side=right]").get_by_label("Method").click()
    page.get_by_role("option", name="ngram").click()
    page.get_by_role("button", name="Run").click()
    page.get_by_text("Same text").wait_for(timeout=30_000)


# no picture shows where this machine has its files
RENAME = """([from, to]) => {
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) walk.currentNode.data = walk.currentNode.data.replaceAll(from, to);
}"""


def taken(page: Page, tallest: int) -> bytes:
    """Raises `SystemExit` where the page is wider than the screen."""
    page.wait_for_timeout(1500)
    page.evaluate(RENAME, [str(MODELS), "/models"])
    sizes = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    screen = page.viewport_size
    assert screen
    if sizes[0] > screen["width"]:
        raise SystemExit(f"{page.url}: {sizes[0]} pixels wide on a screen of {screen['width']}")
    height = min(max(screen["height"], sizes[1]), tallest)
    page.set_viewport_size({"width": screen["width"], "height": height})
    page.wait_for_timeout(1500)
    picture = page.screenshot()
    page.set_viewport_size(screen)
    return picture


def keep(picture: bytes, path: Path) -> None:
    """With as many colours as fit into `MOST_BYTES`."""
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    for colours in (128, 64, 32, 16):
        whole.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size < MOST_BYTES:
            return
    raise SystemExit(f"{path.name}: {path.stat().st_size} bytes with 16 colours")


def menu_of(page: Page) -> list[str]:
    """The entries of the navigation, as they are read; on a narrow screen they are in a drawer."""
    return [text.strip() for text in page.locator("nav a div").all_text_contents()]


def record(menus: dict[str, list[str]]) -> None:
    """Notes what was taken; the entries of other pictures stay."""
    path = OUT / RECORD
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, menu in menus.items():
        known[name] = {"sha256": hashlib.sha256((OUT / name).read_bytes()).hexdigest(), "menu": menu}
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts, names = "dashboard,chat,charts", "overview,models,settings,requests,tokens,playground,log"
    parser.add_argument("--parts", default=parts, help=f"of {parts}")
    parser.add_argument("--pages", default=names, help=f"of {names}")
    options = parser.parse_args()
    taken_by = {
        "dashboard": lambda: take_dashboard(options.pages.split(",")),
        "chat": chat.main,
        "charts": readme.main,
    }
    for part in options.parts.split(","):
        taken_by[part]()


def take_dashboard(pages: list[str]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    menus: dict[str, list[str]] = {}
    path = shutil.which("chromium")
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder)) as (url, _),
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(executable_path=path, args=FLAGS)
        page = opened(browser, url, SIZES["wide"], "light")
        page.goto(url + "/admin/")  # an open overview keeps the intervals of its charts
        last = load(url, 16)
        others = {"overview": "/", "settings": "/models", "tokens": f"/tokens?id={last}"}
        routes = {name: f"/{name}" for name in pages} | others
        for theme in ("light", "dark"):
            for size, pixels in SIZES.items():
                shown = opened(browser, url, pixels, theme)
                for name in pages:
                    shown.goto(url + "/admin" + routes[name])
                    if name == "playground":
                        compare(shown)
                    elif name == "settings":
                        shown.get_by_role("button", name="Settings").click()
                        shown.get_by_role("heading", name="Settings of").wait_for()
                    picture = f"{name}-{theme}-{size}.png"
                    keep(taken(shown, SHORTER.get(name, TALLEST)), OUT / picture)
                    menus[picture] = menu_of(shown)
                shown.context.close()
        browser.close()
    record(menus)


if __name__ == "__main__":
    main()
