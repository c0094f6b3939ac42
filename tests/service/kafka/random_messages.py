"""Random objects for every message and version, from the facts that the codec is made from."""

from __future__ import annotations

import datetime
import importlib
import random
import uuid
from typing import Any

from scripts.kafka_codec.generate import Api, Field, MessageFacts, load_facts, module_name, present

APIS = load_facts()
CASES = [
    (api, message, version)
    for api in APIS
    for message in api.messages
    for version in message.versions
    if message.kind in ("request", "response")
]
_RANGES = {
    "int8": (-128, 127),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "uint16": (0, (1 << 16) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "uint32": (0, (1 << 32) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
}


def module_of(api: Api) -> Any:
    return importlib.import_module(f"tidelog.service.kafka.wire.{module_name(api)}")


def make(api: Api, message: MessageFacts, version: int, chance: random.Random) -> Any:
    """An object that has no field set which the version does not have."""
    return _struct(module_of(api), message.name, message.fields, version, chance)


def _struct(module: Any, name: str, fields: list[Field], version: int, chance: random.Random) -> Any:
    return getattr(module, name)(**{one.name: _value(module, one, version, chance) for one in present(fields, version)})


def _value(module: Any, one: Field, version: int, chance: random.Random) -> Any:
    nullable = version in one.nullable and (version not in one.tagged or one.default == "null")
    if nullable and chance.random() < 0.25:
        return None
    if one.is_array:
        return [_element(module, one, version, chance) for _ in range(chance.choice((0, 1, 2, 3)))]
    return _element(module, one, version, chance)


def _element(module: Any, one: Field, version: int, chance: random.Random) -> Any:
    if one.class_name:
        return _struct(module, one.class_name, one.fields, version, chance)
    if one.element == "string":
        return _text(chance)
    if one.element in ("bytes", "records"):
        return chance.randbytes(chance.choice((0, 1, 5, 200)))
    if one.element == "uuid":
        return chance.randbytes(16)
    if one.element == "bool":
        return chance.random() < 0.5
    if one.element == "float64":
        return chance.uniform(-1e9, 1e9)
    return _number(one, chance)


def _text(chance: random.Random) -> str:
    return "".join(chance.choice("abc-ä€😀") for _ in range(chance.choice((0, 1, 7, 60, 126, 127, 300))))


def _number(one: Field, chance: random.Random) -> int:
    low, high = _RANGES[one.element]
    if one.name == "error_code" or one.name.endswith("_error_code"):
        return chance.randrange(-1, 120)
    if one.element == "int64" and (one.name.endswith("_ms") or one.name == "timestamp"):  # a moment, to others
        return chance.randrange(0, 1 << 41)
    return chance.choice((low, high, 0, -1 if low else 1, chance.randint(low, high), chance.randint(0, 127)))


def plain(value: Any) -> Any:
    """Values of another library as ours: times in ms, ids as bytes, enums as numbers, tuples as lists."""
    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(milliseconds=1)
    if isinstance(value, datetime.datetime):
        return (value - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(milliseconds=1)
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return value
