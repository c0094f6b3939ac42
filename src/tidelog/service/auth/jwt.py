"""JSON Web Tokens (RFC 7519): verified against the keys of a file, for OAUTHBEARER and for HTTP.

Invariants
- The key decides the algorithm, never the token: an RSA key verifies RS256, a key of P-256 ES256, a secret HS256. So a
  public key is never taken for the secret of an HMAC, and `none` is no algorithm.
- A secret is read from a JWKS only (`"kty": "oct"`), with 32 bytes or more: no PEM file can become one by mistake.
- The signature is checked before any claim is believed. Issuer, audience, subject and expiry must all be there.
- A token is hostile and secret: it is bounded, and no error, log line or repr has any of it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils

from tidelog.errors import ConfigError
from tidelog.files import explained
from tidelog.service.auth.access import NotAuthenticatedError, check_principal_name

_LONGEST_TOKEN = 16 << 10
_LEEWAY_SECONDS = 30
_SHORTEST_SECRET = 32
_SMALLEST_RSA_BITS = 2048
_ES256_BYTES = 32
Parsed = TypeVar("Parsed")
_BASE64URL = re.compile(r"[A-Za-z0-9_-]*")


class Key(NamedTuple):
    """A key of the file: the one algorithm that it is for, and its check of (signed bytes, signature)."""

    algorithm: str
    key_id: str | None
    verify: Callable[[bytes, bytes], bool]

    def __repr__(self) -> str:
        return f"Key({self.algorithm})"


class Claims(NamedTuple):
    """What a verified token says."""

    subject: str
    expires_at: float


class _Header(msgspec.Struct):
    alg: str
    kid: str | None = None
    crit: msgspec.Raw | None = None


class _Jwk(msgspec.Struct):
    kty: str
    kid: str | None = None
    alg: str | None = None
    use: str | None = None
    crv: str | None = None
    n: str | None = None
    e: str | None = None
    x: str | None = None
    y: str | None = None
    k: str | None = None

    def __repr__(self) -> str:
        return f"_Jwk(kty={self.kty!r})"


class _JwkSet(msgspec.Struct):
    keys: list[_Jwk]


class JwtVerifier:
    """Verifies tokens of one issuer for one audience."""

    def __init__(
        self, keys: list[Key], issuer: str, audience: str, now: Callable[[], float], principal_claim: str = "sub"
    ) -> None:
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._now = now
        self._principal_claim = principal_claim

    def verify(self, token: str) -> Claims:
        """Who the token is about; NotAuthenticatedError for any other than a good one."""
        if len(token) > _LONGEST_TOKEN or token.count(".") != 2:
            raise NotAuthenticatedError("the token is not a JWT")
        head, body, signature_text = token.split(".")
        header = _parsed(head, _Header)
        if header.crit is not None:
            raise NotAuthenticatedError("the token has critical extensions, which are not supported")
        signed, signature = f"{head}.{body}".encode("ascii", "replace"), _unpadded(signature_text)
        fitting = [key for key in self._keys if key.algorithm == header.alg and _is_meant(key, header)]
        # Every fitting key is tried: several may be in force while keys are rotated.
        if not any(key.verify(signed, signature) for key in fitting):
            raise NotAuthenticatedError("the signature of the token is wrong, or no key fits it")
        return self._checked(_parsed(body, dict[str, object]))

    def _checked(self, claims: Mapping[str, object]) -> Claims:
        now = self._now()
        expires_at, begins_at = _time(claims, "exp"), _time(claims, "nbf")
        if expires_at is None or now >= expires_at + _LEEWAY_SECONDS:
            raise NotAuthenticatedError("the token has expired, or does not say when it does")
        if begins_at is not None and now < begins_at - _LEEWAY_SECONDS:
            raise NotAuthenticatedError("the token is not valid yet")
        if claims.get("iss") != self._issuer:
            raise NotAuthenticatedError("the token is of another issuer")
        audience = claims.get("aud")
        if self._audience not in (audience if isinstance(audience, list) else [audience]):
            raise NotAuthenticatedError("the token is for another audience")
        subject = claims.get(self._principal_claim)
        if not isinstance(subject, str):
            raise NotAuthenticatedError("the token does not say whose it is")
        try:
            return Claims(check_principal_name(subject), expires_at)
        except ValueError:
            raise NotAuthenticatedError("the token is of somebody who can have no grants") from None


def _is_meant(key: Key, header: _Header) -> bool:
    return header.kid is None or key.key_id is None or key.key_id == header.kid


def _time(claims: Mapping[str, object], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise NotAuthenticatedError("a time in the token is no number")
    return float(value)


def _parsed(text: str, kind: type[Parsed]) -> Parsed:
    try:
        return msgspec.json.decode(_unpadded(text), type=kind)
    except (msgspec.DecodeError, RecursionError):
        pass
    # Outside the except block, so that nothing which knows the token hangs on to the error.
    raise NotAuthenticatedError("the token is not a JWT")


def _unpadded(text: str) -> bytes:
    if _BASE64URL.fullmatch(text) is None or len(text) % 4 == 1:
        raise NotAuthenticatedError("the token is not a JWT")
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if base64.urlsafe_b64encode(data).rstrip(b"=").decode() != text:  # two texts of one token are one too many
        raise NotAuthenticatedError("the token is not a JWT")
    return data


# Keys


def read_keys(path: Path) -> list[Key]:
    """The keys of a JWKS file, or of a PEM file with one public key."""
    with explained("read the keys of tokens", path):
        data = path.read_bytes()
    text = data.lstrip()
    if text.startswith(b"-----BEGIN"):
        return [_pem_key(data, path)]
    if not text.startswith(b"{"):
        raise ConfigError("the file has neither a JWKS nor a public key in PEM", path=path)
    try:
        found = msgspec.json.decode(data, type=_JwkSet).keys
        keys = [key for key in map(_key_of, found) if key is not None]
    except (msgspec.DecodeError, ValueError, binascii.Error, NotAuthenticatedError) as error:
        problem = str(error) if isinstance(error, ConfigError) else "a key in the JWKS is damaged"
    else:
        if keys:
            return keys
        problem = "the JWKS has no key for RS256, ES256 or HS256"
    raise ConfigError(problem, path=path, hint="Copy it from the issuer again")


def _pem_key(data: bytes, path: Path) -> Key:
    try:
        public = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        public = None
    if isinstance(public, rsa.RSAPublicKey):
        return _rsa_key(public, None)
    if isinstance(public, ec.EllipticCurvePublicKey) and isinstance(public.curve, ec.SECP256R1):
        return _ec_key(public, None)
    hint = "Expected is `BEGIN PUBLIC KEY` of RSA or P-256; openssl pkey -pubout makes it"
    raise ConfigError("the file has no public key that can verify RS256 or ES256", path=path, hint=hint)


def _key_of(jwk: _Jwk) -> Key | None:
    """None for a key of another kind or use, which an issuer's file may have besides."""
    if jwk.use not in (None, "sig"):
        return None
    if jwk.kty == "RSA" and jwk.n and jwk.e and jwk.alg in (None, "RS256"):
        return _rsa_key(rsa.RSAPublicNumbers(_number(jwk.e), _number(jwk.n)).public_key(), jwk.kid)
    if jwk.kty == "EC" and jwk.crv == "P-256" and jwk.x and jwk.y and jwk.alg in (None, "ES256"):
        numbers = ec.EllipticCurvePublicNumbers(_number(jwk.x), _number(jwk.y), ec.SECP256R1())
        return _ec_key(numbers.public_key(), jwk.kid)
    if jwk.kty == "oct" and jwk.k and jwk.alg in (None, "HS256"):
        return _secret_key(_unpadded(jwk.k), jwk.kid)
    return None


