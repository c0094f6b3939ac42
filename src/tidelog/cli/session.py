"""What every command has: the common options, the log directory they select, and one way to fail.

Invariants
- A common option may stand before or after the name of a command; the later one wins.
- A command raises its errors; only this module turns them into text on stderr and an exit code.
- A command that a hint names in backticks can be pasted: it gets the path of this program and the directory in use.
- When the reader of stdout exits (`| head`), the command ends quietly and with success.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from tidelog.cli.errors import ExitCode, exit_code_of, hint_of, program, text_of
from tidelog.cli.output import Output, say
from tidelog.errors import InputError
from tidelog.events import LOGGER, log_mode, turn_on_output
from tidelog.secret import Secret

if TYPE_CHECKING:
    from tidelog.client.client import Client
    from tidelog.config import Settings
    from tidelog.topics.directory import LogDirectory


# The log records of the library while a command runs, formatted as the command line's own messages.
#
# A failing write is reported twice: by the writer, at once, and by the error that ends the command. The first is held
# back until the command has ended, and dropped if the error says the same.


_WRITER = "writer"


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Shows on stderr what the log reports meanwhile, as events and messages where TIDELOG_LOG asks for that."""
    handler, logger = _Handler(), logging.getLogger(LOGGER)
    has_own_lines = log_mode() not in (None, "warning")
    if has_own_lines:
        turn_on_output()
    propagate, logger.propagate = logger.propagate, False
    if not has_own_lines:
        logger.addHandler(handler)
    try:
        yield
    except BaseException as error:
        if _is_told_by(error):
            handler.held.clear()
        raise
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        handler.let_go()


def _is_told_by(error: BaseException) -> bool:
    """Whether the writer ended this way, so that its own report is a repetition."""
    from tidelog.errors import DiskFullError, LogFailedError

    return isinstance(error, DiskFullError | LogFailedError)


class _Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.held: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = f"warning: {record.getMessage()}"
        if record.exc_info:  # a fault of ours: whoever reports it needs to know where
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        if record.module == _WRITER and record.levelno >= logging.ERROR:
            self.held.append(text)
            return
        self.let_go()
        say(text, sys.stderr)

    def let_go(self) -> None:
        """What was held back is not repeated by anything: it is shown after all."""
        held, self.held = self.held, []
        for text in held:
            say(text, sys.stderr)


DEFAULT_DIRECTORY = "data"
# As many as a subscription delivers without an acknowledgement.
_PREFETCH = 10_000

