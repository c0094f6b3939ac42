"""What stores say, sorted by what the caller does next."""

from __future__ import annotations

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError

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
from tidelog.store.obstore import translate, translated


def answer(status: str, code: str = "") -> str:
    """A client's message about an answer."""
    return f"Error performing GET http://x/y?sig=secret in 1ms - Server returned non-2xx status code: {status}: {code}"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (FileNotFoundError(answer("404 Not Found", "<Code>NoSuchKey</Code>")), NotFoundError),
        (FileNotFoundError(answer("404 Not Found", "<Code>BlobNotFound</Code>")), NotFoundError),
        (FileNotFoundError("No such file or directory (os error 2)"), NotFoundError),
        (FileNotFoundError(answer("404 Not Found", "<Code>NoSuchBucket</Code>")), ConfigError),
        (FileNotFoundError(answer("404 Not Found", "<Code>ContainerNotFound</Code>")), ConfigError),
        (GenericError(answer("404 Not Found", "<Code>NoSuchBucket</Code>")), ConfigError),
        (FileNotFoundError(answer("404 Not Found", "<html>a proxy</html>")), StoreUnavailableError),
        (FileNotFoundError(answer("404 Not Found")), StoreUnavailableError),
        (AlreadyExistsError(answer("412 Precondition Failed")), ConflictError),
        (PreconditionError(answer("412 Precondition Failed")), ConflictError),
        (PreconditionError("Error performing PUT x in 2s, after 1 retries, max_retries: 5"), StoreUnavailableError),
        (AlreadyExistsError("Error performing PUT x in 2s, after 3 retries, max_retries: 5"), StoreUnavailableError),
        (PermissionDeniedError(answer("403 Forbidden", "<Code>SignatureDoesNotMatch</Code>")), AccessDeniedError),
        (GenericError(answer("403 Forbidden")), AccessDeniedError),
        (GenericError(answer("400 Bad Request", "<Code>ExpiredToken</Code>")), AccessDeniedError),
        (OSError("Generic error: Permission denied (os error 13)"), AccessDeniedError),
        (GenericError(answer("400 Bad Request", "<Code>RequestTimeout</Code>")), StoreUnavailableError),
        (GenericError(answer("500 Internal Server Error")), StoreUnavailableError),
        (GenericError(answer("503 Service Unavailable", "<Code>SlowDown</Code>")), StoreUnavailableError),
        (GenericError(answer("429 Too Many Requests")), StoreUnavailableError),
        (GenericError("HTTP error: error sending request"), StoreUnavailableError),
        (OSError("Generic S3 error: HTTP error: request or response body error"), StoreUnavailableError),
        (GenericError(answer("400 Bad Request", "<Code>InvalidArgument</Code>")), InputError),
        (NotImplementedError("put_opts"), NotSupportedError),
        (ValueError("Could not parse path"), InputError),
    ],
)
def test_every_answer_says_what_to_do_next(said: Exception, meant: type[TidelogError]) -> None:
    """Exactly that, and no signature of a URL is in it."""
    error = translate(said, "get", "s3://b/k")
    assert type(error) is meant
    assert ("s3://b/k" if "bucket" not in str(error) else "bucket 'b'") in str(error)
    assert "secret" not in str(error)


def test_a_signature_is_not_in_the_traceback_either() -> None:
    """The client's own error, which has it, is not chained."""
    with pytest.raises(StoreUnavailableError) as raised, translated("get", "az://c/k"):
        raise GenericError(answer("500 Oops"))
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


def test_our_own_errors_pass() -> None:
    """A refused key is not explained twice."""
    with pytest.raises(InputError, match=r"^mine$"), translated("get", "x"):
        raise InputError("mine")
