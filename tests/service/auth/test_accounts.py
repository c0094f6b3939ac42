"""Users, tokens and grants: what is stored of them, how they change, and which proofs count."""

from __future__ import annotations

import msgspec
import pytest
from tests.service.kafka.secured import PASSWORD, grant

from tidelog.errors import ConflictError, InputError, NotFoundError
from tidelog.service.auth.access import Principal
from tidelog.service.auth.accounts import (
    AccountsDocument,
    AccountStore,
    adding_token,
    adding_user,
    granting,
    is_current,
    make_token,
    make_user,
    removing_user,
    revoking,
    revoking_token,
    setting_password,
    setting_scram,
    user_of_password,
    user_of_token,
)
from tidelog.service.auth.scram import make_keys
from tidelog.store.keys import accounts_key
from tidelog.store.metadata.memory import MemoryMetadataStore

USER = make_user(PASSWORD, 5)


@pytest.fixture
def store() -> AccountStore:
    return AccountStore(MemoryMetadataStore())


def test_nothing_that_is_stored_lets_anybody_in() -> None:
    """Neither a password nor a token is in the document, nor in what objects print of themselves."""
    metadata = MemoryMetadataStore()
    store = AccountStore(metadata)
    new, token = make_token("ci", 1)
    store.change(adding_user("alice", USER))
    known = store.change(adding_token(new.id, token))
    entry = metadata.get(accounts_key())
    assert entry is not None
    secret = new.text.split("_", 2)[2]
    for shown in (entry.value.decode(), repr(known), repr(new), repr(token), repr(USER)):
        assert PASSWORD not in shown
        assert secret not in shown
    assert user_of_token(known, new.text, 2) == Principal("ci", "token", new.id)
    assert user_of_token(known, token.sha256.hex(), 2) is None


def test_password_of_a_user_counts_and_no_other() -> None:
    """Wrong and unknown ones, and those of users that have none, are refused alike."""
    known = AccountsDocument(users={"alice": USER, "keys-only": msgspec.structs.replace(USER, password=None)})
    assert user_of_password(known, "alice", PASSWORD) == Principal("alice", "plain", USER.id)
    for name, password in (("alice", PASSWORD + "x"), ("alice", ""), ("nobody", PASSWORD), ("keys-only", PASSWORD)):
        assert user_of_password(known, name, password) is None
    assert user_of_password(known, "alice", PASSWORD + "x" * 2000) is None


def test_users_are_added_changed_and_removed(store: AccountStore) -> None:
    """Adding one twice is a conflict; a new password ends what the old one began; removing takes everything along."""
    store.change(adding_user("alice", USER))
    with pytest.raises(ConflictError):
        store.change(adding_user("alice", USER))
    session = Principal("alice", "scram-sha-256", USER.id)
    assert is_current(store.read()[0], session)
    known = store.change(setting_password("alice", make_user("another password", 9)))
    assert not is_current(known, session)
    assert (known.users["alice"].created_us, known.users["alice"].changed_us) == (5, 9)
    store.change(granting(grant("alice read topic:shop/*"), grant("bob read topic:shop/*")))
    new, token = make_token("alice", 1)
    store.change(adding_token(new.id, token))
    known = store.change(removing_user("alice"))
    assert known == AccountsDocument(grants=[grant("bob read topic:shop/*")])
    for change in (removing_user("alice"), setting_password("alice", USER), revoking_token(new.id)):
        with pytest.raises(NotFoundError):
            store.change(change)


def test_tokens_end_and_are_revoked(store: AccountStore) -> None:
    """A token counts until its time, or until it is revoked; a part of it never does."""
    new, token = make_token("ci", 10, expires_us=20)
    known = store.change(adding_token(new.id, token))
    assert user_of_token(known, new.text, 19) == Principal("ci", "token", new.id, 20 / 1e6)
    assert user_of_token(known, new.text, 20) is None
    for text in (new.text[:-1], new.text + "x", new.id, f"tl_{new.id}_", f"tl__{new.text}", "", "tl", "tl_é_ü"):
        assert user_of_token(known, text, 11) is None
    known = store.change(revoking_token(new.id))
    assert user_of_token(known, new.text, 11) is None
    assert not is_current(known, Principal("ci", "token", new.id))


def test_grants_add_up_and_are_taken_back_one_by_one(store: AccountStore) -> None:
    """The same grant twice is one; taking back what is not there is an error that changes nothing."""
    read, write = grant("alice read topic:shop/*"), grant("alice write topic:shop/*")
    store.change(granting(read, read))
    assert store.change(granting(write, read)).grants == [read, write]
    with pytest.raises(NotFoundError):
        store.change(revoking(read, grant("alice read topic:shop/orders")))
    assert store.change(revoking(read)).grants == [write]
    with pytest.raises(InputError):
        granting(msgspec.structs.replace(read, principal="User:alice"))


def test_keys_of_a_mechanism_replace_the_password(store: AccountStore) -> None:
    """Kafka's tools set the keys of one mechanism: the scrypt hash of what may be another password counts no more."""
    store.change(adding_user("alice", USER))
    keys = make_keys("sha256", "another password")
    known = store.change(setting_scram("alice", "SCRAM-SHA-256", keys, 7))
    assert known.users["alice"].password is None
    assert known.users["alice"].scram["SCRAM-SHA-256"] == keys
    assert set(known.users["alice"].scram) == {"SCRAM-SHA-256", "SCRAM-SHA-512"}
    store.change(setting_scram("alice", "SCRAM-SHA-256", None, 8))
    known = store.change(setting_scram("alice", "SCRAM-SHA-512", None, 9))
    assert known.users == {}
    with pytest.raises(NotFoundError):
        store.change(setting_scram("alice", "SCRAM-SHA-512", None, 9))


@pytest.mark.parametrize("password", ["", "short", "x" * 1025, "with a \0 in it"])
def test_password_that_cannot_be_one_is_refused(password: str) -> None:
    """Too short to be safe, too long to be hashed, or cut by PLAIN."""
    with pytest.raises(InputError) as caught:
        make_user(password, 0)
    assert not password or password not in str(caught.value)