_DIRECTORY_HELP = "The log directory [default: TIDELOG_DIR, the settings, ./data]."
DirectoryOption = Annotated[
    Path | None,
    # Whether it can be read is for the log to say: its errors come with a hint.
    typer.Option("--dir", "-d", metavar="DIR", readable=False, help=_DIRECTORY_HELP),
]
# Before the command it is text: for some commands it may be the URL of a store.
PlaceOption = Annotated[str | None, typer.Option("--dir", "-d", metavar="DIR", help=_DIRECTORY_HELP)]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", readable=False, help="Settings in TOML [default: TIDELOG_CONFIG]."),
]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="Where history is: s3://bucket/prefix, gs://, az://, file:///path."),
]
MetadataOption = Annotated[
    str | None,
    typer.Option("--metadata", metavar="URL", help="Where the catalog is: bucket, etcd://host:port, sqlite:///path."),
]
HeldOption = Annotated[bool, typer.Option("--take-over", help="Even if another node has it open; that node is fenced.")]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Do it through the `tidelog serve` at this URL [default: that of the directory, if it is served].",
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", help="The bearer token for --server [default: TIDELOG_TOKEN]."),
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        readable=False,
        help="The private authority of --server's certificate, in PEM [default: TIDELOG_TLS_CA, else the system's].",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON: results to stdout, an error to stderr.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class Session:
    """The common options of one run."""

    directory: Path | None = None
    config: Path | None = None
    as_json: bool = False
    debug: bool = False
    store: str | None = None
    metadata: str | None = None
    topic: str | None = None
    """The one that the command is about, if it is about one."""
    server: str | None = None
    """The URL of a server that does it."""
    token: Secret | None = None
    tls_ca: Path | None = None
    engine: str | None = None
    """The name of the engine at the server."""
    place_url: str | None = None
    """The URL of a store that was given where a directory is expected."""

    def overridden_by(self, other: Session) -> Session:
        return Session(
            other.directory or self.directory,
            other.config or self.config,
            self.as_json or other.as_json,
            self.debug or other.debug,
            other.store or self.store,
            other.metadata or self.metadata,
            other.topic or self.topic,
            other.server or self.server,
            other.token or self.token,
            other.tls_ca or self.tls_ca,
            other.engine or self.engine,
            other.place_url or self.place_url,
        )

    def refuse_secrets(self) -> None:
        """ConfigError for a store's URL that has a key in it, before anything can repeat it."""
        for url in (self.store, self.place_url):
            if url is not None and ("@" in url or "?" in url):
                from tidelog.store.urls import canonical_url

                canonical_url(url)

    def refuse_url(self, needed: str) -> None:
        """InputError for the URL of a store where a directory is needed."""
        if self.place_url is not None:
            raise InputError(
                f"{self.place_url} is a store, and this needs {needed}",
                hint="Name the directory with --dir, and the store with --store",
            )

    def at_place(self, place: str) -> Session:
        """The same about another directory; or about a store, where that is what was named."""
        if "://" in place:
            return replace(self, place_url=place, directory=None)
        return replace(self, directory=Path(place), place_url=None)

    def at_root(self, root: str) -> Session:
        """The same with the --root of a job, so that a command in a hint is about that place."""
        if "://" in root:
            return replace(self, store=root, metadata=self.metadata or "bucket")
        return replace(self, directory=Path(root))

    @property
    def output(self) -> Output:
        return Output(self.as_json)

    @functools.cached_property
    def settings(self) -> Settings:
        """From the file, the variables and the options."""
        from tidelog.config import load_settings

        named = {"dir": self.directory, "store": self.store, "metadata": self.metadata}
        return load_settings(self.config, os.environ, named)

    @property
    def root(self) -> Path:
        """The log directory, there or not."""
        return Path(self.settings.dir or DEFAULT_DIRECTORY)

    def open(self, *, runs_in_background: bool = True) -> LogDirectory:
        """Takes the log directory, made when absent. Upkeep by hand is done without that in the background."""
        from tidelog.wiring import open_directory

        return open_directory(self.root, self.settings, runs_in_background=runs_in_background, renews_lease=True)

    def connect(self, directory: Path | None = None) -> Client | None:
        """The server that was named, or the one that serves the directory; None where there is neither.

        It is the log directory, unless another one is given.
        """
        if self.server is not None:
            from tidelog.client.client import connect

            token = None if self.token is None else self.token.reveal()
            return connect(self.server, token=token, tls_ca=self.tls_ca, prefetch=_PREFETCH)
        from tidelog.client.local_socket import is_served

        root = directory or self.root
        if not is_served(root):
            return None
        from tidelog.client.client import connect_local

        return connect_local(root, prefetch=_PREFETCH)

    def look(self) -> LogDirectory:
        """Opens the log directory for reading, regardless of its owner; a store with its catalog is enough."""
        from tidelog.errors import NotFoundError
        from tidelog.files import explained
        from tidelog.wiring import open_directory

        hint = "Name another one with --dir; producing to a topic makes it"
        with explained("open", self.root):
            if not self.root.is_dir():
                self._require_catalog_elsewhere(hint)
            try:
                return open_directory(self.root, self.settings, read_only=True)
            except NotFoundError as error:
                raise NotFoundError(error.message, path=error.path, hint=hint) from error

    def _require_catalog_elsewhere(self, hint: str) -> None:
        from tidelog.errors import NotFoundError
        from tidelog.store.urls import canonical_url

        if self.settings.store is None:
            raise NotFoundError(f"there is no log directory {self.root}", hint=hint)
        store = canonical_url(self.settings.store)
        if self.settings.metadata in (None, "sqlite"):
            raise NotFoundError(
                f"there is no log directory {self.root}, and with it no catalog of {store}",
                hint="Say where the catalog is, with --metadata bucket or --metadata etcd://host:port, or name --dir",
            )

    def pasteable(self, text: str, topic: str | None = None) -> str:
        """The text with every command in it as it has to be typed here."""
        return _COMMAND.sub(lambda found: f"`{program()} {self._arguments(found[1], topic)}`", text)

    def repair_hint(self, target: str) -> str:
        """What to do about damage that was found."""
        return self.pasteable(f"`tidelog repair {shlex.quote(target)}` says what can be done")

    def _arguments(self, words: str, topic: str | None) -> str:
        """What follows the program: the command's own words, the topic where it was left out, and where the log is."""
        if words.endswith("--help") or (self.server is not None and words.startswith("auth ")):
            return words  # users and grants are changed where the server is, wherever that has its directory
        about = [shlex.quote(topic)] if topic is not None and words in _ABOUT_A_TOPIC else []
        options = [
            ("--dir", self.directory),
            ("--config", self.config),
            ("--store", self.store),
            ("--metadata", self.metadata),
            ("--server", self.server),
            ("--tls-ca", self.tls_ca),
        ]
        given = [f"{name} {shlex.quote(str(value))}" for name, value in options if value is not None]
        return " ".join([words, *about, *(option for option in given if option.split(" ")[0] not in words)])

    def topic_of(self, error: BaseException) -> str | None:
        """The topic that an error is about, by the path that it names, else the one that the command is about."""
        from tidelog.errors import TidelogError

        path = error.path if isinstance(error, TidelogError) else None
        if path is None or not path.is_relative_to(self.root):
            return self.topic
        parts = path.relative_to(self.root).parts
        return "/".join(parts[:2]) if len(parts) >= 2 else self.topic


