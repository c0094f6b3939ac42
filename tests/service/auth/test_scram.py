"""SCRAM: the exchanges of the RFCs, and clients that do not keep to them."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.service.auth.scram import ScramError, ScramKeys, ScramServer, make_keys, unknown_keys

RFC_5802 = (
    "sha1",
    "QSXCR+Q6sek8bf92",
    "3rfcNHYJY1ZVvWVs7j",
    b"n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL",
    b"r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
    b"c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
    b"v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
)
RFC_7677 = (
    "sha256",
    "W22ZaJ0SNY7soEsUEjb6gQ==",
    "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0",
    b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
    b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
)
KEYS = {digest: make_keys(digest, "pencil", b"a salt of 16 byt", 4096) for digest in ("sha256", "sha512")}


@pytest.mark.parametrize("exchange", [RFC_5802, RFC_7677], ids=["rfc5802", "rfc7677"])
def test_exchange_of_the_rfc_gives_its_bytes(exchange: tuple[str, str, str, bytes, bytes, bytes, bytes]) -> None:
    """Every message of the server is the one that the RFC prints."""
    digest, salt, nonce, *messages = exchange
    keys = make_keys(digest, "pencil", base64.b64decode(salt), 4096)
    server = ScramServer(digest, lambda name: keys, lambda: nonce)
    assert server.step(messages[0]) == messages[1]
    before = server.is_done
    assert server.step(messages[2]) == messages[3]
    assert (before, server.is_done, server.name) == (False, True, "user")


class ScramClient:
    """The other side, written from the RFC."""

    def __init__(self, digest: str, name: str, password: str, header: str = "n,,") -> None:
        self._digest = digest
        self._password = password
        self._header = header
        self._bare = f"n={name.replace('=', '=3D').replace(',', '=2C')},r=nonce-of-client"

    @property
    def first(self) -> bytes:
        return (self._header + self._bare).encode()

    def final(self, answer: bytes) -> tuple[bytes, bytes]:
        """The final message, and the server's final message that proves the server."""
        fields = dict(part.split("=", 1) for part in answer.decode().split(","))
        salted = hashlib.pbkdf2_hmac(
            self._digest, self._password.encode(), base64.b64decode(fields["s"]), int(fields["i"])
        )
        client_key = hmac.digest(salted, b"Client Key", self._digest)
        without_proof = f"c={base64.b64encode(self._header.encode()).decode()},r={fields['r']}"
        signed = f"{self._bare},{answer.decode()},{without_proof}".encode()
        signature = hmac.digest(hashlib.new(self._digest, client_key).digest(), signed, self._digest)
        proof = base64.b64encode(bytes(a ^ b for a, b in zip(client_key, signature, strict=True))).decode()
        server_key = hmac.digest(salted, b"Server Key", self._digest)
        expected = base64.b64encode(hmac.digest(server_key, signed, self._digest))
        return f"{without_proof},p={proof}".encode(), b"v=" + expected


@pytest.mark.parametrize("digest", ["sha256", "sha512"])
@pytest.mark.parametrize("name", ["alice", "a,b=c", "Zoë"])
def test_right_password_is_accepted_and_the_server_proves_itself(digest: str, name: str) -> None:
    """Both sides know the password afterwards, for both digests and names that must be escaped."""
    client = ScramClient(digest, name, "pencil")
    server = ScramServer(digest, lambda who: KEYS[digest])
    final, expected = client.final(server.step(client.first))
    assert server.step(final) == expected
    assert server.is_done
    assert server.name == name


@pytest.mark.parametrize("digest", ["sha256", "sha512"])
def test_wrong_password_and_unknown_user_are_refused_alike(digest: str) -> None:
    """The same error, and an unknown name has a salt that stays the same."""
    errors, salts = [], set()
    seed = b"seed"
    for keys_of in (lambda name: KEYS[digest], lambda name: unknown_keys(digest, name, seed, 4096)):
        for _ in range(2):
            client = ScramClient(digest, "alice", "wrong")
            server = ScramServer(digest, keys_of)
            answer = server.step(client.first)
            salts.add(answer.split(b",")[1])
            with pytest.raises(ScramError) as caught:
                server.step(client.final(answer)[0])
            errors.append(str(caught.value))
            assert not server.is_done
    assert len(set(errors)) == 1
    assert len(salts) == 2


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n",
        b"n,,",
        b"n,,n=,r=x",
        b"n,,n=a",
        b"p=tls-unique,,n=a,r=x",
        b"n,a=b,n=a,r=x",
        b"n,,r=x,n=a",
        b"n,,n=a=b,r=x",
        b"n,,n=a,r=x,tokenauth=true",
        b"n,,m=1,n=a,r=x",
        b"\xff,,n=a,r=x",
        b"n,,n=a,r=\x00",
        b"n,,n=a,r=" + b"x" * 5000,
    ],
)
def test_first_message_outside_of_the_grammar_is_refused(first: bytes) -> None:
    """Channel binding, acting as another, extensions and damaged bytes."""
    with pytest.raises(ScramError):
        ScramServer("sha256", lambda name: KEYS["sha256"]).step(first)


def test_proof_of_one_exchange_is_worth_nothing_in_another() -> None:
    """The nonce of the server makes each proof new: what was overheard cannot be sent again."""
    client = ScramClient("sha256", "alice", "pencil")
    server = ScramServer("sha256", lambda name: KEYS["sha256"])
    final, _ = client.final(server.step(client.first))
    server.step(final)
    with pytest.raises(ScramError):
        server.step(final)
    again = ScramServer("sha256", lambda name: KEYS["sha256"])
    again.step(client.first)
    with pytest.raises(ScramError):
        again.step(final)


@given(st.binary(max_size=100), st.integers(0, 100))
def test_damaged_final_message_never_authenticates(noise: bytes, at: int) -> None:
    """Whatever replaces bytes of the final message: it is the same message, or it is refused."""
    client = ScramClient("sha256", "alice", "pencil")
    server = ScramServer("sha256", lambda name: KEYS["sha256"], lambda: "nonce-of-server")
    final, _ = client.final(server.step(client.first))
    damaged = final[:at] + noise + final[at + len(noise) :]
    try:
        server.step(damaged)
    except ScramError:
        assert not server.is_done
    else:
        assert damaged == final


def test_keys_do_not_print_themselves() -> None:
    """Nothing of a stored key is in its repr."""
    keys = ScramKeys(b"salty-salt", 4096, b"stored-key", b"server-key")
    assert repr(keys) == "ScramKeys(iterations=4096)"
