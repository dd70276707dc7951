"""Who may ask: keys, and what a page of another site in the user's browser must not be able to do."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from notes_cli.serve.refusals import Refused, body

# A name or an IPv4 address, or an IPv6 address in brackets; then a port.
HOST = re.compile(
    r"(?:(?P<name>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)|\[(?P<address>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{1,5}))?",
    re.IGNORECASE | re.ASCII,
)
OPEN = ("/health",)  # what anybody may ask: balancers have no key


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach what listens there."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class Guard:
    """Lets requests through to an application, or refuses them.

    A browser sends along where the page is from that asks (Origin), and the name it asked for (Host). A page of
    another site is refused, and so is one that has made its own name point to this machine. Where a key is needed,
    which such a page does not have, any name is answered to; without one, on loopback localhost and addresses, and on
    a network names that nobody has in the DNS of the world.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        host: str,
        origins: Sequence[str],
        pages: Sequence[str],
    ) -> None:
        """`keys`: any of them will do; none: nobody is asked for one. `host`: where we listen. `origins`: pages of
        other sites that may ask. `pages`: paths that need no key, which a browser cannot send before it has them."""
        self._app, self._origins, self._pages = app, tuple(origins), tuple(pages)
        self._keys = [key.encode() for key in keys]
        self._host, self._near = host.lower(), is_loopback(host)

    def _may_be_ours(self, name: str) -> bool:
        """Whether the name that was asked for may be one of this machine's."""
        if self._keys or name in (self._host, "localhost") or _is_address(name):
            return True
        return not self._near and ("." not in name or name.endswith(".local"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refusal(Headers(scope=scope), scope["path"], scope["method"])
            if error is not None:
                headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
                await JSONResponse(body(error), error.status, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, path: str, method: str) -> Refused | None:
        host = headers.get("host", "")
        name = _name(host)
        if name is None:
            return Refused(400, f"Host: {host[:80]!r} is not a name or an address, with a port or without")
        if not self._may_be_ours(name):
            what = f"this server answers to localhost and to its address, not to {host[:80]!r}"
            return Refused(403, f"{what}: ask it by one of these, or let it listen by that name, or require a key")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != host:
            return Refused(403, f"pages of {origin[:80]} may not ask this server")
        if not self._keys or path in OPEN or (path in self._pages and method in ("GET", "HEAD")) or method == "OPTIONS":
            return None
        given = [headers.get("x-api-key", "")]  # as clients of Anthropic's API send it
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            given.append(bearer)
        # All are compared, whichever is right.
        right = [hmac.compare_digest(one.strip().encode("latin-1"), key) for one in given for key in self._keys]
        if any(right):
            return None
        what = "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key: KEY"
        return Refused(401, what, code="invalid_api_key")


def from_browser(headers: Headers) -> bool:
    """Whether a page in a browser may have sent this: browsers add one of these headers to every POST."""
    return any(name in ("origin", "referer") or name.startswith("sec-fetch-") for name in headers)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str | None:
    """The name in a Host header in small letters, without the port; None where it is not as RFC 9110 has it. User
    names, paths and names that end with a dot are not, nor are IPv6 addresses without brackets."""
    match = HOST.fullmatch(host)
    if match is None or int(match["port"] or 1) not in range(1, 1 << 16):
        return None
    name = (match["name"] or match["address"]).lower()
    return name if match["name"] or (_is_address(name) and ":" in name) else None