_COMMAND = re.compile("`tidelog ([^`]+)`")
# Named in hints without the topic, which the command line knows.
_ABOUT_A_TOPIC = ("verify", "repair", "topic rescue", "topic rebuild-catalog", "topic remove-orphans")

Command = TypeVar("Command", bound=Callable[..., None])


class _PlainUsage(TyperCommand):
    """Shows an argument that is needed as TOPIC, not as {TOPIC}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub(r"\{(\w+)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]


def command_group(help_text: str) -> typer.Typer:
    """A command of commands; alone it shows its help."""
    group = typer.Typer(help=help_text, rich_markup_mode=None)

    @group.callback(invoke_without_command=True)
    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    return group


def command(
    group: typer.Typer,
    name: str,
    directory_option: object = DirectoryOption,
    *,
    takes_negative_numbers: bool = False,
    is_hidden: bool = False,
    remote: str | None = None,
    is_local_beside: bool = False,
    takes_server: bool = False,
    takes_urls: bool = False,
) -> Callable[[Command], Command]:
    """Registers a function whose first parameter is the session and whose others are its own options.

    With `takes_negative_numbers` an argument may be -3; what looks like an option and is none is an argument then.
    A hidden one works, and no help shows it. `remote` is the function of `cli/remote.py` that does the same through a
    server, with --server or where the directory is served; `is_local_beside`: only with --server, because it works
    beside the owner by itself. `takes_server`: it has --server, and uses that itself. `takes_urls`: it takes the URL
    of a store where a directory is expected, or refuses it by itself.
    """

    def register(work: Command) -> Command:
        def run(
            context: typer.Context,
            directory: DirectoryOption = None,
            config: ConfigOption = None,
            store: StoreOption = None,
            metadata: MetadataOption = None,
            server: ServerOption = None,
            token: TokenOption = None,
            tls_ca: TlsCaOption = None,
            as_json: JsonOption = False,
            debug: DebugOption = False,
            **own: Any,
        ) -> None:
            before = context.obj if isinstance(context.obj, Session) else Session()
            topic = own["topic"] if isinstance(own.get("topic"), str) else None
            secret = None if token is None else Secret(token)
            given = Session(None, config, as_json, debug, store, metadata, topic, server, secret, tls_ca)
            session = before.overridden_by(given)
            for place in (directory, own.pop("place", None)):  # the latter is an argument, and counts more
                session = session if place is None else session.at_place(str(place))
            if isinstance(own.get("root"), str):
                session = session.at_root(own["root"])
            chosen = _where_it_is_done(work, remote, is_local_beside)
            code = run_reporting(lambda: _run_shown(chosen, session, own, takes_urls=takes_urls), session)
            if code:
                raise typer.Exit(code)

        run.__doc__ = inspect.getdoc(work)
        _take_signature(run, work, directory_option, has_remote=takes_server or remote is not None)
        settings = {"ignore_unknown_options": True} if takes_negative_numbers else None
        group.command(name, cls=_PlainUsage, context_settings=settings, hidden=is_hidden)(run)
        return work

    return register


def _run_shown(work: Callable[..., None], session: Session, own: dict[str, Any], *, takes_urls: bool) -> None:
    session.refuse_secrets()
    if not takes_urls:
        session.refuse_url("a log directory")
    with shown_warnings():
        work(session, **own)


def _where_it_is_done(work: Callable[..., None], remote: str | None, is_local_beside: bool) -> Callable[..., None]:
    """The command, done by a server where there is one to do it."""

    def choose(session: Session, **own: Any) -> None:
        is_for_server = remote is not None and (session.server is not None or not is_local_beside)
        client = session.connect() if is_for_server else None
        if client is None or remote is None:
            work(session, **own)
            return
        from tidelog.cli import remote as through_server

        with client:
            getattr(through_server, remote)(session, client, **own)

    return choose


def _take_signature(
    run: Callable[..., None], work: Callable[..., None], directory_option: object, *, has_remote: bool
) -> None:
    """The parameters that the command line sees: the command's own, then the common ones."""
    own_types = get_type_hints(work, include_extras=True)
    own = list(inspect.signature(work).parameters.values())[1:]
    shared = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    shared = [p for p in shared if has_remote or p.name not in ("server", "token", "tls_ca")]
    shared = [p.replace(annotation=directory_option) if p.name == "directory" else p for p in shared]
    typed = [p.replace(annotation=own_types[p.name], kind=p.KEYWORD_ONLY) for p in own]
    parameters = [*typed, *(p.replace(kind=p.KEYWORD_ONLY) for p in shared)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}


