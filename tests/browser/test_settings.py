"""The dialog with the settings of a model, and what a reader can do in it."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from speculon.checkpoints.locate import locate
from tests.browser.conftest import KEY, log_in, soon
from tests.server.outside import Outside, started

K = "num_speculative_tokens"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """Two models, two drafters that fit the larger one, and one that does not."""
    folder = tmp_path_factory.mktemp("library")
    models = folder / "models"
    models.mkdir()
    for name, shipped in (("coder", "demo"), ("head", "demo-eagle3"), ("blocks", "demo-dflash")):
        (models / name).symlink_to(locate(shipped))
    misfit(models / "deep")
    folders = ("--model", str(models / "coder"), "--models-dir", str(models))
    options = (*folders, "--admin", "--block-size", "16", "--restart-engine")
    with started(folder, *options, SPECULON_SERVE__ADMIN_KEY=KEY) as server:
        server.ready()
        yield server
        assert server.end() == 0, server.stderr
        assert "Traceback" not in server.stderr, server.stderr


def misfit(folder: Path) -> None:
    """The head, with a config that names a layer which the target has not."""
    folder.mkdir()
    for file in locate("demo-eagle3").iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((locate("demo-eagle3") / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "eagle_aux_hidden_state_layer_ids": [1, 2, 50]})
    )


@pytest.fixture(scope="module")
def page(browser: Browser, library: Outside) -> Iterator[Page]:
    """One reader, who opens the dialog in each test."""
    page = browser.new_context(locale="en-GB").new_page()
    log_in(page, library.url())
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    yield page
    page.context.close()


def open_settings(page: Page, server: Outside) -> None:
    page.goto(server.url() + "/admin/models")
    page.get_by_role("button", name="Settings").first.click()
    expect(page.get_by_role("heading", name="Settings of")).to_be_visible()


def field(page: Page, name: str) -> Locator:
    return page.locator(f"[data-field={name}]")


def save(page: Page, told: str = "Saved.") -> None:
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status").filter(has_text=told)).to_be_visible()


def check_kept(page: Page, drafter: str, k: str) -> None:
    """What was saved is there after the page was loaded anew."""
    expect(page.get_by_role("checkbox", name=drafter)).to_be_checked(timeout=1000)
    expect(page.get_by_label(K, exact=True)).to_have_value(k, timeout=1000)


def test_a_drafter_and_k_are_kept(page: Page, library: Outside) -> None:
    open_settings(page, library)
    with pytest.raises(AssertionError):  # the twin: nothing was saved
        check_kept(page, "head", "3")
    page.get_by_role("checkbox", name="head").click()
    page.get_by_label(K, exact=True).fill("3")
    save(page)
    open_settings(page, library)
    check_kept(page, "head", "3")
    expect(page.get_by_role("checkbox", name="blocks")).not_to_be_checked()
    page.get_by_role("checkbox", name="blocks").click()
    save(page)
    written = tomllib.loads((library.folder / "speculon-models.toml").read_text())["models"]["coder"]
    models = library.folder / "models"
    assert written == {K: 3, "draft": {"dflash": f"{models}/blocks", "eagle3": f"{models}/head"}}


def test_a_drafter_that_does_not_fit_says_why(page: Page, library: Outside) -> None:
    open_settings(page, library)
    draft = field(page, "draft")
    expect(draft.get_by_role("checkbox", name="deep")).to_be_disabled()
    expect(draft).to_contain_text("Does not fit: reads layers 0, 1, 49")
    expect(draft.get_by_role("checkbox", name="blocks")).to_be_enabled()
    expect(draft.get_by_text("dflash", exact=True)).to_be_visible()
    draft.get_by_role("checkbox", name="auto").click()
    for name in ("head", "blocks"):  # it searches by itself
        expect(draft.get_by_role("checkbox", name=name)).not_to_be_checked()
    draft.get_by_label("Another checkpoint").fill("/no/such/folder")
    draft.get_by_role("button", name="Add").click()
    expect(draft).to_contain_text("Does not fit: /no/such/folder: no such folder")


def test_a_refused_value_is_told_at_its_field(page: Page, library: Outside) -> None:
    open_settings(page, library)
    for name, typed, told in (
        (K, "-1", f"{K} = -1"),  # below its limit, and not replaced by it
        ("max_num_seqs", "2.5", "max_num_seqs = 2.5"),
        ("seed", "x", "seed = 'x'"),
        ("options", "{", "options = '{'"),
    ):
        shown = page.get_by_label(name, exact=True)
        before = shown.input_value()
        shown.fill(typed)
        save(page, told)
        expect(field(page, name).get_by_role("alert")).to_contain_text(told)
        expect(field(page, "policy").get_by_role("alert")).to_have_text("")
        expect(shown).to_have_value(typed)
        shown.fill(before)


def test_each_type_has_its_control(page: Page, library: Outside) -> None:
    open_settings(page, library)
    number = page.get_by_label(K, exact=True)
    limits = [number.get_attribute(name) for name in ("type", "min", "max", "step")]
    assert limits == ["number", "0", "64", "1"]
    page.get_by_role("switch", name="pinned").click()
    page.get_by_label("acceptance", exact=True).click()
    page.get_by_role("option", name="block", exact=True).click()
    page.get_by_label("chained_drafts").click()
    page.get_by_role("option", name="off").click()
    stop = page.get_by_label("stop", exact=True)
    for text in ("END", "1"):
        stop.fill(text)
        stop.press("Enter")
    save(page)
    open_settings(page, library)
    expect(page.get_by_role("switch", name="pinned")).to_be_checked()
    written = (library.folder / "speculon-models.toml").read_text()
    for line in ("pinned = true", 'acceptance = "block"', "chained_drafts = false", 'stop = ["END", "1"]'):
        assert line in written


def test_a_locked_control_says_why(page: Page, library: Outside) -> None:
    open_settings(page, library)
    for name, why in (("block_size", "set by a flag"), ("trust_remote_code", "only in the file")):
        expect(field(page, name)).to_contain_text(f"Locked: {why}")
    expect(page.get_by_label("block_size", exact=True)).not_to_be_editable()
    expect(page.get_by_role("switch", name="trust_remote_code")).to_be_disabled()
    expect(field(page, "max_num_seqs")).not_to_contain_text("Locked")
    with pytest.raises(AssertionError):  # the twin: one that is not locked takes text
        expect(page.get_by_label("max_num_seqs", exact=True)).not_to_be_editable(timeout=500)


def test_two_readers_who_save_at_once_change_only_what_each_has_changed(
    browser: Browser, page: Page, library: Outside
) -> None:
    other = browser.new_context(locale="en-GB").new_page()
    log_in(other, library.url())
    expect(other.get_by_role("heading", level=1)).to_have_text("Overview")
    for reader in (page, other):
        open_settings(reader, library)
    page.get_by_label("top_p", exact=True).fill("0.9")
    other.get_by_label("temperature", exact=True).fill("0.5")
    for reader in (page, other):
        reader.get_by_role("button", name="Save").click()
    for reader in (page, other):
        expect(reader.get_by_role("status").filter(has_text="Saved.")).to_be_visible()
    written = (library.folder / "speculon-models.toml").read_text()
    assert "top_p = 0.9" in written and "temperature = 0.5" in written
    other.context.close()


def test_every_reader_sees_the_states_of_a_model_and_a_worker_that_is_lost(
    page: Page, library: Outside
) -> None:
    page.goto(library.url() + "/admin/models")
    card = page.locator("[data-model=coder]")
    expect(card.get_by_text("loaded", exact=True)).to_be_visible()
    expect(card.get_by_role("button", name="Load", exact=True)).to_be_disabled()
    (library.folder / "slow").touch()  # a load takes seconds
    os.kill(library.children()[0], signal.SIGKILL)
    expect(card.get_by_text("loading", exact=True)).to_be_visible()
    expect(card.get_by_role("status").filter(has_text="reading the script")).to_be_visible()
    (library.folder / "slow").unlink()
    expect(card.get_by_text("loaded", exact=True)).to_be_visible(timeout=30_000)


def tab_to(page: Page, name: str, most: int = 40) -> None:
    """Presses the tab key until a control of this name has the focus."""
    has = "() => (document.activeElement.ariaLabel || document.activeElement.innerText || '').trim()"
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(has) == name:
            return
    raise AssertionError(f"{name} is not reached by the tab key")


def test_the_keyboard_alone_opens_saves_and_closes(page: Page, library: Outside) -> None:
    page.goto(library.url() + "/admin/models")
    expect(page.get_by_role("button", name="Settings").first).to_be_visible()
    tab_to(page, "SETTINGS")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Settings of")).to_be_visible()
    tab_to(page, K)
    page.keyboard.press("Control+a")
    page.keyboard.type("5")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="Saved.")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="Settings of")).to_be_hidden()
    with pytest.raises(AssertionError):  # the twin: what has no focus is not reached
        tab_to(page, "Settings of coder", 5)


def brightness(page: Page) -> float:
    """Of what is behind the dialog's text, from 0 to 1."""
    colour = page.locator(".q-dialog .q-card").evaluate("card => getComputedStyle(card).backgroundColor")
    return sum(int(part) for part in colour.strip("rgba()").split(",")[:3]) / (3 * 255)


def test_a_dark_dialog_fits_a_narrow_screen(page: Page, library: Outside) -> None:
    page.set_viewport_size({"width": 380, "height": 800})
    page.emulate_media(color_scheme="dark")
    open_settings(page, library)
    assert brightness(page) < 0.2
    card = page.locator(".q-dialog .q-card")
    width = "card => card.scrollWidth"
    assert card.evaluate(width) <= 380
    card.evaluate("card => card.firstElementChild.style.width = '500px'")
    assert card.evaluate(width) > 380  # the twin: what is wider is seen
    page.emulate_media(color_scheme="light")
    assert soon(page, lambda: brightness(page) > 0.8)
