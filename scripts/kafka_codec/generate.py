"""Makes the modules of `service/kafka/wire/` from `messages.txt`: a class per struct, and functions to decode and
encode, one per version.

It runs when the package is built, so it needs nothing but Python. A line of `messages.txt` is one of

    api KEY NAME                              begins an API; `data NAME` begins messages that are part of others
    request NAME VERSIONS flexible VERSIONS   begins a message; also `response` and `message`
      FIELD TYPE VERSIONS ...                 a field; those of a struct follow, indented further
      struct NAME VERSIONS                    a struct that several fields of the message share

and a field may end in `null VERSIONS` (may be null), `default VALUE`, `tag NUMBER VERSIONS` (a tagged field there).

What is generated
- A class has the fields of all versions. Decoding an old version gives the others their defaults; encoding one leaves
  out what it does not have.
- Neighbours of fixed size are taken with one call of struct. Nested structs are decoded in place, not by calls.
- A length is checked against what is left before anything is made of it. What runs past the end of the buffer raises
  IndexError or struct.error, which `codec.py` turns into a ProtocolError.
- Versions that look the same share one function.
- A message with records (Produce, Fetch) is also encoded as a list of buffers, for writev: its records are a list of
  buffers then, which are passed on as they are. Decoding a memoryview gives views of the records, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FACTS = Path(__file__).with_name("messages.txt")
TARGET = Path(__file__).parents[2] / "src/tidelog/service/kafka/wire"
# The format of struct, the size, the type in Python, and the default.
_FIXED = {
    "bool": ("?", 1, "bool", "False"),
    "int8": ("b", 1, "int", "0"),
    "int16": ("h", 2, "int", "0"),
    "uint16": ("H", 2, "int", "0"),
    "int32": ("i", 4, "int", "0"),
    "uint32": ("I", 4, "int", "0"),
    "int64": ("q", 8, "int", "0"),
    "float64": ("d", 8, "float", "0.0"),
    "uuid": ("16s", 16, "bytes", "ZERO_UUID"),
}
_NO_VERSIONS = range(0)
_MAX_VERSION = 1000


def parse_versions(text: str) -> range:
    """`3-5`, `3+`, `3` or `none`."""
    if text == "none":
        return _NO_VERSIONS
    first, dash, last = text.partition("-")
    if text.endswith("+"):
        return range(int(text[:-1]), _MAX_VERSION)
    return range(int(first), int(last if dash else first) + 1)


@dataclass
class Field:
    """One field of a message or of a struct in it."""

    name: str
    type: str
    versions: range
    nullable: range = _NO_VERSIONS
    default: str | None = None
    tag: int = -1
    tagged: range = _NO_VERSIONS
    fields: list[Field] = field(default_factory=list)
    """Those of a struct, its own or a shared one."""
    class_name: str = ""

    @property
    def element(self) -> str:
        """The type without `[]`."""
        return self.type.removeprefix("[]")

    @property
    def is_array(self) -> bool:
        return self.type.startswith("[]")


@dataclass
class MessageFacts:
    """A request, a response, or a message that travels inside of another."""

    kind: str
    name: str
    versions: range
    flexible: range
    fields: list[Field] = field(default_factory=list)
    structs: dict[str, list[Field]] = field(default_factory=dict)


@dataclass
class Api:
    """All messages of one module."""

    key: int
    name: str
    messages: list[MessageFacts] = field(default_factory=list)


def parse_field(words: list[str]) -> Field:
    """One line of a field."""
    parsed = Field(words[0], words[1], parse_versions(words[2]))
    rest = iter(words[3:])
    for word in rest:
        if word == "null":
            parsed.nullable = parse_versions(next(rest))
        elif word == "default":
            parsed.default = next(rest)
        elif word == "tag":
            parsed.tag, parsed.tagged = int(next(rest)), parse_versions(next(rest))
        else:
            raise ValueError(f"messages.txt: unknown word {word!r} in {' '.join(words)!r}")
    return parsed


def parse_facts(text: str) -> list[Api]:
    """All of `messages.txt`."""
    apis: list[Api] = []
    levels: list[list[Field]] = []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] == "#":
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        if words[0] in ("api", "data"):
            apis.append(Api(int(words[1]), words[2]) if words[0] == "api" else Api(-1, words[1]))
        elif depth == 0:
            message = MessageFacts(words[0], words[1], parse_versions(words[2]), parse_versions(words[4]))
            apis[-1].messages.append(message)
            levels = [message.fields]
        elif words[0] == "struct":
            levels[depth:] = [apis[-1].messages[-1].structs.setdefault(words[1], [])]
        else:
            parsed = parse_field(words)
            levels[depth - 1].append(parsed)
            levels[depth:] = [parsed.fields]
    for message in (message for api in apis for message in api.messages):
        _name_structs(message, message.fields)
    return apis


def load_facts() -> list[Api]:
    """What the codec is made from."""
    return parse_facts(FACTS.read_text("utf-8"))


def _name_structs(message: MessageFacts, fields: list[Field]) -> None:
    base = re.sub("(Request|Response)$", "", message.name)
    for one in fields:
        if one.element[0].isupper():
            if one.element in message.structs:
                one.fields = message.structs[one.element]
            # `JoinGroupRequestProtocol` stays; `ListOffsetsTopic` becomes `ListOffsetsRequestTopic`.
            one.class_name = message.name + re.sub(f"^{base}(Request|Response)?(?=[A-Z])", "", one.element)
            _name_structs(message, one.fields)


def default_of(one: Field) -> str:
    """What a field is where nothing says otherwise, in Python."""
    if one.default == "null":
        return "None"
    if one.is_array:
        return "[]"
    if one.element in _FIXED:
        known = _FIXED[one.element][3]
        if one.default is None or known in ("ZERO_UUID", "0.0"):
            return known
        return one.default.capitalize() if known == "False" else str(int(one.default, 0))
    if one.class_name:
        return f"{one.class_name}()"
    return '""' if one.element == "string" else 'b""'


def annotation_of(one: Field) -> str:
    """The type of a field in Python."""
    if one.element in _FIXED:
        python = _FIXED[one.element][2]
    elif one.class_name:
        python = one.class_name
    else:
        python = {"string": "str", "bytes": "bytes", "records": "Buffer | list[Buffer]"}[one.element]
    python = f"list[{python}]" if one.is_array else python
    return f"{python} | None" if one.nullable or one.default == "null" else python


def smallest(one: Field, version: int, flexible: bool) -> int:
    """The least bytes that one element of an array of this type can have."""
    if one.element in _FIXED:
        return _FIXED[one.element][1]
    if not one.class_name:
        return 1 if flexible else 2 if one.element == "string" else 4
    total = 1 if flexible else 0
    for part in present(one.fields, version):
        if version in part.tagged:
            continue
        if part.is_array:
            total += 1 if flexible else 4
        elif part.class_name and version in part.nullable:
            total += 1
        else:
            total += smallest(part, version, flexible)
    return max(total, 1)


def present(fields: list[Field], version: int) -> list[Field]:
    """The fields that a version has."""
    return [one for one in fields if version in one.versions]


class Source:
    """Lines of a function, with names for its variables and for the formats that it uses."""

    def __init__(self, formats: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self._formats = formats
        self._count = 0

    def put(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def variable(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def format(self, text: str) -> str:
        """The name of a compiled format."""
        return self._formats.setdefault(text, f"S{len(self._formats)}")

    def indent(self) -> None:
        self.depth += 1

    def dedent(self) -> None:
        self.depth -= 1


class Decoder:
    """Writes the body of a function that decodes one version."""

    def __init__(self, source: Source, version: int, flexible: bool) -> None:
        self._to = source
        self._version = version
        self._flexible = flexible

    def struct(self, class_name: str, fields: list[Field], target: str) -> None:
        """Leaves a new object in the variable `target`."""
        to = self._to
        found: dict[str, str] = {}
        here = [one for one in present(fields, self._version) if self._version not in one.tagged]
        for run in _runs(here, self._version):
            if isinstance(run, list):
                names = [to.variable() for _ in run]
                self._fixed(run, names)
                found.update(zip((one.name for one in run), names, strict=True))
            else:
                found[run.name] = to.variable()
                self.value(run, found[run.name])
        if self._flexible:
            self._tags(fields, found)
        arguments = ", ".join(found.get(one.name, default_of(one)) for one in fields)
        to.put(f"{target} = {class_name}({arguments})")

    def _fixed(self, run: list[Field], names: list[str]) -> None:
        formats = "".join(_FIXED[one.type][0] for one in run)
        size = sum(_FIXED[one.type][1] for one in run)
        self._to.put(
            f"{', '.join(names)}{',' if len(names) == 1 else ''} = {self._to.format(formats)}.unpack_from(b, at)"
        )
        self._to.put(f"at += {size}")

    def _tags(self, fields: list[Field], found: dict[str, str]) -> None:
        to = self._to
        known = [one for one in present(fields, self._version) if self._version in one.tagged]
        for one in known:
            found[one.name] = to.variable()
            to.put(f"{found[one.name]} = {default_of(one)}")
        to.put("if b[at] == 0:")
        to.put("    at += 1")
        to.put("else:")
        to.indent()
        if not known:
            to.put("at = skip_tags(b, at, end)")
        else:
            tags, tag, body = to.variable(), to.variable(), to.variable()
            to.put(f"{tags}, at = read_tags(b, at, end)")
            after = to.variable()
            to.put(f"{after} = at")
            to.put(f"for {tag}, at, {body} in {tags}:")
            to.indent()
            for number, one in enumerate(known):
                to.put(f"{'el' if number else ''}if {tag} == {one.tag}:")
                to.indent()
                self.value(one, found[one.name])
                to.put(f"if at > {body}:")
                to.put(f'    raise ProtocolError("a tagged field is longer than it says: {one.name}")')
                to.dedent()
            to.dedent()
            to.put(f"at = {after}")
        to.dedent()

    def value(self, one: Field, target: str) -> None:
        """Leaves the value of a field in the variable `target`."""
        if one.is_array:
            self._array(one, target)
        elif one.element in _FIXED:
            self._fixed([one], [target])
        elif one.class_name:
            self._one_struct(one, target)
        else:
            self._bytes(one, target, self._version in one.nullable)

    def _one_struct(self, one: Field, target: str) -> None:
        if self._version not in one.nullable:
            self.struct(one.class_name, one.fields, target)
            return
        to, there = self._to, self._to.variable()
        to.put(f"{there} = b[at]")
        to.put("at += 1")
        to.put(f"if {there} > 127:")  # a byte below zero
        to.put(f"    {target} = None")
        to.put("else:")
        to.indent()
        self.struct(one.class_name, one.fields, target)
        to.dedent()

    def _length(self, count: str, element: str, array: bool) -> None:
        """Leaves the length in `count`: -1 is null."""
        to = self._to
        if self._flexible:
            to.put(f"{count} = b[at] - 1")
            to.put("at += 1")
            to.put(f"if {count} > 126:")
            to.put(f"    {count}, at = read_uvarint(b, at - 1)")
            to.put(f"    {count} -= 1")
        else:
            form = "h" if element == "string" and not array else "i"
            to.put(f"{count}, = {to.format(form)}.unpack_from(b, at)")
            to.put(f"at += {_FIXED['int16' if form == 'h' else 'int32'][1]}")

    def _null(self, one: Field, count: str, target: str, nullable: bool) -> None:
        to = self._to
        to.put(f"if {count} < 0:")
        if nullable:
            to.put(f"    {target} = None")
        else:
            to.put(f'    raise ProtocolError("{one.name} must not be null")')

    def _bytes(self, one: Field, target: str, nullable: bool) -> None:
        to, count, stop = self._to, self._to.variable(), self._to.variable()
        self._length(count, one.element, array=False)
        self._null(one, count, target, nullable)
        to.put("else:")
        to.put(f"    {stop} = at + {count}")
        to.put(f"    if {stop} > end:")
        to.put(f'        raise ProtocolError("{one.name} is longer than its message")')
        how = {"string": 'str(b[at:{}], "utf-8")', "bytes": "bytes(b[at:{}])", "records": "b[at:{}]"}[one.element]
        to.put(f"    {target} = {how.format(stop)}")
        to.put(f"    at = {stop}")

    def _array(self, one: Field, target: str) -> None:
        to, count = self._to, self._to.variable()
        self._length(count, one.element, array=True)
        self._null(one, count, target, self._version in one.nullable)
        least = smallest(one, self._version, self._flexible)
        to.put(f"elif {count} * {least} > end - at:")
        to.put(f'    raise ProtocolError("{one.name} has more elements than fit into its message")')
        to.put("else:")
        to.indent()
        if one.element in _FIXED and one.element != "uuid":
            form, size = _FIXED[one.element][:2]
            to.put(f'{target} = list(unpack_from(f">{{{count}}}{form}", b, at))')
            to.put(f"at += {count} * {size}")
        else:
            self._elements(one, target, count)
        to.dedent()

    def _elements(self, one: Field, target: str, count: str) -> None:
        to, element = self._to, self._to.variable()
        to.put(f"{target} = []")
        to.put(f"for _ in range({count}):")
        to.indent()
        if one.class_name:
            self.struct(one.class_name, one.fields, element)
        elif one.element in _FIXED:
            self._fixed([Field(one.name, one.element, one.versions)], [element])
        else:
            self._bytes(one, element, nullable=False)
        to.put(f"{target}.append({element})")
        to.dedent()


class Encoder:
    """Writes the body of a function that encodes one version, into one bytearray or into a list of buffers."""

    def __init__(self, source: Source, version: int, flexible: bool, gathers: bool) -> None:
        self._to = source
        self._version = version
        self._flexible = flexible
        self._gathers = gathers

    def struct(self, fields: list[Field], owner: str, out: str) -> None:
        """Appends the fields of the object in the variable `owner` to the bytearray `out`."""
        to = self._to
        here = [one for one in present(fields, self._version) if self._version not in one.tagged]
        for run in _runs(here, self._version):
            if isinstance(run, list):
                formats = "".join(_FIXED[one.type][0] for one in run)
                names = ", ".join(f"{owner}.{one.name}" for one in run)
                to.put(f"{out} += {to.format(formats)}.pack({names})")
            else:
                name = to.variable()
                to.put(f"{name} = {owner}.{run.name}")
                self.value(run, name, out)
        if self._flexible:
            self._tags([one for one in present(fields, self._version) if self._version in one.tagged], owner, out)

    def _tags(self, known: list[Field], owner: str, out: str) -> None:
        to = self._to
        if not known:
            to.put(f"{out}.append(0)")
            return
        tags = to.variable()
        to.put(f"{tags} = []")
        for one in sorted(known, key=lambda one: one.tag):
            name, body = to.variable(), to.variable()
            to.put(f"{name} = {owner}.{one.name}")
            to.put(f"if {name} {'is not' if one.default == 'null' else '!='} {default_of(one)}:")
            to.indent()
            to.put(f"{body} = bytearray()")
            self.value(one, name, body)
            to.put(f"{tags}.append(({one.tag}, {body}))")
            to.dedent()
        to.put(f"put_tags({out}, {tags})")

    def value(self, one: Field, name: str, out: str) -> None:
        to = self._to
        nullable = self._version in one.nullable
        if one.element in _FIXED and not one.is_array:
            to.put(f"{out} += {to.format(_FIXED[one.element][0])}.pack({name})")
            return
        if nullable:
            to.put(f"if {name} is None:")
            to.put(f"    {self._null(one, out)}")
            to.put("else:")
            to.indent()
        if one.is_array:
            self._array(one, name, out)
        elif one.class_name:
            if nullable:
                to.put(f"{out}.append(1)")
            self.struct(one.fields, name, out)
        elif one.element == "records" and self._gathers:
            self._buffers(name, out)
        else:
            self._bytes(one.element, name, out)
        if nullable:
            to.dedent()

    def _buffers(self, name: str, out: str) -> None:
        to, count = self._to, self._to.variable()
        to.put(f"{count} = sum(map(len, {name}))")
        self._length(count, out, "i")
        to.put(f"parts.append({out})")
        to.put(f"parts += {name}")
        to.put(f"{out} = bytearray()")

    def _null(self, one: Field, out: str) -> str:
        if one.class_name and not one.is_array:
            return f"{out}.append(255)"
        if self._flexible:
            return f"{out}.append(0)"
        null = "NULL_STRING" if one.type == "string" else "NULL_BYTES"
        return f"{out} += {null}"

    def _length(self, count: str, out: str, form: str) -> None:
        to = self._to
        if not self._flexible:
            to.put(f"{out} += {to.format(form)}.pack({count})")
            return
        to.put(f"if {count} < 127:")
        to.put(f"    {out}.append({count} + 1)")
        to.put("else:")
        to.put(f"    put_uvarint({out}, {count} + 1)")

    def _bytes(self, element: str, name: str, out: str) -> None:
        to, count = self._to, self._to.variable()
        if element == "string":
            to.put(f"{name} = {name}.encode()")
        to.put(f"{count} = len({name})")
        self._length(count, out, "h" if element == "string" else "i")
        to.put(f"{out} += {name}")

    def _array(self, one: Field, name: str, out: str) -> None:
        to, count, element = self._to, self._to.variable(), self._to.variable()
        to.put(f"{count} = len({name})")
        self._length(count, out, "i")
        if one.element in _FIXED and one.element != "uuid":
            to.put(f'{out} += pack(f">{{{count}}}{_FIXED[one.element][0]}", *{name})')
            return
        to.put(f"for {element} in {name}:")
        to.indent()
        if one.class_name:
            self.struct(one.fields, element, out)
        elif one.element == "uuid":
            to.put(f"{out} += {to.format('16s')}.pack({element})")
        else:
            self._bytes(one.element, element, out)
        to.dedent()


def _runs(fields: list[Field], version: int) -> Iterator[list[Field] | Field]:
    """Neighbours of fixed size together, the others one by one."""
    run: list[Field] = []
    for one in fields:
        if one.type in _FIXED:
            run.append(one)
            continue
        if run:
            yield run
            run = []
        yield one
    if run:
        yield run


def _classes(fields: list[Field], seen: dict[str, str]) -> None:
    """The classes of nested structs, innermost first."""
    for one in fields:
        if one.class_name:
            _classes(one.fields, seen)
            seen.setdefault(one.class_name, _class_text(one.class_name, one.fields))


def _class_text(name: str, fields: list[Field]) -> str:
    lines = [f"class {name}(Struct, gc=False):"]
    for one in fields:
        default = default_of(one)
        if default.endswith("()"):
            default = f"field(default_factory={default[:-2]})"
        lines.append(f"    {one.name}: {annotation_of(one)} = {default}")
    return "\n".join(lines if fields else [*lines, "    pass"])


def _function(verb: str, message: MessageFacts, version: int, formats: dict[str, str]) -> tuple[str, str]:
    """The head of a function after its name, and its body."""
    source = Source(formats)
    flexible = version in message.flexible
    if verb == "decode":
        Decoder(source, version, flexible).struct(message.name, message.fields, "found")
        source.put("return found, at")
        return f"(b: Buffer, at: int, end: int) -> tuple[{message.name}, int]:", "\n".join(source.lines)
    gathers = verb == "gather"
    if gathers:
        source.put("parts: list[Buffer] = []")
    Encoder(source, version, flexible, gathers).struct(message.fields, "o", "out")
    if gathers:
        source.put("parts.append(out)")
        source.put("return parts")
    head = f"(o: {message.name}, out: bytearray) -> {'list[Buffer]' if gathers else 'None'}:"
    return head, "\n".join(source.lines or ["    pass"])


def _functions(message: MessageFacts, formats: dict[str, str]) -> Iterator[str]:
    """The functions of all versions, and the tables that name them."""
    for verb in ("decode", "encode", "gather") if _has_records(message.fields) else ("decode", "encode"):
        bodies: dict[str, str] = {}
        table = []
        for version in message.versions:
            head, body = _function(verb, message, version, formats)
            name = f"{verb}_{message.kind}_v{version}"
            if body not in bodies:
                bodies[body] = name
                yield f"def {name}{head}\n{body}"
            table.append(f"    {version}: {bodies[body]},")
        yield f"{verb.upper()}_{message.kind.upper()} = {{\n" + "\n".join(table) + "\n}"


def _has_records(fields: list[Field]) -> bool:
    return any(one.element == "records" or _has_records(one.fields) for one in fields)


def module_text(api: Api) -> str:
    """The module of one API."""
    classes: dict[str, str] = {}
    for message in api.messages:
        _classes(message.fields, classes)
        classes[message.name] = _class_text(message.name, message.fields)
    formats: dict[str, str] = {}
    functions = [text for message in api.messages for text in _functions(message, formats)]
    flexible = [
        f"FLEXIBLE_{one.kind.upper()} = {one.flexible.start if one.flexible else _MAX_VERSION}" for one in api.messages
    ]
    head = f'''"""Kafka's {api.name}: made by `generate.py` from `messages.txt`; not to be edited."""

# mypy: ignore-errors
# ruff: noqa
from __future__ import annotations

from struct import Struct as Format
from struct import pack, unpack_from

from msgspec import Struct, field

from tidelog.service.kafka.primitives import (
    NULL_BYTES,
    NULL_STRING,
    ZERO_UUID,
    Buffer,
    ProtocolError,
    put_tags,
    put_uvarint,
    read_tags,
    read_uvarint,
    skip_tags,
)

KEY = {api.key}'''
    compiled = [f'{name} = Format(">{text}")' for text, name in formats.items()]
    parts = [head, "\n".join(flexible), *classes.values(), "\n".join(compiled), *functions]
    return "\n\n\n".join(part for part in parts if part) + "\n"


def module_name(api: Api) -> str:
    """Of the module in `wire/`."""
    return f"api_{api.name}"


def main(target: Path = TARGET) -> None:
    """Writes what is not there yet or has changed, so that nothing is compiled again without need."""
    target.mkdir(parents=True, exist_ok=True)
    wanted = {f"{module_name(api)}.py": module_text(api) for api in load_facts()}
    for stale in target.glob("api_*.py"):
        if stale.name not in wanted:
            stale.unlink()
    for name, text in wanted.items():
        path = target / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
