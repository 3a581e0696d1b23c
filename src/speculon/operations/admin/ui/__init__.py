"""The dashboard's pages, mounted at `/admin`. Imported only where `serve.admin` is on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fastapi import FastAPI

from speculon.core.errors import ConfigError
from speculon.server.middleware import ADMIN

if TYPE_CHECKING:
    from speculon.server.app_state import AppState

# the entries of the navigation, in order: a page's module here, and its name in `shell.toml` -> route, icon
NAVIGATION = {
    "overview": ("/", "speed"),
    "models": ("/models", "memory"),
    "requests": ("/requests", "list"),
    "playground": ("/playground", "compare"),
    "log": ("/log", "subject"),
}
MISSING = "admin = true: the dashboard's packages are not installed: pip install 'speculon[admin]'"


def check_installed() -> None:
    """Raises `ConfigError` where the extra `admin` is missing."""
    try:
        import nicegui  # noqa: F401
        import websockets  # noqa: F401
    except ImportError:
        raise ConfigError(MISSING) from None


def mount(app: FastAPI, state: AppState) -> None:
    """Adds `/admin/api` and the pages to the server's application; once per process, as NiceGUI has one."""
    from nicegui import ui

    from speculon.operations.admin.routes import add_admin
    from speculon.operations.admin.ui import token_view
    from speculon.operations.admin.ui.shell import Page, add_page

    pages = tuple(
        Page(name, route, icon, import_module(f"{__name__}.{name}").build)
        for name, (route, icon) in NAVIGATION.items()
    )
    admin = add_admin(app, state)
    # the tokens are reached from a request, and no entry of the navigation
    for page in (*pages, Page("tokens", "/tokens", "token", token_view.build)):
        add_page(page, pages, admin)
    ui.run_with(
        app, mount_path=ADMIN, title="speculon", binding_refresh_interval=None, show_welcome_message=False
    )
