"""JWT: good tokens of each algorithm, and the attacks that verifiers have fallen for."""

from __future__ import annotations

import base64
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from hypothesis import given
from hypothesis import strategies as st

from tidelog.errors import ConfigError
from tidelog.service.auth.access import NotAuthenticatedError
from tidelog.service.auth.jwt import JwtVerifier, read_keys

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
SECRET = b"0123456789abcdef0123456789abcdef"
NOW = 1_800_000_000
CLAIMS: dict[str, Any] = {"iss": "https://issuer", "aud": "tidelog", "sub": "alice", "exp": NOW + 300}


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def number(value: int) -> str:
    return b64(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def pem(key: Any) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))


def rsa_jwk(key: rsa.RSAPrivateKey, **further: str) -> dict[str, str]:
    numbers = key.public_key().public_numbers()
    return {"kty": "RSA", "n": number(numbers.n), "e": number(numbers.e), **further}


def ec_jwk(**further: str) -> dict[str, str]:
    numbers = EC.public_key().public_numbers()
    x, y = (b64(value.to_bytes(32, "big")) for value in (numbers.x, numbers.y))
    return {"kty": "EC", "crv": "P-256", "x": x, "y": y, **further}


def oct_jwk(**further: str) -> dict[str, str]:
    return {"kty": "oct", "k": b64(SECRET), **further}


def sign(algorithm: str, signed: bytes, key: Any = None) -> bytes:
    if algorithm == "RS256":
        return bytes((key or RSA).sign(signed, padding.PKCS1v15(), hashes.SHA256()))
    if algorithm == "ES256":
        r, s = utils.decode_dss_signature((key or EC).sign(signed, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")
    return hmac.digest(key or SECRET, signed, "sha256") if algorithm == "HS256" else b""


def token(
    algorithm: str = "RS256",
    *,
    key: Any = None,
    header: dict[str, Any] | None = None,
    says: str | None = None,
    **claims: Any,
) -> str:
    """Signed by the algorithm; `says` is what its header says instead. Claims that are None are left out."""
    head = {"alg": says or algorithm, **(header or {})}
    body = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    signed = f"{b64(json.dumps(head).encode())}.{b64(json.dumps(body).encode())}"
    return f"{signed}.{b64(sign(algorithm, signed.encode(), key))}"


def verifier(tmp_path: Path, *jwks: dict[str, str], pem_data: bytes | None = None, claim: str = "sub") -> JwtVerifier:
    path = tmp_path / "keys"
    path.write_bytes(json.dumps({"keys": jwks}).encode() if pem_data is None else pem_data)
    return JwtVerifier(read_keys(path), "https://issuer", "tidelog", lambda: NOW, claim)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "HS256"])
def test_good_token_says_who_it_is(tmp_path: Path, algorithm: str) -> None:
    """Each algorithm, with the keys of an issuer in one file."""
    keys = verifier(tmp_path, rsa_jwk(RSA), ec_jwk(), oct_jwk())
    assert keys.verify(token(algorithm)) == ("alice", NOW + 300)


@pytest.mark.parametrize(("algorithm", "key"), [("RS256", RSA), ("ES256", EC)])
def test_public_key_in_pem_is_enough(tmp_path: Path, algorithm: str, key: Any) -> None:
    """A single key needs no JWKS."""
    assert verifier(tmp_path, pem_data=pem(key)).verify(token(algorithm)).subject == "alice"


def test_keys_are_rotated_by_having_both(tmp_path: Path) -> None:
    """While keys are changed the file has the old and the new one; a key id chooses among them."""
    keys = verifier(tmp_path, rsa_jwk(OTHER_RSA, kid="new"), rsa_jwk(RSA, kid="old"))
    assert keys.verify(token(header={"kid": "old"})).subject == "alice"
    assert keys.verify(token(key=OTHER_RSA, header={"kid": "new"})).subject == "alice"
    assert keys.verify(token()).subject == "alice"
    with pytest.raises(NotAuthenticatedError):
        keys.verify(token(header={"kid": "new"}))
    with pytest.raises(NotAuthenticatedError):
        keys.verify(token(header={"kid": "gone"}))


