"""The dashboard's pages, mounted at `/admin`. Imported only where `serve.admin` is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from speculon.core.errors import ConfigError
from speculon.server.middleware import ADMIN

if TYPE_CHECKING:
    from speculon.server.app_state import AppState

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
    from speculon.operations.admin.ui import log, models, overview, playground, requests, token_view
    from speculon.operations.admin.ui.shell import Page, add_page

    pages = (
        Page("overview", "/", "speed", overview.build),
        Page("models", "/models", "memory", models.build),
        Page("requests", "/requests", "list", requests.build),
        Page("playground", "/playground", "compare", playground.build),
        Page("log", "/log", "subject", log.build),
    )
    admin = add_admin(app, state)
    # the tokens are reached from a request, and no entry of the navigation
    for page in (*pages, Page("tokens", "/tokens", "token", token_view.build)):
        add_page(page, pages, admin)
    ui.run_with(
        app, mount_path=ADMIN, title="speculon", binding_refresh_interval=None, show_welcome_message=False
    )
