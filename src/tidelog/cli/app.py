"""The command line as a whole: the commands, the options they share, and errors in the command line itself.

A module of a command imports what it needs for its work only when it works, so that help and completion start fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol, runtime_checkable

import typer

from tidelog.cli import (
    bench,
    config,
    consume,
    demo,
    dev_s3,
    dlq,
    doctor,
    engine,
    import_danube,
    inspect,
    pipeline,
    produce,
    repair,
    sub,
    topic,
    verify,
)
from tidelog.cli.errors import ExitCode
from tidelog.cli.session import (
    ConfigOption,
    DebugOption,
    DirectoryOption,
    JsonOption,
    MetadataOption,
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

app = typer.Typer(
    name="tidelog",
    epilog=_EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MODULES = (
    *(demo, produce, consume, topic, sub, dlq, inspect, verify, repair),
    *(pipeline, engine, import_danube, config, doctor, bench, dev_s3),
)
for _module in _MODULES:
    _module.add_to(app)


@runtime_checkable
class _UsageError(Protocol):
    """What the parser of the command line raises, whichever version of it is installed."""

    exit_code: int

    def format_message(self) -> str: ...


def _print_version(wanted: bool) -> None:
    if wanted:
        import tidelog

        print(f"tidelog {tidelog.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    directory: DirectoryOption = None,
    config_file: ConfigOption = None,
    store: StoreOption = None,
    metadata: MetadataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """A durable log: append to topics, tail them, check them and mend them.

    Results go to stdout as a table, as tab-separated text in a pipe, or as JSON with --json; everything else goes to
    stderr. The options below may also follow the command.
    """
    context.obj = Session(directory, config_file, as_json, debug, store, metadata)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; without a command it shows the help."""

    def work() -> None:
        # Without the parser's own handling of errors, it hands back the code of whoever raised Exit.
        code = app(args=list(arguments) or ["--help"], prog_name="tidelog", standalone_mode=False)
        raise typer.Exit(code if isinstance(code, int) else ExitCode.OK)

    try:
        return run_reporting(work, Session())
    except Exception as error:
        if not isinstance(error, _UsageError):
            raise
        hint = _help_hint(error)
        report(error.format_message(), None if hint is None else Session().pasteable(hint))
        return ExitCode.BAD_INPUT


def _help_hint(error: object) -> str | None:
    path = getattr(getattr(error, "ctx", None), "command_path", None)
    return f"See `{path} --help`" if path else None