ATTACKS = {
    "alg none": token("none"),
    "alg None with the signature of another": token("RS256", says="None"),
    "no signature": token("RS256").rsplit(".", 1)[0] + ".",
    "the public key as the secret of an HMAC": token("HS256", key=pem(RSA)),
    "the modulus as the secret of an HMAC": token("HS256", key=number(RSA.public_key().public_numbers().n).encode()),
    "signed by another key": token(key=OTHER_RSA),
    "an RSA signature that says ES256": token("RS256", says="ES256"),
    "ES256 with r = s = 0": ".".join([*token("ES256").split(".")[:2], b64(bytes(64))]),
    "a signature in DER": ".".join([*token("ES256").split(".")[:2], b64(EC.sign(b"", ec.ECDSA(hashes.SHA256())))]),
    "a larger hash": token("RS256", says="RS512"),
    "critical extension": token(header={"crit": ["b64"], "b64": False}),
    "key in the header": token(key=OTHER_RSA, header={"jwk": rsa_jwk(OTHER_RSA)}),
    "expired": token(exp=NOW - 31),
    "no expiry": token(exp=None),
    "expiry as text": token(exp="9999999999"),
    "expiry as a truth value": token(exp=True),
    "not yet": token(nbf=NOW + 31),
    "other issuer": token(iss="https://issuer.evil"),
    "no issuer": token(iss=None),
    "other audience": token(aud="other"),
    "other audiences": token(aud=["other", "tidelog2"]),
    "audience as an object": token(aud={"tidelog": 1}),
    "no audience": token(aud=None),
    "no subject": token(sub=None),
    "subject is a number": token(sub=7),
    "subject is everyone": token(sub="*"),
    "subject is the anonymous": token(sub="ANONYMOUS"),
    "subject with a line end": token(sub="alice\nbob"),
    "four parts": token() + ".x",
    "two parts": "a.b",
    "encrypted": "a.b.c.d.e",
    "padded": token() + "=",
    "not base64": "ä.ö.ü",
    "header is a list": f"{b64(b'[]')}.{token().split('.', 1)[1]}",
    "nested too deep": f"{b64(b'[' * 9000)}.a.a",
    "too long": token(x="x" * 20_000),
    "empty": "",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_is_refused_without_a_word_of_the_token(tmp_path: Path, attack: str) -> None:
    """With keys of RSA and P-256, as issuers publish them."""
    keys = verifier(tmp_path, rsa_jwk(RSA), ec_jwk())
    with pytest.raises(NotAuthenticatedError) as caught:
        keys.verify(ATTACKS[attack])
    said = f"{caught.value!r} {caught.value}"
    assert not [part for part in ATTACKS[attack].split(".") if len(part) > 3 and part in said]


def test_audience_may_be_one_of_several_and_clocks_may_differ(tmp_path: Path) -> None:
    """Half a minute of difference between clocks is nobody's fault."""
    keys = verifier(tmp_path, rsa_jwk(RSA), claim="client_id")
    assert keys.verify(token(aud=["x", "tidelog"], exp=NOW - 29, nbf=NOW + 29, client_id="bob")).subject == "bob"


@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_changed_token_is_refused(at: int, noise: bytes) -> None:
    """No byte of a token can be changed."""
    good = GOOD.encode()
    at = min(at, len(good) - len(noise))
    changed = good[:at] + noise + good[at + len(noise) :]
    if changed == good:
        return
    with pytest.raises(NotAuthenticatedError):
        HS256.verify(changed.decode("latin-1"))


GOOD = token("HS256")


def _hs256() -> JwtVerifier:
    from tidelog.service.auth.jwt import _secret_key

    return JwtVerifier([_secret_key(SECRET, None)], "https://issuer", "tidelog", lambda: NOW)


HS256 = _hs256()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a-secret-that-is-long-enough-for-hs256-but-no-jwks",
        b'{"keys": []}',
        b'{"keys": [{"kty": "oct", "k": "c2hvcnQ"}]}',
        b'{"keys": [{"kty": "EC", "crv": "P-256", "x": "AQ", "y": "AQ"}]}',
        b'{"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB"}]}',
        b'{"keys": [{"kty": "RSA", "n": "!", "e": "AQAB"}]}',
        b'{"keys": [{"kty": "RSA", "use": "enc", "n": "AQAB", "e": "AQAB"}]}',
        b"{",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        pem(ec.generate_private_key(ec.SECP384R1())),
    ],
)
def test_file_without_a_good_key_is_refused(tmp_path: Path, content: bytes) -> None:
    """A weak, damaged or empty file is an error at the start, and a text is never a secret by accident."""
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert "a-secret-that" not in str(caught.value)
    assert "c2hvcnQ" not in str(caught.value)
