"""The page: its files, each at a path of its own, with headers that keep a browser from loading anything else."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"

# Named here, as systems differ in what they take these for, and a browser runs no script of another type.
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # no text becomes HTML, whatever a script says
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the files of another version have the same names
}


def page_routes() -> list[Route]:
    """`/` and the files that it loads, all named "page": what a browser has before it can send a key."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
    return [_route("/" if path.name == "index.html" else f"/page/{path.name}", path) for path in files]


def _route(place: str, path: Path) -> Route:
    content, kind = path.read_bytes(), TYPES[path.suffix]

    async def page(_: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return Route(place, page, methods=["GET", "HEAD"], name="page")
