"""SCRAM (RFC 5802, RFC 7677), the server's side: a password is proven without being sent, and without being stored.

    client first    n,,n=alice,r=<client nonce>
    server first    r=<client nonce><server nonce>,s=<salt>,i=<iterations>
    client final    c=biws,r=<both nonces>,p=<proof>
    server final    v=<signature of the server>

Invariants
- What is stored is salted and iterated: the stored key, which verifies a proof and cannot make one, and the server key.
- A name that nobody has gets a salt too, always the same one: a client cannot find out which names there are.
- Proofs are compared in constant time. Each server nonce is used for one exchange.
- What a client sends is hostile: anything but the grammar above is refused (`ScramError`), without channel binding.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable

import msgspec

from tidelog.errors import InputError

MECHANISMS = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
DEFAULT_ITERATIONS = 8192
FEWEST_ITERATIONS, MOST_ITERATIONS = 4096, 1_000_000
_SALT_BYTES = 16
_NONCE_BYTES = 18
_LONGEST_MESSAGE = 4096


class ScramError(InputError):
    """A message that is none of the protocol, or a wrong proof."""


class ScramKeys(msgspec.Struct, frozen=True):
    """What is stored of a password for one mechanism."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def __repr__(self) -> str:
        return f"ScramKeys(iterations={self.iterations})"


def make_keys(digest: str, password: str, salt: bytes | None = None, iterations: int = DEFAULT_ITERATIONS) -> ScramKeys:
    """The keys of a password."""
    salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
    return keys_of_salted(digest, hashlib.pbkdf2_hmac(digest, password.encode(), salt, iterations), salt, iterations)


def keys_of_salted(digest: str, salted_password: bytes, salt: bytes, iterations: int) -> ScramKeys:
    """The keys of a password that a client has salted and iterated itself, as Kafka's admin clients do."""
    client_key = hmac.digest(salted_password, b"Client Key", digest)
    stored_key = hashlib.new(digest, client_key).digest()
    return ScramKeys(salt, iterations, stored_key, hmac.digest(salted_password, b"Server Key", digest))


def unknown_keys(digest: str, name: str, seed: bytes, iterations: int = DEFAULT_ITERATIONS) -> ScramKeys:
    """Keys for a name that nobody has: no proof fits them, and they are the same each time."""
    salt = hmac.digest(seed, name.encode(), "sha256")[:_SALT_BYTES]
    size = hashlib.new(digest).digest_size
    return ScramKeys(salt, iterations, secrets.token_bytes(size), secrets.token_bytes(size))


class ScramServer:
    """One exchange. `name` is who it is about once the first message is read; who it *is* only when `is_done`."""

    def __init__(
        self,
        digest: str,
        keys_of: Callable[[str], ScramKeys],
        make_nonce: Callable[[], str] = lambda: secrets.token_urlsafe(_NONCE_BYTES),
    ) -> None:
        """`keys_of` gives keys for every name, also for those that nobody has."""
        self._digest = digest
        self._keys_of = keys_of
        self._make_nonce = make_nonce
        self._keys: ScramKeys | None = None
        self._signed = ""
        self._header = ""
        self._nonce = ""
        self.name = ""
        self.is_done = False

    def step(self, message: bytes) -> bytes:
        """The answer to a message of the client; ScramError ends the exchange."""
        if self.is_done or len(message) > _LONGEST_MESSAGE:
            raise ScramError("no further message is expected, or it is too long")
        try:
            text = message.decode()
        except UnicodeDecodeError:
            raise ScramError("a message is not UTF-8") from None
        return (self._first(text) if self._keys is None else self._final(text, self._keys)).encode()

    def _first(self, text: str) -> str:
        flag, comma, rest = text.partition(",")
        authorized_as, second, bare = rest.partition(",")
        if flag not in ("n", "y") or not comma or not second:
            raise ScramError("the first message must begin with n,, (there is no channel binding)")
        fields = bare.split(",")
        self.name = _unescaped(_value(fields, 0, "n"))
        nonce = _value(fields, 1, "r")
        if authorized_as not in ("", f"a={_value(fields, 0, 'n')}"):
            raise ScramError("one user cannot act as another")
        if len(fields) > 2:
            raise ScramError("extensions are not supported")
        self._keys = self._keys_of(self.name)
        self._header, self._nonce = f"{flag},{authorized_as},", nonce + self._make_nonce()
        salt = base64.b64encode(self._keys.salt).decode()
        answer = f"r={self._nonce},s={salt},i={self._keys.iterations}"
        self._signed = f"{bare},{answer}"
        return answer

    def _final(self, text: str, keys: ScramKeys) -> str:
        without_proof, _, proof_field = text.rpartition(",")
        fields = without_proof.split(",")
        header, nonce = _decoded(_value(fields, 0, "c")), _value(fields, 1, "r")
        proof = _decoded(_value([proof_field], 0, "p"))
        if len(fields) > 2 or header != self._header.encode() or not hmac.compare_digest(nonce, self._nonce):
            raise ScramError("the final message does not fit the first one")
        signed = f"{self._signed},{without_proof}".encode()
        signature = hmac.digest(keys.stored_key, signed, self._digest)
        if len(proof) != len(signature):
            raise ScramError("the proof is wrong")
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        if not hmac.compare_digest(hashlib.new(self._digest, client_key).digest(), keys.stored_key):
            raise ScramError("the proof is wrong")
        self.is_done = True
        return "v=" + base64.b64encode(hmac.digest(keys.server_key, signed, self._digest)).decode()


def _value(fields: list[str], index: int, name: str) -> str:
    """The value of the field that must stand there."""
    if index >= len(fields) or not fields[index].startswith(f"{name}=") or len(fields[index]) < 3:
        raise ScramError(f"the field {name} is missing")
    value = fields[index][2:]
    if name == "r" and not (value.isascii() and value.isprintable()):
        raise ScramError("a nonce must be printable ASCII")
    return value


def _unescaped(name: str) -> str:
    """`=2C` is a comma, `=3D` an equals sign, and nothing else begins with one."""
    if "=" in name.replace("=2C", "").replace("=3D", ""):
        raise ScramError("a name has an = that is not =2C or =3D")
    return name.replace("=2C", ",").replace("=3D", "=")


def _decoded(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ScramError("a field is not base64") from None
    if base64.b64encode(data).decode() != text:
        raise ScramError("a field is not base64")
    return data
