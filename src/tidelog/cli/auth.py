"""`tidelog auth`: users, tokens and grants of the server, and what somebody may do.

Invariants
- It works on the metadata store itself, so beside a server that runs as well as without one: a change counts there
  within `auth_reload_seconds`, or at once with SIGHUP.
- Passwords are read from the terminal, from stdin or from a file, never from the command line, where other processes
  see them. A token is shown once, when it is made; nothing that is listed is secret.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.output import Row
from tidelog.cli.session import Session, command, command_group, confirm
from tidelog.clock import SystemClock
from tidelog.errors import InputError
from tidelog.fields import nearest
from tidelog.files import explained
from tidelog.units import unit_of

if TYPE_CHECKING:
    from tidelog.service.auth.access import Grant
    from tidelog.service.auth.accounts import AccountStore

UserArgument = Annotated[str, typer.Argument(metavar="USER", help="The name of the user.")]
PrincipalArgument = Annotated[
    str, typer.Argument(metavar="USER", help="A user, the subject of a token or certificate, or * for all of them.")
]
PermissionArgument = Annotated[str, typer.Argument(metavar="PERMISSION", help="read, write or admin (which is all).")]
ResourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="RESOURCE",
        help="topic:shop/orders, topic:shop/*, group:NAME, engine:NAME, transaction:ID, server, or * for everything.",
    ),
]
PasswordFileOption = Annotated[
    Path | None,
    typer.Option("--password-file", metavar="FILE", help="Read the password from this file; - is stdin."),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("Users, tokens and grants of a server.")
    users = command_group("Users with a password, for PLAIN and SCRAM.")
    tokens = command_group("Bearer tokens for HTTP: create, revoke, list.")
    commands: list[tuple[typer.Typer, str, Callable[..., None]]] = [
        *((users, "add", add_user), (users, "passwd", set_password)),
        *((users, "remove", remove_user), (users, "list", list_users)),
        *((tokens, "create", create_token), (tokens, "revoke", revoke_token), (tokens, "list", list_tokens)),
        *((group, "grant", grant), (group, "revoke", revoke), (group, "check", check), (group, "list", list_grants)),
    ]
    for owner, name, work in commands:
        command(owner, name)(work)
    group.add_typer(users, name="user")
    group.add_typer(tokens, name="token")
    app.add_typer(group, name="auth")


@contextmanager
def _accounts(session: Session) -> Iterator[AccountStore]:
    """The accounts of the directory, which another process may serve meanwhile; a new directory is made."""
    from tidelog.service.auth.accounts import AccountStore
    from tidelog.topics.directory_info import remembered_place
    from tidelog.wiring import open_shared_metadata

    if not remembered_place(session.root) and session.settings.metadata in (None, "sqlite"):
        session.open(runs_in_background=False).close()
    with open_shared_metadata(session.root, session.settings) as (metadata, root):
        yield AccountStore(metadata, root)


def _password(path: Path | None) -> str:
    if path is None and sys.stdin.isatty():
        return str(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    if path is None or str(path) == "-":
        text = sys.stdin.readline()
    else:
        with explained("read the password", path):
            text = path.read_text("utf-8")
    return text.rstrip("\r\n")


def _now_us() -> int:
    return SystemClock().now_us()


def _time(us: int | None) -> str | None:
    return None if us is None else datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="seconds")


# Users


def add_user(session: Session, user: UserArgument, password_file: PasswordFileOption = None) -> None:
    """Adds a user. The password is asked for, or read from stdin or --password-file.

    A new user may do nothing: give it grants with `tidelog auth grant`.
    """
    from tidelog.service.auth.access import check_principal_name
    from tidelog.service.auth.accounts import adding_user, make_user

    check_principal_name(user)
    made = make_user(_password(password_file), _now_us())
    with _accounts(session) as accounts:
        accounts.change(adding_user(user, made))
    _done(session, f"added user {user}", user=user)


def set_password(session: Session, user: UserArgument, password_file: PasswordFileOption = None) -> None:
    """Changes the password of a user. Connections with the old one end."""
    from tidelog.service.auth.accounts import make_user, setting_password

    made = make_user(_password(password_file), _now_us())
    with _accounts(session) as accounts:
        accounts.change(setting_password(user, made))
    _done(session, f"changed the password of {user}", user=user)


def remove_user(session: Session, user: UserArgument, yes: YesOption = False) -> None:
    """Removes a user with all its tokens and grants. Its connections end."""
    from tidelog.service.auth.accounts import removing_user

    confirm(session, yes, f"Remove {user} with its tokens and grants?", f"remove {user}")
    with _accounts(session) as accounts:
        accounts.change(removing_user(user))
    _done(session, f"removed {user}", user=user)


def list_users(session: Session) -> None:
    """Lists the users and their mechanisms."""
    with _accounts(session) as accounts:
        known, _ = accounts.read()
    rows: list[Row] = [
        {
            "user": name,
            "mechanisms": ", ".join([*(["PLAIN"] if user.password is not None else []), *sorted(user.scram)]),
            "created": _time(user.created_us),
            "changed": _time(user.changed_us),
        }
        for name, user in sorted(known.users.items())
    ]
    session.output.rows(("user", "mechanisms", "created", "changed"), rows)


# Tokens


def create_token(
    session: Session,
    user: UserArgument,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="Ends after this, such as 90d.")
    ] = None,
    note: Annotated[str, typer.Option("--note", help="What it is for.")] = "",
) -> None:
    """Creates a bearer token and prints it. It is not stored, and cannot be shown again.

    The user needs no password: a token alone is enough for a program.
    """
    from tidelog.service.auth.accounts import adding_token, make_token

    now_us = _now_us()
    expires_us = None if expires is None else now_us + int(_seconds(expires) * 1_000_000)
    new, token = make_token(user, now_us, expires_us, note)
    with _accounts(session) as accounts:
        accounts.change(adding_token(new.id, token))
    if session.as_json:
        session.output.document({"id": new.id, "user": user, "token": new.text, "expires": _time(expires_us)})
    else:
        session.output.note(f"token {new.id} of {user}; it is shown this once")
        print(new.text)


def _seconds(text: str) -> float:
    unit = unit_of("expires_seconds")
    seconds = None if unit is None else unit.parse(text)
    if seconds is None or seconds <= 0:
        raise InputError(f"--expires must be a duration such as 12h or 90d, not {text!r}")
    return float(seconds)


def revoke_token(
    session: Session, token_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")]
) -> None:
    """Revokes a token by its id."""
    from tidelog.service.auth.accounts import revoking_token

    with _accounts(session) as accounts:
        accounts.change(revoking_token(token_id))
    _done(session, f"revoked the token {token_id}", id=token_id)


def list_tokens(session: Session) -> None:
    """Lists the tokens: whose they are and until when. Not the tokens themselves."""
    with _accounts(session) as accounts:
        known, _ = accounts.read()
    rows: list[Row] = [
        {
            "id": key,
            "user": token.principal,
            "created": _time(token.created_us),
            "expires": _time(token.expires_us),
            "note": token.note,
        }
        for key, token in sorted(known.tokens.items(), key=lambda one: (one[1].principal, one[1].created_us))
    ]
    session.output.rows(("id", "user", "created", "expires", "note"), rows)


# Grants


def _grant(user: str, permission: str, resource: str) -> Grant:
    from tidelog.service.auth.access import Grant, Permission, parse_pattern

    if permission not in list(Permission):
        raise InputError(f"{permission!r} is no permission", hint=f"There are {', '.join(Permission)}")
    return Grant(user, Permission(permission), parse_pattern(resource))


def grant(
    session: Session, user: PrincipalArgument, permission: PermissionArgument, resource: ResourceArgument
) -> None:
    """Gives a user a permission.

    It is for topics, groups, engines, transactions, the server, or everything. A name without a password or token here
    may be the subject of a JWT or a certificate: it is granted, with a note.
    """
    from tidelog.service.auth.access import ANYONE
    from tidelog.service.auth.accounts import granting

    made = _grant(user, permission, resource)
    with _accounts(session) as accounts:
        known = accounts.change(granting(made))
    _done(session, f"{user} may {permission} {made.resource}", **_row(made))
    names = {*known.users, *(token.principal for token in known.tokens.values())}
    if user != ANYONE and user not in names:
        question = nearest(user, names)
        session.output.note(
            f"note: {user} has no password and no token yet. {f'{question} ' if question else ''}Unless it is the "
            f"subject of a JWT or a certificate, add it: `tidelog auth user add {shlex.quote(user)}` or "
            f"`tidelog auth token create {shlex.quote(user)}`"
        )


def revoke(
    session: Session, user: PrincipalArgument, permission: PermissionArgument, resource: ResourceArgument
) -> None:
    """Takes a grant back, as `list` shows it. Other grants that cover the same stay."""
    from tidelog.service.auth.accounts import revoking

    made = _grant(user, permission, resource)
    with _accounts(session) as accounts:
        accounts.change(revoking(made))
    _done(session, f"{user} has no grant to {permission} {made.resource} any more", **_row(made))


def check(
    session: Session, user: PrincipalArgument, permission: PermissionArgument, resource: ResourceArgument
) -> None:
    """Tells whether a user may do something. The exit code is 0 if so, 1 if not."""
    from tidelog.service.auth.access import Grants, Kind, Principal, Resource

    asked = _grant(user, permission, resource)
    if asked.resource.kind is None or asked.resource.name.endswith("*") is not (asked.resource.kind is Kind.SERVER):
        raise InputError("check asks about one resource, not about a pattern", hint="Such as topic:shop/orders")
    name = "" if asked.resource.kind is Kind.SERVER else asked.resource.name
    with _accounts(session) as accounts:
        known, _ = accounts.read()
    grants, principal = Grants(known.grants), Principal(user, "check")
    target = Resource(asked.resource.kind, name)
    is_allowed = grants.allows(principal, asked.permission, target)
    by = [str(one.resource) for one in grants.of(principal) if one.allows(asked.permission, target)]
    if session.as_json:
        session.output.document({**_row(asked), "allowed": is_allowed, "by": by})
    else:
        print(f"allowed, by the grant for {by[0]}" if is_allowed else "refused: no grant allows it")
    if not is_allowed:
        raise typer.Exit(ExitCode.FOUND_WRONG)


def list_grants(
    session: Session,
    user: Annotated[str | None, typer.Argument(metavar="[USER]", help="Only those of this user.")] = None,
) -> None:
    """Lists the grants."""
    with _accounts(session) as accounts:
        known, _ = accounts.read()
    rows = [_row(one) for one in known.grants if user is None or one.principal == user]
    session.output.rows(("user", "permission", "resource"), rows)


def _row(one: Grant) -> dict[str, object]:
    return {"user": one.principal, "permission": str(one.permission), "resource": str(one.resource)}


def _done(session: Session, text: str, **fields: object) -> None:
    if session.as_json:
        session.output.document(fields)
    else:
        session.output.note(text)
