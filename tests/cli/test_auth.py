"""`tidelog auth` and the protection that `tidelog serve` asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli

import tidelog
from tidelog.config.serve import ServeSettings
from tidelog.errors import ConfigError
from tidelog.service.auth.accounts import AccountStore, user_of_password, user_of_token
from tidelog.service.node import check_exposure
from tidelog.service.placement import Address

PASSWORD = "PLANTED-password"


def test_user_is_made_granted_checked_and_removed(cli: Cli, tmp_path: Path) -> None:
    """In a directory that does not exist yet, and beside a process that has it open; no output has the password."""
    said = [cli("auth", "user", "add", "alice", stdin=f"{PASSWORD}\n".encode())]
    with tidelog.open(tmp_path / "data") as log:
        said.append(cli("auth", "grant", "alice", "read", "topic:shop/*"))
        said.append(cli("auth", "grant", "*", "read", "group:*", "--json"))
        known, _ = AccountStore(*log._shared_metadata()).read()
        assert user_of_password(known, "alice", PASSWORD) is not None
        assert len(known.grants) == 2
    assert cli("auth", "user", "list", "--json").json[0]["mechanisms"] == "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"
    assert cli("auth", "list", "alice").lines == ["user\tpermission\tresource", "alice\tread\ttopic:shop/*"]
    allowed = cli("auth", "check", "alice", "read", "topic:shop/orders", "--json")
    assert (allowed.code, allowed.json["allowed"], allowed.json["by"]) == (0, True, ["topic:shop/*"])
    refused = cli("auth", "check", "alice", "write", "topic:shop/orders")
    assert (refused.code, refused.lines) == (1, ["refused: no grant allows it"])
    assert cli("auth", "check", "alice", "read", "group:any").code == 0
    assert cli("auth", "check", "alice", "read", "server").code == 1
    said.append(cli("auth", "user", "passwd", "alice", stdin=b"another password\n"))
    said.append(cli("auth", "revoke", "alice", "read", "topic:shop/*"))
    said.append(cli("auth", "user", "remove", "alice", "--yes"))
    assert [one.code for one in said] == [0] * len(said)
    assert not [one for one in said if "PLANTED" in f"{one.out!r}{one.err}"]
    assert cli("auth", "user", "list", "--json").json == []
    with tidelog.open(tmp_path / "data", read_only=True) as log:
        assert [one.principal for one in AccountStore(*log._shared_metadata()).read()[0].grants] == ["*"]


def test_grant_to_a_name_without_credentials_is_noted(cli: Cli) -> None:
    """Loss prevented: a mistyped name was granted in silence. The subject of a JWT or certificate has none here."""
    cli("auth", "user", "add", "alice", stdin=f"{PASSWORD}\n".encode())
    cli("auth", "token", "create", "ci")
    for known in ("alice", "ci", "*"):
        assert "note" not in cli("auth", "grant", known, "read", "topic:shop/*").err
    mistyped = cli("auth", "grant", "alcie", "read", "topic:shop/*")
    assert mistyped.code == 0
    assert "alcie has no password and no token yet. Did you mean alice?" in " ".join(mistyped.err.split())
    assert "auth user add alcie" in " ".join(mistyped.err.split())


def test_token_is_printed_once(cli: Cli, tmp_path: Path) -> None:
    """The text is the only line of the output; listings have its id, and revoking takes that."""
    made = cli("auth", "token", "create", "ci", "--expires", "90d", "--note", "nightly")
    (text,) = made.lines
    with tidelog.open(tmp_path / "data") as log:
        known, _ = AccountStore(*log._shared_metadata()).read()
    found = user_of_token(known, text, 0)
    assert found is not None
    assert found.name == "ci"
    listed = cli("auth", "token", "list", "--json")
    assert text not in listed.out.decode()
    (row,) = listed.json
    assert (row["id"], row["user"], row["note"]) == (found.credential, "ci", "nightly")
    assert cli("auth", "token", "revoke", row["id"]).code == 0
    assert cli("auth", "token", "revoke", row["id"]).code == 3
    assert cli("auth", "token", "list", "--json").json == []


@pytest.mark.parametrize("metadata", ["bucket", "sqlite"])
def test_accounts_are_in_the_metadata_store(cli: Cli, tmp_path: Path, metadata: str) -> None:
    """With history in a store they are where its catalog is, for every machine that reaches it."""
    where = ["--store", f"file://{tmp_path}/store", "--metadata", metadata]
    assert cli("auth", "grant", "bob", "admin", "*", *where).code == 0
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/store", metadata=metadata) as log:
        assert len(AccountStore(*log._shared_metadata()).read()[0].grants) == 1
        assert cli("auth", "grant", "bob", "read", "topic:*", *where).code == 0
        assert len(AccountStore(*log._shared_metadata()).read()[0].grants) == 2


def test_serve_without_its_extra_names_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is no bug of tidelog: the message has the line that installs it."""
    monkeypatch.setattr("tidelog.cli.serve._PACKAGES", ("no_such_package",))
    result = cli("serve")
    assert result.code == 2
    assert "needs no_such_package" in result.err
    assert "pip install 'tidelog[serve]'" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("grant", "alice", "own", "topic:shop/orders"),
        ("grant", "alice", "read", "shop/orders"),
        ("grant", "User:alice", "read", "topic:shop/orders"),
        ("check", "alice", "read", "topic:shop/*"),
        ("token", "create", "ci", "--expires", "soon"),
        ("user", "add", "*"),
        ("user", "add", "alice"),  # the password is empty
    ],
)
def test_wrong_arguments_are_named(cli: Cli, arguments: tuple[str, ...]) -> None:
    """Exit code 2, one error, and nothing is stored."""
    result = cli("auth", *arguments)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert cli("auth", "list", "--json").json == []


