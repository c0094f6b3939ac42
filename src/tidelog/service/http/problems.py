"""Answers to requests that fail: problem documents (RFC 9457).

    {"type": "urn:tidelog:error:NotFoundError", "title": "Not Found", "status": 404,
     "detail": "there is no topic shop/orders", "error": "NotFoundError", "hint": "..."}

Invariants
- `error` is the class that the embedded library raises, so that a client can raise the same; `hint` is the fix.
- A problem names no path of the server's disk and no secret: only the message of an error goes out, never its place.
- What is the client's mistake is 4xx. What may succeed later is 503 with Retry-After. 5xx else is damage or a bug.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from tidelog.errors import (
    AccessDeniedError,
    ConflictError,
    CorruptionError,
    DataError,
    DiskFullError,
    FencedError,
    GapError,
    InputError,
    InternalError,
    LockedError,
    MessageTooLargeError,
    NotFoundError,
    NotSupportedError,
    ReopenError,
    RetryError,
    TidelogError,
)
from tidelog.service.auth.access import NotAuthenticatedError, NotAuthorizedError
from tidelog.service.placement import NotOwnerError

CHALLENGE = ("www-authenticate", 'Bearer realm="tidelog"')
PROBLEM_TYPE = "application/problem+json"
RETRY_SECONDS = 1


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request was refused or failed."""

    type: str
    title: str
    status: int
    detail: str
    error: str
    """The class of the error in the library, such as NotFoundError."""
    hint: str | None = None
    """What to do about it."""
    command_hint: str | None = None
    """The same for the command line, where `hint` names what a program calls."""
    operation: str | None = None
    """What was being done."""


class HttpError(Exception):
    """A refusal that has no class in the library: a wrong path, method, media type or size, or a missing permission."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        hint: str | None = None,
        error: str = "InputError",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.hint = hint
        self.error = error
        self.headers = headers


_STATUS: tuple[tuple[type[TidelogError], HTTPStatus], ...] = (
    (NotAuthenticatedError, HTTPStatus.UNAUTHORIZED),
    (NotOwnerError, HTTPStatus.SERVICE_UNAVAILABLE),
    (NotAuthorizedError, HTTPStatus.FORBIDDEN),
    (MessageTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (AccessDeniedError, HTTPStatus.BAD_GATEWAY),  # of the server, by its store
    (NotSupportedError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (InputError, HTTPStatus.BAD_REQUEST),
    (ConflictError, HTTPStatus.CONFLICT),
    (FencedError, HTTPStatus.CONFLICT),
    (LockedError, HTTPStatus.LOCKED),
    (DiskFullError, HTTPStatus.INSUFFICIENT_STORAGE),
    (RetryError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ReopenError, HTTPStatus.SERVICE_UNAVAILABLE),
    (GapError, HTTPStatus.GONE),
    (DataError, HTTPStatus.INTERNAL_SERVER_ERROR),
)


def status_of(error: TidelogError) -> HTTPStatus:
    """The status that an error of the library has over HTTP."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)


def problem_of(error: TidelogError | HttpError) -> Problem:
    """The document for an error."""
    if isinstance(error, HttpError):
        return make_problem(error.status, error.detail, error.error, error.hint)
    if isinstance(error, NotOwnerError):
        moving = "ServerUnavailableError"  # which clients try again, and find the owner
        return make_problem(HTTPStatus.SERVICE_UNAVAILABLE, error.message, moving, error.hint)
    # The message of damage names a file of the server.
    detail = error.reason if isinstance(error, CorruptionError) else error.message
    problem = make_problem(status_of(error), detail, public_name(error), error.hint)
    if error.command_hint is None and error.operation is None:
        return problem
    return msgspec.structs.replace(problem, command_hint=error.command_hint, operation=error.operation)


def public_name(error: TidelogError) -> str:
    """The class of an error that callers of the library know."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == TidelogError.__module__)


def make_problem(status: HTTPStatus, detail: str, error: str, hint: str | None = None) -> Problem:
    """A problem document."""
    kind = f"urn:tidelog:error:{error}"
    return Problem(type=kind, title=status.phrase, status=status.value, detail=detail, error=error, hint=hint)


def internal_problem() -> Problem:
    """For a bug: the log of the server has the rest."""
    return make_problem(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the server made a mistake",
        InternalError.__name__,
        "Its log says what happened; please report it",
    )


def problem_headers(error: TidelogError | HttpError) -> tuple[tuple[str, str], ...]:
    """Further headers of the answer."""
    if isinstance(error, HttpError):
        return error.headers
    if isinstance(error, NotAuthenticatedError):
        return (CHALLENGE,)
    return (("retry-after", str(RETRY_SECONDS)),) if status_of(error) is HTTPStatus.SERVICE_UNAVAILABLE else ()
