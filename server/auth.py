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
    server = request.app.state.service.config.server
    if server.admin_key is not None:
        _check(request, server.admin_key)
    elif is_elsewhere(request, server.host):
        raise ApiError(403, "A page of another site asks for this. Set server.admin_key to let it.", "cross_origin")


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


def is_elsewhere(request: Request, listening: str) -> bool:
    """Whether another site's page has a visitor's browser ask: from a machine that is let in, but not by its owner.

    Either the browser says so, or the site has given its own name this machine's address ("DNS rebinding"): nobody else
    calls by a name what listens `listening` to this machine alone.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return True
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return is_loopback(listening) and not is_loopback(name.strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
