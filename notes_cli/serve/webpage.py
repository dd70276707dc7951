"""Serves the web page's files, with headers that keep a browser from loading anything else."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"

# Set here, as systems guess them differently, and browsers do not run scripts of other types.
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
    "require-trusted-types-for": "'script'",  # scripts cannot turn text into HTML
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # file names are the same in all versions
}


def page_routes() -> list[Route]:
    """Return routes of `/` and the files that it loads. All are named "page": a browser loads them without a key."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
    return [_route("/" if path.name == "index.html" else f"/page/{path.name}", path) for path in files]


def _route(url_path: str, path: Path) -> Route:
    content, media_type = path.read_bytes(), TYPES[path.suffix]

    async def page(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return Route(url_path, page, methods=["GET", "HEAD"], name="page")
