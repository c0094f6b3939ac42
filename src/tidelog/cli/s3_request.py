"""One signed request to an S3 server, with what Python brings along.

Buckets are made by whoever runs a server, and no client of tidelog's stores makes any; for this one question the
signature (AWS Signature Version 4) is written out here. Only for servers on this machine: the whole body is in memory.
"""

from __future__ import annotations

import hashlib
import hmac
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import urlsplit

from tidelog.secret import Secret

REGION = "us-east-1"
_ALGORITHM = "AWS4-HMAC-SHA256"


class S3Keys(NamedTuple):
    """Who asks."""

    access_key_id: str
    secret_access_key: Secret


def ask(method: str, url: str, keys: S3Keys, body: bytes = b"", *, timeout_seconds: float = 5.0) -> int:
    """The status of the answer, whatever it is; OSError when there is none. The path of the URL is plain."""
    request = urllib.request.Request(url, body or None, _signed_headers(method, url, keys, body), method=method)
    # Never through a proxy of the environment: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def _signed_headers(method: str, url: str, keys: S3Keys, body: bytes) -> dict[str, str]:
    parts = urlsplit(url)
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    signed = {"host": parts.netloc, "x-amz-content-sha256": digest, "x-amz-date": moment}
    names = ";".join(signed)
    lines = [method, parts.path, parts.query, *(f"{name}:{value}" for name, value in signed.items()), "", names, digest]
    scope = f"{moment[:8]}/{REGION}/s3/aws4_request"
    canonical = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    signature = _sign(keys.secret_access_key, scope, "\n".join([_ALGORITHM, moment, scope, canonical]))
    who = f"{_ALGORITHM} Credential={keys.access_key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**signed, "authorization": who}


def _sign(secret: Secret, scope: str, text: str) -> str:
    key = b"AWS4" + secret.reveal().encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()
