"""The command line as a whole: the commands, their shared options, and errors in the command line itself.

If a command is named first, only that command is imported and parsed: building the parser of all of them takes longer
than most commands run. The module of a command imports its dependencies only when it runs, so help and completion start
fast too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, Protocol, runtime_checkable

import typer
from typer.main import get_command

from tidelog.cli.errors import ExitCode
from tidelog.cli.main import asks_for_json
from tidelog.cli.session import (
    ConfigOption,
    DebugOption,
    Failure,
    JsonOption,
    MetadataOption,
    PlaceOption,
    Session,
    StoreOption,
    report,
    run_reporting,
)

_EPILOG = """\b
Exit codes:
  0    done
  1    a check found something wrong (verify, repair without --yes, doctor,
       demo), or a question was answered with no
  2    the command line, the settings or the input is wrong
  3    no such topic, offset, file or log directory
  4    owned by another process or node, or busy, or a store gives no
       answer: try again later
  5    data on the disk or in the store is damaged
  6    the disk is full, or reading or writing it failed
  70   a bug in tidelog
  130  interrupted by Ctrl-C
\b
Try:  tidelog demo
      seq 1000 | tidelog produce shop/orders
      tidelog consume shop/orders --from -10 --json
"""

# The commands in the order in which the help has them, and the module of each that is not called the same.
COMMANDS = (
    *("demo", "produce", "consume", "topic", "sub", "dlq", "inspect", "verify", "repair"),
    *("pipeline", "engine", "serve", "cluster", "auth", "import", "config", "doctor", "bench", "dev-s3"),
)
_MODULES = {
    "import": "import_danube",
    "dev-s3": "dev_s3",
    "cluster": "cluster.group",
    "demo": "demo.command",
    "dlq": "dead_letters",
    "engine": "engine.group",
    "pipeline": "pipeline.group",
    "repair": "verify",
    "sub": "subscriptions",
    "topic": "topic.group",
}


@runtime_checkable
class _UsageError(Protocol):
    """What the parser of the command line raises, in every version of it."""

    exit_code: int

    def format_message(self) -> str: ...


def _print_version(wanted: bool) -> None:
    if wanted:
        import tidelog

        print(f"tidelog {tidelog.__version__}")
        raise typer.Exit


def options(
    context: typer.Context,
    directory: PlaceOption = None,
    config_file: ConfigOption = None,
    store: StoreOption = None,
    metadata: MetadataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """A durable log: append to topics, tail them, verify them and repair them.

    Results go to stdout as a table, as tab-separated text in a pipe, or as JSON with --json; everything else goes to
    stderr. The options below may also follow the command.
    """
    given = Session(None, config_file, as_json, debug, store, metadata)
    context.obj = given if directory is None else given.at_place(directory)


def _parser_for(arguments: Sequence[str]) -> Callable[..., Any]:
    """What parses this command line and runs its command."""
    first = arguments[0] if arguments else None
    return parser((first,) if first in COMMANDS else COMMANDS)


@functools.cache
def parser(names: tuple[str, ...]) -> Callable[..., Any]:
    """What parses command lines of these commands, and runs them."""
    app = typer.Typer(
        name="tidelog",
        epilog=_EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for module in dict.fromkeys(_MODULES.get(name, name) for name in names):
        import_module(f"{__package__}.{module}").add_to(app)
    return get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; without a command it shows the help."""

    def work() -> None:
        # Without the parser's own error handling, it returns the code that was raised with Exit.
        code = _parser_for(arguments)(args=list(arguments) or ["--help"], prog_name="tidelog", standalone_mode=False)
        raise typer.Exit(code if isinstance(code, int) else ExitCode.OK)

    session = Session(as_json=asks_for_json(arguments))
    try:
        return run_reporting(work, session)
    except Exception as error:
        if not isinstance(error, _UsageError):
            raise
        hint = _help_hint(error)
        told = None if hint is None else session.pasteable(hint)
        failure = Failure("UsageError", error.format_message(), told, ExitCode.BAD_INPUT)
        report(failure, as_json=session.as_json)
        return ExitCode.BAD_INPUT


def _help_hint(error: object) -> str | None:
    path = getattr(getattr(error, "ctx", None), "command_path", None)
    return f"See `{path} --help`" if path else None
