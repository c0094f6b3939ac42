"""What an object store says, as errors of ours, sorted by what the caller does next.

Invariants
- "Not found" is believed only where the answer says that the object is missing. A missing bucket, or a 404 of some
  proxy in between, must never pass for an empty catalog.
- A refused condition is a conflict only if it is certain that nothing was written: after a retry inside the client, the
  one who was first may have been the first attempt. Then the outcome is undecided.
- What is not known to be for good counts as passing. Retrying costs time; giving up on data that is there costs more.
- No message has the query of a URL in it: there it is where some stores carry a signature.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.exceptions import NotSupportedError as NotSupportedByClientError

from tidelog.errors import (
    AccessDeniedError,
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    TidelogError,
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")
_RETRIED = re.compile(r"after [1-9]\d* retries")
_QUERY = re.compile(r"\?\S+")
_MAX_REASON_CHARACTERS = 300

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "without LOCATION")
# What S3 and GCS, Azure, a directory and memory say when there is no such object.
_NO_OBJECT = ("NoSuchKey", "BlobNotFound", "(os error 2)", "(os error 20)", "is directory", "No data in memory found")
_DENIED = ("ExpiredToken", "InvalidToken", "AuthorizationHeaderMalformed", "(os error 13)", "(os error 1)")
_PASSING = ("RequestTimeout", "SlowDown", "ServerBusy", "OperationTimedOut")
_PASSING_STATUSES = (408, 409, 425, 429)


@contextlib.contextmanager
def translated(operation: str, place: str) -> Iterator[None]:
    """Turns errors of the client into ours; `place` is how the store or object is called in them."""
    try:
        yield
    except (BaseError, OSError, NotImplementedError, ValueError) as error:
        if isinstance(error, TidelogError):
            raise
        # A traceback would print the original, query and all.
        raise translate(error, operation, place) from (None if "sig=" in str(error) else error)


def translate(error: Exception, operation: str, place: str) -> TidelogError:
    """Our error for one of the client's."""
    text = str(error)
    reason = _reason(text)
    if isinstance(error, NotImplementedError | NotSupportedByClientError):
        return NotSupportedError(f"{place}: the store cannot do that ({reason})", operation=operation)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return _conflict(text, operation, place)
    if any(mark in text for mark in _NO_BUCKET):
        hint = "Check its name, the region and the endpoint; a bucket is not made on the way"
        return ConfigError(f"{place}: there is no such bucket ({reason})", operation=operation, hint=hint)
    if isinstance(error, FileNotFoundError):
        return _not_found(text, operation, place)
    if isinstance(error, ValueError):
        return InputError(f"{place}: {reason}", operation=operation)
    return _by_status(error, text, operation, place)


def _conflict(text: str, operation: str, place: str) -> TidelogError:
    if _RETRIED.search(text):
        message = f"{place}: whether it was written is not known, an earlier attempt may have been"
        return StoreUnavailableError(message, operation=operation, hint="Read it back")
    return ConflictError(f"{place}: somebody else was first", operation=operation, hint="Read it again and decide")


def _not_found(text: str, operation: str, place: str) -> TidelogError:
    if any(mark in text for mark in _NO_OBJECT):
        return NotFoundError(f"{place}: there is no such object", operation=operation)
    return StoreUnavailableError(f"{place}: a 404 that does not say what is missing", operation=operation)


def _by_status(error: Exception, text: str, operation: str, place: str) -> TidelogError:
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    reason = _reason(text)
    is_denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403)
    if is_denied or any(mark in text for mark in _DENIED):
        hint = "Check the key (store_access_key_id, AWS_ACCESS_KEY_ID, ...), its rights, and this machine's clock"
        return AccessDeniedError(f"{place}: access is denied ({reason})", operation=operation, hint=hint)
    is_passing = status is None or status >= 500 or status in _PASSING_STATUSES
    if is_passing or any(mark in text for mark in _PASSING):
        hint = "Check the network and the endpoint (store_endpoint, AWS_ENDPOINT_URL), or try again later"
        return StoreUnavailableError(f"{place}: the store is not available ({reason})", operation=operation, hint=hint)
    return InputError(f"{place}: the store refused the request ({reason})", operation=operation)


def _reason(text: str) -> str:
    """Status and code where there are any, else the beginning of what the client said, without queries."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if status:
        return f"{status[1]} {code[1]}" if code else status[1]
    said = _QUERY.sub("?...", text.partition("\n\nDebug source")[0])
    return said[:_MAX_REASON_CHARACTERS]