def run_reporting(work: Callable[[], None], session: Session) -> int:
    """Runs a command; what it raises becomes a text on stderr and the exit code."""
    try:
        try:
            work()
        finally:
            _flush_stdout()
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
    except Exception as error:  # the last line of defence: every error ends in a text and a code
        if session.debug and not session.as_json:
            traceback.print_exc()
        if getattr(error, "format_message", None) is not None:
            raise  # a usage error: it knows its command, and `app.run` reports it
        hint = hint_of(error)
        code = exit_code_of(error)
        told = Failure(
            type(error).__name__,
            text_of(error),
            None if hint is None else session.pasteable(hint, session.topic_of(error)),
            code,
            traceback.format_exc() if session.debug else None,
        )
        report(told, as_json=session.as_json)
        return code
    return ExitCode.OK


class Failure(NamedTuple):
    """An error as it is reported: the class, what went wrong, what to do about it, and the exit code."""

    type: str
    message: str
    hint: str | None
    exit_code: ExitCode
    traceback: str | None = None


def report(failure: Failure, *, as_json: bool) -> None:
    """Writes to stderr: text for people, or one line of JSON with --json."""
    if as_json:
        told = {name: value for name, value in failure._asdict().items() if name != "traceback" or value is not None}
        print(json.dumps({"error": told}), file=sys.stderr, flush=True)
        return
    say(f"error: {failure.message}", sys.stderr)
    if failure.hint:
        say(f"hint: {failure.hint}", sys.stderr)


def _flush_stdout() -> None:
    """What cannot be written now cannot be written later either, when the interpreter tries it once more."""
    try:
        sys.stdout.flush()
    except OSError:
        _forget_stdout()
        raise


def _forget_stdout() -> None:
    """What is still buffered goes nowhere, so that the interpreter does not stumble over it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# Asking before something is deleted for good.


def confirm(session: Session, yes: bool, question: str, what: str) -> None:
    """Asks before something is deleted, unless --yes was given; after a no the command ends with code 1.

    InputError if there is no terminal to ask on.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"refusing to {what} without confirmation", hint="Pass --yes")
    if not typer.confirm(question, err=True):
        session.output.note("nothing was deleted")
        raise typer.Exit(ExitCode.FOUND_WRONG)
