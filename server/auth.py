"""Keys: one for the /v1 routes, one for the /admin routes, each optional."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from ipaddress import ip_address

from fastapi import Request
from pydantic import SecretStr

from server.errors import ApiError


def key_required(key: SecretStr | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets a request pass if it bears `key`, or if there is none."""
    wanted = None if key is None else key.get_secret_value().encode()

    async def check(request: Request) -> None:
        if wanted is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Compared as bytes: compare_digest takes no text outside ASCII. Header bytes arrive decoded as Latin-1.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), wanted):
            problem = "Incorrect API key provided" if given else "No API key provided"
            raise ApiError(
                401,
                f"{problem}. Send it as 'Authorization: Bearer KEY'.",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


async def same_origin(request: Request) -> None:
    """A dependency for where there is no key: what another site's page has a visitor's browser ask comes from a machine
    that is let in, but not from its owner.
    """
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        message = (
            "A page of another site asks for this. Set server.admin_key, or have the proxy pass the Host header on."
        )
        raise ApiError(403, message, "cross_origin")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
