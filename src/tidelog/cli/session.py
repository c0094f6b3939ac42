"""What every command has: the common options, the log directory they lead to, and one way to fail.

Invariants
- A common option may stand before or after the name of a command; the later one wins.
- A command raises what went wrong; only here does it become a text on stderr and an exit code.
- When the reader of stdout goes away (`| head`), the command ends quietly and with success.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from tidelog.cli.errors import ExitCode, exit_code_of, hint_of, text_of
from tidelog.cli.output import Output

if TYPE_CHECKING:
    from tidelog.config import Settings
    from tidelog.topics.storage import LogDirectory

DEFAULT_DIRECTORY = "data"

DirectoryOption = Annotated[
    Path | None,
    typer.Option("--dir", "-d", metavar="DIR", help="The log directory [default: TIDELOG_DIR, the settings, ./data]."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="Settings in TOML [default: TIDELOG_CONFIG].")
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

    def overridden_by(self, other: Session) -> Session:
        return Session(
            other.directory or self.directory,
            other.config or self.config,
            self.as_json or other.as_json,
            self.debug or other.debug,
        )

    @property
    def output(self) -> Output:
        return Output(self.as_json)

    @functools.cached_property
    def settings(self) -> Settings:
        """From the file, the variables and the options."""
        from tidelog.config import load_settings

        return load_settings(self.config, os.environ, {"dir": self.directory})

    @property
    def root(self) -> Path:
        """The log directory, there or not."""
        return Path(self.settings.dir or DEFAULT_DIRECTORY)

    def open(self) -> LogDirectory:
        """Takes the log directory, made when absent."""
        from tidelog.topics.storage import LogDirectory

        return LogDirectory(self.root, self.settings.log)

    def look(self) -> LogDirectory:
        """Opens the log directory for reading, whoever owns it."""
        from tidelog.errors import NotFoundError
        from tidelog.topics.storage import LogDirectory

        if not self.root.is_dir():
            raise NotFoundError(
                f"there is no log directory {self.root}",
                hint="Name one with --dir; `tidelog produce` and `tidelog topic create` make it",
            )
        return LogDirectory(self.root, self.settings.log, read_only=True)


Command = TypeVar("Command", bound=Callable[..., None])


def command(group: typer.Typer, name: str) -> Callable[[Command], Command]:
    """Registers a function whose first parameter is the session and whose others are its own options."""

    def register(work: Command) -> Command:
        def run(
            context: typer.Context,
            directory: DirectoryOption = None,
            config: ConfigOption = None,
            as_json: JsonOption = False,
            debug: DebugOption = False,
            **own: Any,
        ) -> None:
            before = context.obj if isinstance(context.obj, Session) else Session()
            session = before.overridden_by(Session(directory, config, as_json, debug))
            code = run_reporting(lambda: work(session, **own), session.debug)
            if code:
                raise typer.Exit(code)

        run.__doc__ = inspect.getdoc(work)
        _take_signature(run, work)
        group.command(name)(run)
        return work

    return register


def _take_signature(run: Callable[..., None], work: Callable[..., None]) -> None:
    """The parameters that the command line sees: the command's own, then the common ones."""
    own_types = get_type_hints(work, include_extras=True)
    own = list(inspect.signature(work).parameters.values())[1:]
    shared = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    typed = [p.replace(annotation=own_types[p.name], kind=p.KEYWORD_ONLY) for p in own]
    parameters = [*typed, *(p.replace(kind=p.KEYWORD_ONLY) for p in shared)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}


def run_reporting(work: Callable[[], None], debug: bool) -> int:
    """Runs a command; what it raises becomes a text on stderr and the exit code."""
    try:
        try:
            work()
        finally:
            sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
    except Exception as error:  # the last line of defence: every error ends in a text and a code
        if debug:
            traceback.print_exc()
        if getattr(error, "format_message", None) is not None:
            raise  # a usage error: it knows its command, and is told by `app.run`
        report(text_of(error), hint_of(error))
        return exit_code_of(error)
    return ExitCode.OK


def report(text: str, hint: str | None) -> None:
    """An error, for people."""
    print(f"error: {text}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def _forget_stdout() -> None:
    """What is still buffered goes nowhere, so that the interpreter does not stumble over it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
