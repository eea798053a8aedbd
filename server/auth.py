"""Keys: one for the /v1 routes, one for the /admin routes, each optional."""

from __future__ import annotations

import hmac
from ipaddress import ip_address

from fastapi import Request
from pydantic import SecretStr

from server.errors import ApiError


async def client_key(request: Request) -> None:
    """A dependency that lets a request pass if it bears the key of /v1, or if there is none."""
    _check(request, request.app.state.service.config.server.api_key)


async def operator_key(request: Request) -> None:
    """The same for /admin. Where there is no key, other sites' pages are turned away."""
    key = request.app.state.service.config.server.admin_key
    if key is None:
        same_origin(request)
    else:
        _check(request, key)


def _check(request: Request, key: SecretStr | None) -> None:
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    wanted = key.get_secret_value().encode()
    # Compared as bytes: compare_digest takes no text outside ASCII. Header bytes arrive decoded as Latin-1.
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), wanted):
        problem = "Incorrect API key provided" if given else "No API key provided"
        raise ApiError(
            401,
            f"{problem}. Send it as 'Authorization: Bearer KEY'.",
            "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def same_origin(request: Request) -> None:
    """For where there is no key: what another site's page has a visitor's browser ask comes from a machine
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