def _number(text: str) -> int:
    return int.from_bytes(_unpadded(text), "big")


def _rsa_key(public: rsa.RSAPublicKey, key_id: str | None) -> Key:
    if public.key_size < _SMALLEST_RSA_BITS:
        raise ConfigError(f"a key of RSA has {public.key_size} bits; at least {_SMALLEST_RSA_BITS} are safe")

    def verify(signed: bytes, signature: bytes) -> bool:
        try:
            public.verify(signature, signed, padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            return False
        return True

    return Key("RS256", key_id, verify)


def _ec_key(public: ec.EllipticCurvePublicKey, key_id: str | None) -> Key:
    def verify(signed: bytes, signature: bytes) -> bool:
        if len(signature) != 2 * _ES256_BYTES:
            return False
        r, s = (int.from_bytes(part, "big") for part in (signature[:_ES256_BYTES], signature[_ES256_BYTES:]))
        try:
            public.verify(utils.encode_dss_signature(r, s), signed, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True

    return Key("ES256", key_id, verify)


def _secret_key(secret: bytes, key_id: str | None) -> Key:
    if len(secret) < _SHORTEST_SECRET:
        raise ConfigError(f"a secret for HS256 must have {_SHORTEST_SECRET} bytes or more")

    def verify(signed: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(hmac.digest(secret, signed, "sha256"), signature)

    return Key("HS256", key_id, verify)
