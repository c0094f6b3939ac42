"""Patterns of topic names that clients subscribe to (KIP-848), matched in time that no pattern can make long.

The syntax is RE2's, which Kafka's broker uses, as far as names of topics need it: alternatives, groups, classes, `.`,
`* + ? {n,m}` (also lazy), `^ $`, `\\d \\w \\s` and their opposites, `\\Q...\\E`, and `(?i)` in front. There are no
backreferences and nothing that looks around: neither has RE2.

Invariants
- A pattern matches a name as a whole.
- A name is read once from left to right. What is known of a set of places in the pattern is remembered, so that many
  names cost little; the work that cannot be remembered is bounded for each pattern: beyond that it is refused.
- Python's `re` is not used for what comes from a client: it can take hours for a pattern of twenty characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeVar

from tidelog.errors import InputError

_MAX_LENGTH = 1000
_MAX_DEPTH = 50
_MAX_REPEAT = 1000
_MAX_NODES = 5000
_MAX_WORK = 500_000
_MAX_REMEMBERED = 20_000

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Test = Callable[[str], bool]
_CLASSES: dict[str, _Test] = {
    "d": lambda char: "0" <= char <= "9",
    "w": lambda char: char.isascii() and (char.isalnum() or char == "_"),
    "s": lambda char: char in "\t\n\f\r ",
}
_CLASSES |= {name.upper(): (lambda char, test=test: not test(char)) for name, test in _CLASSES.items()}  # type: ignore[misc]
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


class PatternError(InputError):
    """Not a pattern, or one that would cost too much."""


class _Node:
    """A place in the pattern: reads one character (`test`), or goes on without (`edges`, on a condition)."""

    __slots__ = ("edges", "is_begin", "is_end", "next", "test")

    def __init__(self) -> None:
        self.test: _Test | None = None
        self.next: _Node | None = None
        self.edges: list[_Node] = []
        self.is_begin = False
        self.is_end = False


_Build = Callable[[_Node], _Node]
"""Part of a pattern: makes its nodes in front of what follows, and returns the first."""


@lru_cache(maxsize=256)
def topic_pattern(pattern: str) -> TopicPattern:
    """The pattern, with what is known of it from earlier names."""
    return TopicPattern(pattern)


class TopicPattern:
    """A pattern; PatternError when it is none."""

    def __init__(self, pattern: str) -> None:
        parser = _Parser(pattern)
        build = parser.parse()
        self._ignores_case = parser.ignores_case
        self._count = 0
        self._last = self._node()
        parser.new_node = self._node
        self._first = self._closed([build(self._last)], at_begin=True)
        self._steps: dict[tuple[frozenset[_Node], str], frozenset[_Node]] = {}
        self._ends: dict[tuple[frozenset[_Node], bool], bool] = {}
        self._work = 0

    def _node(self) -> _Node:
        self._count += 1
        if self._count > _MAX_NODES:
            raise PatternError("the pattern is too large", hint="Repeat less, or use several subscriptions")
        return _Node()

    def matches(self, name: str) -> bool:
        """Whether the whole name matches; PatternError when the pattern has cost too much."""
        places = self._first
        for char in name:
            if not places:
                return False
            known = self._steps.get((places, char))
            places = self._step(places, char) if known is None else known
        is_end = self._ends.get((places, not name))
        if is_end is None:
            is_end = self._last in self._closed(places, at_end=True, at_begin=not name)
            self._remember(self._ends, (places, not name), is_end, len(places))
        return is_end

    def _step(self, places: frozenset[_Node], char: str) -> frozenset[_Node]:
        forms = {char.lower(), char.upper()} if self._ignores_case else {char}
        reached = [one.next for one in places if one.test is not None and any(map(one.test, forms))]
        found = self._closed([node for node in reached if node is not None])
        self._remember(self._steps, (places, char), found, len(places) + len(found))
        return found

    def _remember(self, known: dict[_Key, _Value], key: _Key, value: _Value, work: int) -> None:
        self._work += work + 1
        if self._work > _MAX_WORK:
            raise PatternError("the pattern takes too long to match", hint="Use a simpler one")
        if len(known) >= _MAX_REMEMBERED:
            known.clear()
        known[key] = value

    def _closed(self, nodes: Iterable[_Node], *, at_begin: bool = False, at_end: bool = False) -> frozenset[_Node]:
        """All places that are reached without a character."""
        found: set[_Node] = set()
        left = list(nodes)
        while left:
            node = left.pop()
            if node in found:
                continue
            found.add(node)
            if (at_begin or not node.is_begin) and (at_end or not node.is_end):
                left += node.edges
        return frozenset(found)


class _Parser:
    def __init__(self, pattern: str) -> None:
        if not 0 < len(pattern) <= _MAX_LENGTH:
            raise PatternError(f"a pattern has 1 to {_MAX_LENGTH} characters")
        self.ignores_case = pattern.startswith("(?i)")
        self._text = pattern
        self._at = 4 if self.ignores_case else 0
        self._depth = 0
        self.new_node: Callable[[], _Node] = _Node

    def parse(self) -> _Build:
        """The whole pattern."""
        build = self._alternatives()
        if self._at < len(self._text):
            raise self._wrong("an unmatched )")
        return build

    def _wrong(self, what: str) -> PatternError:
        return PatternError(f"the pattern {self._text!r} has {what} at character {self._at}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise self._wrong("no end")
        self._at += 1
        return char

    def _accept(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    # What a pattern consists of

    def _alternatives(self) -> _Build:
        options = [self._sequence()]
        while self._accept("|"):
            options.append(self._sequence())
        if len(options) == 1:
            return options[0]

        def build(after: _Node) -> _Node:
            node = self.new_node()
            node.edges = [option(after) for option in options]
            return node

        return build

    def _sequence(self) -> _Build:
        parts: list[_Build] = []
        while self._peek() not in ("", "|", ")"):
            if self._accept("\\Q"):
                parts += [self._char(lambda char, one=one: char == one) for one in self._quoted()]  # type: ignore[misc]
            else:
                parts.append(self._repeated(self._atom()))

        def build(after: _Node) -> _Node:
            for part in reversed(parts):
                after = part(after)
            return after

        return build

    def _quoted(self) -> str:
        text, end, _ = self._text[self._at :].partition("\\E")
        self._at += len(text) + len(end)
        return text

    def _char(self, test: _Test) -> _Build:
        def build(after: _Node) -> _Node:
            node = self.new_node()
            node.test, node.next = test, after
            return node

        return build

    def _anchor(self, *, is_begin: bool) -> _Build:
        def build(after: _Node) -> _Node:
            node = self.new_node()
            node.is_begin, node.is_end, node.edges = is_begin, not is_begin, [after]
            return node

        return build

    def _atom(self) -> _Build:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._char(self._class())
        if char == ".":
            return self._char(lambda one: one != "\n")
        if char in "^$":
            return self._anchor(is_begin=char == "^")
        if char == "\\":
            return self._escaped()
        if char in "*+?":
            raise self._wrong("nothing to repeat")
        return self._char(lambda one: one == char)

    def _group(self) -> _Build:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._wrong("too many groups in each other")
        if self._accept("?"):
            if self._accept("P<") or (self._accept("<") and self._peek() not in ("=", "!")):
                while self._take() != ">":
                    pass
            elif not self._accept(":"):
                raise self._wrong("a group of a kind that is not supported")
        build = self._alternatives()
        if not self._accept(")"):
            raise self._wrong("no end of a group")
        self._depth -= 1
        return build

    def _escaped(self) -> _Build:
        char = self._take()
        if char in _CLASSES:
            return self._char(_CLASSES[char])
        if char in "Az":
            return self._anchor(is_begin=char == "A")
        wanted = self._literal(char)
        return self._char(lambda one: one == wanted)

    def _literal(self, char: str) -> str:
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isalnum():
            raise self._wrong(f"an escape that is not supported: {char}")
        return char

    def _class(self) -> _Test:
        is_negated = self._accept("^")
        tests: list[_Test] = []
        while self._peek() != "]" or not tests:
            tests.append(self._range())
        self._at += 1
        return lambda char: any(test(char) for test in tests) is not is_negated

    def _range(self) -> _Test:
        first = self._take()
        if first == "\\":
            first = self._take()
            if first in _CLASSES:
                return _CLASSES[first]
            first = self._literal(first)
        elif first == "[" and self._peek() == ":":
            raise self._wrong("a class with a name, which is not supported")
        last = first
        if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
            self._at += 1
            last = self._take()
            last = self._literal(self._take()) if last == "\\" else last
            if last < first:
                raise self._wrong("a range that ends before it begins")
        return lambda char: first <= char <= last

    # Repeating

    def _repeated(self, part: _Build) -> _Build:
        while True:
            bounds = self._bounds()
            if bounds is None:
                return part
            self._accept("?")  # a lazy one matches the same names
            part = self._repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(sign):
                return bounds
        if self._peek() != "{":
            return None
        inside, end, _ = self._text[self._at + 1 :].partition("}")
        least, comma, most = inside.partition(",")
        if not end or not (least.isdecimal() and least.isascii()) or not (not most or most.isdecimal()):
            return None  # as RE2: then it is a brace like any other character
        self._at += len(inside) + 2
        first, last = int(least), (int(most) if most else None) if comma else int(least)
        if max(first, last or 0) > _MAX_REPEAT or (last is not None and last < first):
            raise self._wrong("a repetition that cannot be")
        return first, last

    def _repeat(self, part: _Build, least: int, most: int | None) -> _Build:
        def build(after: _Node) -> _Node:
            if most is None:
                node = self.new_node()
                node.edges = [part(node), after]
                first = node
            else:
                first = after
                for _ in range(most - least):
                    node = self.new_node()
                    node.edges = [part(first), after]
                    first = node
            for _ in range(least):
                first = part(first)
            return first

        return build
