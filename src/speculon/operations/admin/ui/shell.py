"""The frame of each page: navigation, theme, language. A page is a module with `async def build(view)`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from nicegui import ui
from starlette.requests import Request

from speculon.operations.admin.service import Admin
from speculon.operations.admin.ui.words import LANGUAGES, UiWords, words_for

THEMES: dict[str, bool | None] = {"auto": None, "light": False, "dark": True}
THEME_ICONS = {"auto": "brightness_auto", "light": "light_mode", "dark": "dark_mode"}
NARROW = 800  # pixels: below, the navigation is a drawer over the page
COOKIE_SECONDS = 365 * 86400
CSS = """
body { font-family: system-ui, 'Noto Sans CJK KR', 'Noto Sans CJK JP', 'Noto Sans CJK SC', sans-serif }
.q-page-container { overflow-x: hidden }
a.sp-link { display: flex; gap: .75rem; align-items: center; padding: .6rem 1rem; color: inherit;
  text-decoration: none; border-left: 4px solid transparent }
a.sp-link[aria-current=page] { border-color: #0072b2; font-weight: 600 }
a.sp-link:focus-visible, button:focus-visible { outline: 3px solid #e69f00; outline-offset: -3px }
.sp-grid { display: grid; gap: 1rem; width: 100%;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)) }
.sp-numbers { display: grid; gap: .5rem; width: 100%;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 8.5rem), 1fr)) }
.sp-card { width: 100%; min-width: 0 }
body.body--dark { --q-primary: #56b4e9 !important; --q-negative: #ff8a80 !important }
.body--dark .q-badge.bg-primary, .body--dark .q-checkbox__svg { color: #121212 }
/* in a layer, or that of Quasar would win */
@layer overrides { .body--dark .bg-primary.text-white { color: #121212 !important } }
/* a darker helper would take the contrast of the text below 4.5 */
body.desktop .q-hoverable:hover > .q-focus-helper { opacity: .08 !important }
.sp-bar { position: sticky; top: -1rem; z-index: 2; background: inherit }
"""


@dataclass(frozen=True)
class PageView:
    """What a page is built with."""

    words: UiWords
    theme: str
    admin: Admin


@dataclass(frozen=True)
class Page:
    """An entry of the navigation. Its name is a key of `shell.toml`."""

    name: str
    route: str  # below /admin
    icon: str
    build: Callable[[PageView], Awaitable[None]]


def add_page(page: Page, entries: tuple[Page, ...], admin: Admin) -> None:
    """`entries` are those of the navigation."""

    @ui.page(page.route, title="speculon")
    async def shown(request: Request) -> None:
        view = view_for(request, admin)
        frame(page, entries, view)
        with ui.column().classes("w-full p-2 sm:p-4 gap-4").props("role=main"):
            await page.build(view)


def view_for(request: Request, admin: Admin) -> PageView:
    theme = request.cookies.get("speculon_theme", "auto")
    return PageView(words_for(request), theme if theme in THEMES else "auto", admin)


def frame(page: Page, entries: tuple[Page, ...], view: PageView) -> None:
    words = view.words
    ui.add_css(CSS)
    ui.run_javascript(f"document.documentElement.lang = {words.language!r}")
    ui.dark_mode(THEMES[view.theme])
    ui.colors(primary="#0072b2")  # contrast with white: 5.2
    with ui.left_drawer(value=False, bordered=True).props(
        f"show-if-above breakpoint={NARROW} width=220"
    ) as drawer:
        with ui.element("nav") as navigation:
            navigation.props["aria-label"] = words("shell.menu")
            for entry in entries:
                link(entry, words(f"shell.{entry.name}"), current=entry is page)
    with ui.header(elevated=False).classes("items-center gap-2 px-2 py-1 bg-[#004b75]"):
        menu = ui.button(icon="menu", on_click=drawer.toggle).props("flat round color=white")
        labelled(menu, words("shell.menu"))
        ui.label(words(f"shell.{page.name}")).classes("text-lg").props("role=heading aria-level=1")
        ui.space()
        theme_button(view)
        language_menu(words)
        if view.admin.state.config.admin_key is not None:
            leave = "fetch('/admin/logout', {method: 'POST'}).finally(() => location.assign('/admin/login'))"
            button = ui.button(icon="logout").props("flat round color=white")
            button.on("click", js_handler=f"() => {leave}")
            labelled(button, words("shell.log_out"))


def link(entry: Page, text: str, *, current: bool) -> None:
    with ui.link(target=entry.route).classes("sp-link") as anchor:
        ui.icon(entry.icon).props("aria-hidden=true")
        ui.label(text)
    if current:
        anchor.props("aria-current=page")


def theme_button(view: PageView) -> None:
    names = list(THEMES)
    following = names[(names.index(view.theme) + 1) % len(names)]
    button = ui.button(icon=THEME_ICONS[view.theme], on_click=lambda: keep("theme", following))
    labelled(button.props("flat round color=white"), view.words(f"shell.theme_{view.theme}"))


def language_menu(words: UiWords) -> None:
    with ui.button(icon="translate").props("flat round color=white") as button:
        with ui.menu():
            for code, name in LANGUAGES.items():
                ui.menu_item(name, on_click=lambda code=code: keep("language", code)).props(f"lang={code}")
    labelled(button, words("shell.language"))


def labelled(element: ui.element, text: str) -> None:
    """A name for screen readers, shown as a tooltip."""
    element.props["aria-label"] = text
    element.tooltip(text)


def keep(name: str, value: str) -> None:
    """Keeps a choice in the browser and shows the page anew."""
    cookie = f"speculon_{name}={value}; Path=/admin; Max-Age={COOKIE_SECONDS}; SameSite=Strict"
    ui.run_javascript(f"document.cookie = {cookie!r}; location.reload()")
