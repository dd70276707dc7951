"""Checks API keys and the headers Host and Origin, against other sites' pages in the user's browser."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from notes_cli.serve.refusals import Refused, error_body

# A name or an IPv4 address, or an IPv6 address in brackets; then a port.
HOST = re.compile(
    r"(?:(?P<name>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)|\[(?P<address>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{1,5}))?",
    re.IGNORECASE | re.ASCII,
)
OPEN = ("/health",)  # paths without a key, for load balancers


def is_loopback(host: str) -> bool:
    """Return True if only processes of this machine can reach this address."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class Guard:
    """ASGI middleware that passes requests on or refuses them.

    A browser sends the origin of the page (Origin) and the name in the URL (Host). Pages of other origins are refused,
    and so is DNS rebinding: a site's name that points to this machine. If a key is required, which such a page does not
    have, any Host is accepted. Without one, on loopback: localhost and addresses; on a network: also names that public
    DNS does not have.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], host: str, origins: Sequence[str], pages: Sequence[str]
    ) -> None:
        """`keys`: accepted keys; none: no key is required. `host`: the address that the server listens on. `origins`:
        other origins that are accepted. `pages`: paths without a key, which a browser loads before it has one."""
        self._app, self._origins, self._pages = app, tuple(origins), tuple(pages)
        self._keys = [key.encode() for key in keys]
        self._host, self._on_loopback = host.lower(), is_loopback(host)

    def _accepts_host(self, name: str) -> bool:
        if self._keys or name in (self._host, "localhost") or _is_address(name):
            return True
        return not self._on_loopback and ("." not in name or name.endswith(".local"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refusal(Headers(scope=scope), scope["path"], scope["method"])
            if error is not None:
                headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
                await JSONResponse(error_body(error), error.status, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, path: str, method: str) -> Refused | None:
        host = headers.get("host", "localhost")  # absent from probes in HTTP/1.0, never from a browser
        name = _host_name(host)
        if name is None:
            return Refused(400, f"Host: {host[:80]!r} is not a name or an address, with a port or without")
        if not self._accepts_host(name):
            message = f"this server answers to localhost and to its address, not to {host[:80]!r}"
            return Refused(403, f"{message}: ask it by one of these, or let it listen by that name, or require a key")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != host:
            return Refused(403, f"pages of {origin[:80]} may not ask this server")
        if not self._keys or path in OPEN or (path in self._pages and method in ("GET", "HEAD")) or method == "OPTIONS":
            return None
        sent_keys = [headers.get("x-api-key", "")]  # from clients of Anthropic's API
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            sent_keys.append(bearer)
        # Compares all of them, so that the time does not depend on which matches.
        matches = [hmac.compare_digest(sent.strip().encode("latin-1"), key) for sent in sent_keys for key in self._keys]
        if any(matches):
            return None
        message = "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key: KEY"
        return Refused(401, message, code="invalid_api_key")


def from_browser(headers: Headers) -> bool:
    """Return True if a browser may have sent these headers: it adds one of them to every POST."""
    return any(name in ("origin", "referer") or name.startswith("sec-fetch-") for name in headers)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str | None:
    """Return the name in a Host header, in lower case and without the port; None if it is invalid by RFC 9110, as with
    a user name, a path, a dot at its end, or an IPv6 address without brackets."""
    match = HOST.fullmatch(host)
    if match is None or int(match["port"] or 1) not in range(1, 1 << 16):
        return None
    name = (match["name"] or match["address"]).lower()
    return name if match["name"] or (_is_address(name) and ":" in name) else None