EVERYWHERE = Address("0.0.0.0", 9092)


def test_server_does_not_listen_elsewhere_unprotected() -> None:
    """Other addresses than this machine's need TLS and authentication, each unless it is given up by name."""
    for address in (Address("127.0.0.1", 1), Address("::1", 1), Address("localhost", 1)):
        check_exposure(address, "--kafka", ServeSettings())
    with pytest.raises(ConfigError, match="no authentication"):
        check_exposure(EVERYWHERE, "--kafka", ServeSettings(tls_cert="x"))
    with pytest.raises(ConfigError, match="no TLS"):
        check_exposure(Address("log.example.org", 1), "--kafka", ServeSettings(auth="required"))
    with pytest.raises(ConfigError, match="no TLS"):
        check_exposure(EVERYWHERE, "--kafka", ServeSettings(allow_anonymous=True))
    check_exposure(EVERYWHERE, "--kafka", ServeSettings(auth="required", tls_cert="x"))
    check_exposure(EVERYWHERE, "--kafka", ServeSettings(allow_anonymous=True, allow_plaintext=True))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--kafka", "0.0.0.0:0"], "there is no authentication"),
        (["--http", "[::]:0", "--auth", "required"], "there is no TLS"),
        (["--tls-key", "x"], "tls_key is set without tls_cert"),
        (["--tls-cert", "missing.pem"], "missing.pem"),
        (["--oauth-keys", "x"], "oauth_keys needs oauth_issuer and oauth_audience"),
        (["--oauth-issuer", "x"], "without oauth_keys"),
        (["--auth", "maybe"], "maybe"),
    ],
)
def test_serve_refuses_settings_that_do_not_fit(cli: Cli, options: list[str], problem: str) -> None:
    """Before it opens the directory, with exit code 2 and the option that is missing."""
    result = cli("serve", *options)
    assert result.code == 2
    assert problem in result.err


def test_settings_of_the_server_come_from_file_and_environment(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`[serve]` of the file and TIDELOG_* variables, for `serve`; other commands pass over them, and check them."""
    (tmp_path / "tidelog.toml").write_text('[serve]\nauth = "required"\n')
    monkeypatch.setenv("TIDELOG_ALLOW_ANONYMOUS", "true")
    refused = cli("serve", "--config", "tidelog.toml", "--kafka", "0.0.0.0:0")
    assert "there is no TLS" in refused.err
    assert cli("topic", "list", "--config", "tidelog.toml").code in (0, 3)
    settings = {row["setting"]: row for row in cli("config", "--config", "tidelog.toml", "--json").json}
    assert settings["auth"]["value"] == "required"
    assert settings["allow_anonymous"]["source"] == "TIDELOG_ALLOW_ANONYMOUS"
    (tmp_path / "tidelog.toml").write_text("[serve]\nauth = 7\n")
    assert "[serve] auth must be one of off, required" in cli("topic", "list", "--config", "tidelog.toml").err
