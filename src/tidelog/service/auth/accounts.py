"""Users, tokens and grants: one document in the metadata store of the installation, and the ways to change it.

    {root}/storage/accounts    `AccountsDocument`, as JSON

Invariants
- No secret is stored: of a password its scrypt hash and SCRAM's keys, of a token its SHA-256. What is generated is
  shown once, by the call that makes it.
- Users, tokens and grants change together: a user that is removed takes tokens and grants along, in one write, so that
  a later user of the same name begins with none.
- A credential has an id, which changes with it: a session that was begun with an older one is over.
- Secrets are compared in constant time, and a user that does not exist takes as long to refuse as one that does.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import msgspec

from tidelog.errors import ConflictError, InputError, NotFoundError
from tidelog.service.auth.access import ANYONE, Grant, Principal, check_principal_name
from tidelog.service.auth.scram import MECHANISMS, ScramKeys, make_keys
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.keys import DEFAULT_ROOT, accounts_key
from tidelog.store.metadata.base import MetadataStore

SHORTEST_PASSWORD, LONGEST_PASSWORD = 8, 1024
_TOKEN_PREFIX = "tl"
_TOKEN_BYTES = 32
_ID_BYTES = 8
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 1 << 14, 8, 1  # 16 MiB and some 40 ms
_SCRYPT_MAX_BYTES = 64 << 20


class PasswordHash(msgspec.Struct, frozen=True):
    """A password, by scrypt."""

    salt: bytes
    hash: bytes
    n: int = _SCRYPT_N
    r: int = _SCRYPT_R
    p: int = _SCRYPT_P

    def fits(self, password: str) -> bool:
        """Takes tens of milliseconds, on purpose: not for an event loop."""
        return hmac.compare_digest(_scrypt(password, self.salt, self.n, self.r, self.p), self.hash)

    def __repr__(self) -> str:
        return "PasswordHash()"


def _scrypt(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=_SCRYPT_MAX_BYTES, dklen=32)


def hash_password(password: str) -> PasswordHash:
    """With a salt of its own."""
    salt = secrets.token_bytes(16)
    return PasswordHash(salt, _scrypt(password, salt, _SCRYPT_N, _SCRYPT_R, _SCRYPT_P))


NOBODY = PasswordHash(secrets.token_bytes(16), secrets.token_bytes(32))
"""No password fits it: it takes the time that a real one would."""


class User(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Somebody with a password. `password` is None where only SCRAM's keys are known, which Kafka's tools set."""

    id: str
    created_us: int
    changed_us: int
    password: PasswordHash | None = None
    scram: dict[str, ScramKeys] = {}


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A bearer token of a principal, which need not have a password."""

    principal: str
    sha256: bytes
    created_us: int
    expires_us: int | None = None
    note: str = ""

    def __repr__(self) -> str:
        return f"Token(principal={self.principal!r})"


class AccountsDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All of it."""

    users: dict[str, User] = {}
    tokens: dict[str, Token] = {}
    grants: list[Grant] = []


class NewToken(NamedTuple):
    """A token that was made. Its text is not stored: this is the only time that it is known."""

    id: str
    text: str

    def __repr__(self) -> str:
        return f"NewToken(id={self.id!r})"


Change = Callable[[AccountsDocument], AccountsDocument]


class AccountStore:
    """Reads and changes the document; threads and processes may share it."""

    def __init__(self, metadata: MetadataStore, root: str = DEFAULT_ROOT) -> None:
        decode = partial(decode_json, kind=AccountsDocument)
        self._stored = VersionedDocument(metadata, accounts_key(root), encode_json, decode)

    def read(self) -> tuple[AccountsDocument, str | None]:
        """What there is, and its version; None when nothing was ever stored."""
        found = self._stored.read()
        return (AccountsDocument(), None) if found is None else (found.value, found.version)

    def change(self, change: Change) -> AccountsDocument:
        """Writes what `change` makes of it."""
        changed: AccountsDocument = self._stored.update(lambda known: change(known or AccountsDocument()))
        return changed


# Changes: each is called with the document, and again when another writer was first.


def check_password(password: str) -> str:
    """InputError for one that is too short, or too long to be hashed."""
    if not SHORTEST_PASSWORD <= len(password) <= LONGEST_PASSWORD or "\0" in password:
        raise InputError(f"a password must have {SHORTEST_PASSWORD} to {LONGEST_PASSWORD} characters, and no NUL")
    return password


def make_user(password: str, now_us: int, mechanisms: Iterable[str] = tuple(MECHANISMS)) -> User:
    """The hashes of a password, under a new id. Takes a tenth of a second."""
    check_password(password)
    return User(
        id=_new_id(),
        created_us=now_us,
        changed_us=now_us,
        password=hash_password(password),
        scram={name: make_keys(MECHANISMS[name], password) for name in mechanisms},
    )


def _new_id() -> str:
    return secrets.token_hex(_ID_BYTES)


def adding_user(name: str, user: User) -> Change:
    """ConflictError when there is one of this name."""
    check_principal_name(name)

    def change(known: AccountsDocument) -> AccountsDocument:
        if name in known.users:
            raise ConflictError(f"there is a user {name} already", hint=f"`tidelog auth user passwd {name}` changes it")
        return msgspec.structs.replace(known, users={**known.users, name: user})

    return change


