"""Tables of Spark's catalog: the OPTIONS of `CREATE TABLE ... USING tidelog` travel in the metadata of the columns.

    CREATE TABLE orders USING tidelog OPTIONS (root 's3://bucket/prefix', topic 'shop/orders')

Spark asks a Python source for its schema when a table is created, and hands it the OPTIONS, mixed with properties of
its own. To a query and to an INSERT it hands the columns of the table and none of its options. It keeps the metadata of
columns, though, and so each column says which table it belongs to:

    {"tidelog": '{"columns": ["key", ...], "options": {"root": "s3://bucket/prefix", "topic": "shop/orders"}}'}

Invariants
- Options that are given with a query (`SELECT ... FROM orders WITH (startingOffsets = ...)`) win over those of the
  table, and those that say the same thing in other words are replaced together. A query that names a place of its own
  has nothing to do with a table, whatever its columns say.
- No secret becomes metadata: it goes wherever the columns go, into the files of other formats too.
- Metadata goes along with rows that are read. `CREATE TABLE b ... AS SELECT * FROM a`, whose OPTIONS Spark hands to
  nobody, looks like an INSERT into `a`, and so does `INSERT INTO b SELECT * FROM a` where both have the same columns.
  Neither must become one. So a table is inserted into by all of its columns in their order, and by rows that were not
  read from a topic: their `offset` is null, and outer joins that make it so leave key and value null as well
  (`sink.task` looks at the rows).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
from pyspark.sql.types import StructField, StructType

from tidelog.config import Settings
from tidelog.config.load import settings_of
from tidelog.errors import InputError

METADATA = "tidelog"
_OPTION = "option."
_PROVIDER = "provider"
_PLACES = ("root", "path", "dir")
# Options that say one thing in several ways.
_GROUPS = (
    ("subscribe", "subscribepattern", "assign"),
    ("startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp"),
    ("endingoffsets", "endingtimestamp", "endingoffsetsbytimestamp"),
)
LOST_OPTIONS_HINT = (
    "Spark does not hand the OPTIONS of a table on where CREATE TABLE lists columns or has AS SELECT: "
    "CREATE TABLE ... USING ... OPTIONS (...) alone, then INSERT INTO it"
)


class Declaration(msgspec.Struct, frozen=True):
    """What a table's columns say about it."""

    columns: list[str]
    options: dict[str, str]


def options_in(given: Mapping[str, str]) -> dict[str, str]:
    """The options among what Spark passes: for `CREATE TABLE` without Spark's own properties.

    Those of a table are there twice, the second time with a prefix, which tells them from `TBLPROPERTIES`.
    """
    if not is_table(given):
        return dict(given)
    found = {name.lower(): str(value) for name, value in given.items()}
    options = {name.removeprefix(_OPTION): value for name, value in found.items() if name.startswith(_OPTION)}
    if "location" in found and not any(name in options for name in _PLACES):
        options["path"] = found["location"]
    return options


def is_table(given: Mapping[str, str]) -> bool:
    """Whether the options are those of `CREATE TABLE`."""
    return any(name.lower() == _PROVIDER for name in given)


def declared(schema: StructType, given: Mapping[str, str], location: str, settings: type[Settings]) -> StructType:
    """The schema of a table that is created, with its options in it; of a query that names them itself, as it is."""
    if not is_table(given):
        return schema
    options = options_in(given)
    known = settings_of(settings)
    secret = next((name for name in options if name in known and known[name].field.is_secret), None)
    if secret is not None:
        raise InputError(
            f"the option {secret} would be kept in Spark's catalog for everybody to read",
            hint=f"Set it where Spark runs ({known[secret].variable}), or in a file that the option config names",
        )
    options = {name: value for name, value in options.items() if name not in _PLACES} | {"root": location}
    if "config" in options:  # wherever a later query is planned
        options["config"] = os.path.abspath(os.path.expanduser(options["config"]))
    text = msgspec.json.encode(Declaration(schema.fieldNames(), options), order="sorted").decode()
    return StructType([StructField(one.name, one.dataType, one.nullable, {METADATA: text}) for one in schema])


def found_declaration(schema: StructType) -> Declaration | None:
    """What all columns of a schema say; None where they do not say the same, or nothing."""
    said = {(field.metadata or {}).get(METADATA) for field in schema}
    text = said.pop() if len(said) == 1 else None
    if not isinstance(text, str):
        return None
    try:
        return msgspec.json.decode(text, type=Declaration)
    except msgspec.MsgspecError:
        return None


def options_for(given: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """The options of a read: those that are given, and behind them those of the table that the schema is of."""
    options = options_in(given)
    table = None if _names_a_place(options) else found_declaration(schema)
    return options if table is None else _over(options, table.options)


def options_for_insert(given: Mapping[str, str], schema: StructType) -> tuple[dict[str, str], bool]:
    """The options of a write, and whether they are those of a table; InputError where they belong to another one."""
    options = options_in(given)
    if _names_a_place(options):
        return options, False
    table = found_declaration(schema)
    if table is None or table.columns != schema.fieldNames():
        raise InputError("the option root is missing", hint=LOST_OPTIONS_HINT)
    if not {"key", "value", "offset"} <= {*table.columns}:
        raise InputError(
            "a table with the option columns is for reading unless key, value and offset are among them",
            hint="Create another one without columns, and INSERT INTO that",
        )
    return _over(options, table.options), True


def _names_a_place(options: Mapping[str, str]) -> bool:
    return any(name.lower() in _PLACES for name in options)


def _over(options: Mapping[str, str], of_table: Mapping[str, str]) -> dict[str, str]:
    given = {name.lower(): value for name, value in options.items()}
    replaced = {name for group in _GROUPS if any(name in given for name in group) for name in group}
    return {name: value for name, value in of_table.items() if name not in replaced} | given
