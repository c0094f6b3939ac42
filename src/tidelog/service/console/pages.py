"""The console's files: HTML, style and scripts of this package, served under a strict policy.

Invariants
- The files are the console: nothing is generated from data here, and no file has a secret. The port serves them to
  everybody; what they show comes from the API, with the user's permissions.
- The policy allows scripts, styles and requests of this origin only, and no inline script, frame or form. A page that
  fails to escape something still runs nothing.
- Only files that are listed when the process starts are served: no path of a request reaches the file system.
- A browser asks each time whether a file has changed (`etag`), so an upgrade never runs old scripts with a new API.
"""

from __future__ import annotations

import hashlib
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import NamedTuple

from tidelog.service.http.call import Call, Reply
from tidelog.service.http.routes import Route, RouteTable

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = (
    ("content-security-policy", _POLICY),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
    ("cache-control", "no-cache"),
)
_INDEX = "index.html"


class _Page(NamedTuple):
    body: bytes
    media_type: str
    etag: str


def console_routes() -> tuple[Route, ...]:
    """The routes of the console's files; `/` is the page itself."""
    table = RouteTable("Console")
    for entry in sorted(files(__package__).joinpath("static").iterdir(), key=lambda one: one.name):
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix not in _TYPES:
            continue
        body = entry.read_bytes()
        page = _Page(body, _TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
        path = "/" if entry.name == _INDEX else f"/console/{entry.name}"
        serve = partial(_serve, page)
        serve.__doc__ = f"The console's file {entry.name}."
        table.add("GET", path, None, is_public=True, response_types=(page.media_type.partition(";")[0],))(serve)
    return tuple(table)


async def _serve(page: _Page, call: Call) -> Reply:
    headers = (*_HEADERS, ("etag", page.etag))
    if page.etag in call.headers.get("if-none-match", ""):
        return Reply(b"", page.media_type, HTTPStatus.NOT_MODIFIED, headers)
    return Reply(page.body, page.media_type, None, headers)
