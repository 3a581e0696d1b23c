"""Who may administer: the holder of the admin key, or without a key a program on this machine."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from fastapi import Request
from starlette.exceptions import HTTPException

from speculon.config.serve import ServeConfig, is_loopback
from speculon.server.middleware import token_of


def require_admin(config: ServeConfig) -> Callable[[Request], Awaitable[None]]:
    """A dependency of routes: status 401 without the key, 403 for a page of another origin."""
    key = None if config.admin_key is None else config.admin_key.get_secret_value().encode()

    async def check(request: Request) -> None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        # a page of another site may send requests to this machine
        if origin is not None and urlsplit(origin).netloc != host:
            raise HTTPException(403, "the administration takes no requests of pages of other origins")
        if key is None:
            if not is_loopback(urlsplit(f"//{host}").hostname or ""):  # a name that was bound anew
                raise HTTPException(403, "without admin_key the host must be localhost or a loopback address")
        elif not hmac.compare_digest(token_of(request.headers), key):
            raise HTTPException(401, "the admin key is needed, as a bearer token")

    return check
