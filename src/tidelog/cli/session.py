"""What every command has: the common options, the log directory they lead to, and one way to fail.

Invariants
- A common option may stand before or after the name of a command; the later one wins.
- A command raises what went wrong; only here does it become a text on stderr and an exit code.
- A command that a hint names in backticks can be pasted: it gets the path of this program and the directory in use.
- When the reader of stdout goes away (`| head`), the command ends quietly and with success.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from tidelog.cli.errors import ExitCode, exit_code_of, hint_of, text_of
from tidelog.cli.log_warnings import shown_warnings
from tidelog.cli.output import Output
from tidelog.cli.program import program
from tidelog.cli.wrapping import say

if TYPE_CHECKING:
    from tidelog.config import Settings
    from tidelog.topics.storage import LogDirectory

DEFAULT_DIRECTORY = "data"

DirectoryOption = Annotated[
    Path | None,
    # Whether it can be read is for the log to say: its errors come with a hint.
    typer.Option(
        *("--dir", "-d"),
        metavar="DIR",
        readable=False,
        help="The log directory [default: TIDELOG_DIR, the settings, ./data].",
    ),
]
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
HeldOption = Annotated[
    bool, typer.Option("--take-over", help="Also if another node has it open, which is fenced then.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")]
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

    def overridden_by(self, other: Session) -> Session:
        return Session(
            other.directory or self.directory,
            other.config or self.config,
            self.as_json or other.as_json,
            self.debug or other.debug,
            other.store or self.store,
            other.metadata or self.metadata,
            other.topic or self.topic,
        )

    def at_root(self, root: str) -> Session:
        """The same with the place that a job is told by --root, so that a command in a hint is about that place."""
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

    def look(self) -> LogDirectory:
        """Opens the log directory for reading, whoever owns it; a store with its catalog is enough."""
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

        if self.settings.store is None:
            raise NotFoundError(f"there is no log directory {self.root}", hint=hint)
        if self.settings.metadata in (None, "sqlite"):
            raise NotFoundError(
                f"there is no log directory {self.root}, and with it no catalog of {self.settings.store}",
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
        if words.endswith("--help"):
            return words
        about = [topic] if topic is not None and words in _ABOUT_A_TOPIC else []
        options = [
            ("--dir", self.directory),
            ("--config", self.config),
            ("--store", self.store),
            ("--metadata", self.metadata),
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
_ABOUT_A_TOPIC = ("verify", "repair", "topic rescue", "topic rebuild-catalog", "topic sweep")

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
    group: typer.Typer, name: str, directory_option: object = DirectoryOption, *, takes_negative_numbers: bool = False
) -> Callable[[Command], Command]:
    """Registers a function whose first parameter is the session and whose others are its own options.

    With `takes_negative_numbers` an argument may be -3; what looks like an option and is none is an argument then.
    """

    def register(work: Command) -> Command:
        def run(
            context: typer.Context,
            directory: DirectoryOption = None,
            config: ConfigOption = None,
            store: StoreOption = None,
            metadata: MetadataOption = None,
            as_json: JsonOption = False,
            debug: DebugOption = False,
            **own: Any,
        ) -> None:
            before = context.obj if isinstance(context.obj, Session) else Session()
            topic = own["topic"] if isinstance(own.get("topic"), str) else None
            session = before.overridden_by(Session(directory, config, as_json, debug, store, metadata, topic))
            if isinstance(own.get("root"), str):
                session = session.at_root(own["root"])
            code = run_reporting(lambda: _run_shown(work, session, own), session)
            if code:
                raise typer.Exit(code)

        run.__doc__ = inspect.getdoc(work)
        _take_signature(run, work, directory_option)
        settings = {"ignore_unknown_options": True} if takes_negative_numbers else None
        group.command(name, cls=_PlainUsage, context_settings=settings)(run)
        return work

    return register


def _run_shown(work: Callable[..., None], session: Session, own: dict[str, Any]) -> None:
    with shown_warnings():
        work(session, **own)


def _take_signature(run: Callable[..., None], work: Callable[..., None], directory_option: object) -> None:
    """The parameters that the command line sees: the command's own, then the common ones."""
    own_types = get_type_hints(work, include_extras=True)
    own = list(inspect.signature(work).parameters.values())[1:]
    shared = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
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
        if session.debug:
            traceback.print_exc()
        if getattr(error, "format_message", None) is not None:
            raise  # a usage error: it knows its command, and is told by `app.run`
        hint = hint_of(error)
        report(text_of(error), None if hint is None else session.pasteable(hint, session.topic_of(error)))
        return exit_code_of(error)
    return ExitCode.OK


def report(text: str, hint: str | None) -> None:
    """An error, for people."""
    say(f"error: {text}", sys.stderr)
    if hint:
        say(f"hint: {hint}", sys.stderr)


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