def setting_password(name: str, user: User) -> Change:
    """Replaces all hashes of a user. Sessions of the old password end."""

    def change(known: AccountsDocument) -> AccountsDocument:
        before = known.users.get(name)
        if before is None:
            raise NotFoundError(f"there is no user {name}", hint="`tidelog auth user list` shows them")
        after = msgspec.structs.replace(user, created_us=before.created_us)
        return msgspec.structs.replace(known, users={**known.users, name: after})

    return change


def setting_scram(name: str, mechanism: str, keys: ScramKeys | None, now_us: int) -> Change:
    """Sets or deletes the keys of one mechanism, as Kafka's tools do. A user without any credential is gone."""

    def change(known: AccountsDocument) -> AccountsDocument:
        before = known.users.get(name)
        if keys is None and (before is None or mechanism not in before.scram):
            raise NotFoundError(f"the user {name} has no credential for {mechanism}")
        scram = {
            other: there for other, there in ({} if before is None else before.scram).items() if other != mechanism
        }
        if keys is not None:
            scram[mechanism] = keys
        created_us = now_us if before is None else before.created_us
        # The password that scrypt has may be another one now, so it counts no more.
        after = User(id=_new_id(), created_us=created_us, changed_us=now_us, scram=scram)
        others = {other: user for other, user in known.users.items() if other != name}
        return msgspec.structs.replace(known, users={**others, name: after} if scram else others)

    return change


def removing_user(name: str) -> Change:
    """Takes the tokens and grants of the name along."""

    def change(known: AccountsDocument) -> AccountsDocument:
        users = {other: user for other, user in known.users.items() if other != name}
        tokens = {key: token for key, token in known.tokens.items() if token.principal != name}
        grants = [grant for grant in known.grants if grant.principal != name]
        if (len(users), len(tokens), len(grants)) == (len(known.users), len(known.tokens), len(known.grants)):
            raise NotFoundError(f"there is no user {name}", hint="`tidelog auth user list` shows them")
        return AccountsDocument(users=users, tokens=tokens, grants=grants)

    return change


def make_token(principal: str, now_us: int, expires_us: int | None = None, note: str = "") -> tuple[NewToken, Token]:
    """A new token: its text for the user, and what is stored of it."""
    check_principal_name(principal)
    new = NewToken(_new_id(), "")
    new = NewToken(new.id, f"{_TOKEN_PREFIX}_{new.id}_{secrets.token_urlsafe(_TOKEN_BYTES)}")
    digest = hashlib.sha256(new.text.encode()).digest()
    return new, Token(principal=principal, sha256=digest, created_us=now_us, expires_us=expires_us, note=note)


def adding_token(token_id: str, token: Token) -> Change:
    """One of `make_token`."""
    return lambda known: msgspec.structs.replace(known, tokens={**known.tokens, token_id: token})


def revoking_token(token_id: str) -> Change:
    """It counts no more; requests that were begun with it end."""

    def change(known: AccountsDocument) -> AccountsDocument:
        if token_id not in known.tokens:
            raise NotFoundError(f"there is no token {token_id}", hint="`tidelog auth token list` shows them")
        others = {key: token for key, token in known.tokens.items() if key != token_id}
        return msgspec.structs.replace(known, tokens=others)

    return change


def granting(*grants: Grant) -> Change:
    """Adds grants; those that are there already are no error."""
    for grant in grants:
        if grant.principal != ANYONE:
            check_principal_name(grant.principal)
    return lambda known: msgspec.structs.replace(known, grants=sorted({*known.grants, *grants}, key=_order))


def revoking(*grants: Grant) -> Change:
    """Takes exactly these away."""

    def change(known: AccountsDocument) -> AccountsDocument:
        missing = set(grants) - set(known.grants)
        if missing:
            one = min(missing, key=_order)
            raise NotFoundError(
                f"there is no grant of {one.permission} on {one.resource} to {one.principal}",
                hint="`tidelog auth list` shows them",
            )
        return msgspec.structs.replace(known, grants=[grant for grant in known.grants if grant not in grants])

    return change


def _order(grant: Grant) -> tuple[str, str, str]:
    return grant.principal, str(grant.resource), grant.permission


# Proofs


def user_of_password(known: AccountsDocument, name: str, password: str) -> Principal | None:
    """Whose password it is; None if it is not. Takes tens of milliseconds for every name, known or not."""
    user = known.users.get(name)
    stored = None if user is None else user.password
    fits = (stored or NOBODY).fits(password[:LONGEST_PASSWORD])
    if user is None or stored is None or not fits or len(password) > LONGEST_PASSWORD:
        return None
    return Principal(name, "plain", user.id)


def user_of_token(known: AccountsDocument, text: str, now_us: int) -> Principal | None:
    """Whose token it is; None if there is none, or it has expired."""
    parts = text.split("_", 2)
    if len(parts) != 3 or parts[0] != _TOKEN_PREFIX:
        return None
    token = known.tokens.get(parts[1])
    digest = hashlib.sha256(text.encode()).digest()
    if token is None or not hmac.compare_digest(digest, token.sha256):
        return None
    if token.expires_us is not None and now_us >= token.expires_us:
        return None
    expires_at = None if token.expires_us is None else token.expires_us / 1e6
    return Principal(token.principal, "token", parts[1], expires_at)


def is_current(known: AccountsDocument, principal: Principal) -> bool:
    """Whether the credential that proved a principal is still the one that counts."""
    if principal.method == "token":
        return principal.credential in known.tokens
    if principal.method == "plain" or principal.method.startswith("scram"):
        user = known.users.get(principal.name)
        return user is not None and user.id == principal.credential
    return True
