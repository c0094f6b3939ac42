"""The options of the source, as text from Spark, turned into what they mean.

Names and meanings are those of Spark's Kafka source; case does not matter. An option that is not known is refused with
the nearest name: one that is misspelt must not be ignored. Settings of `tidelog.open` are options too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Literal, TypeVar

import msgspec

from tidelog.config import Settings
from tidelog.config.settings import settings_of
from tidelog.errors import InputError
from tidelog.pipeline.positions import Positions, parse_by_timestamp, parse_offsets, parse_timestamp
from tidelog.pipeline.root import Root, find_root
from tidelog.pipeline.schema import parse_columns
from tidelog.topics.names import parse_topic_name
from tidelog.units import parse_bytes, parse_seconds

MIB = 1 << 20
Parsed = TypeVar("Parsed")
DEFAULT_PARTITION_BYTES = 128 * MIB
_TRUTH_VALUES = {"true": True, "false": False}
_SUBSCRIPTIONS = ("subscribe", "subscribePattern", "assign")
_NAMES = (
    *("root", "path", "metadata", "config", *_SUBSCRIPTIONS, "columns", "includeHeaders", "failOnDataLoss"),
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"),
    *("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *("minPartitions", "maxRecordsPerPartition", "maxPartitionBytes", "maxRowsPerBatch"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger"),
)


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be read, and how. It can be pickled: tasks get it as it is."""

    root: Root
    topics: tuple[str, ...] | None
    pattern: str | None
    columns: tuple[str, ...] = ()
    include_headers: bool = False
    fail_on_data_loss: bool = True
    starting: Positions | None = None
    ending: Positions | None = None
    when_no_later_message: Literal["error", "latest"] = "error"
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    max_partition_bytes: int = DEFAULT_PARTITION_BYTES
    max_rows_per_batch: int = 16384
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_seconds: float = 900.0
    max_bytes_per_trigger: int | None = None


def parse_source_options(given: Mapping[str, str]) -> SourceOptions:
    """The options of a read; InputError names the one that is wrong and what would be right."""
    options = _SourceReader(given, _NAMES)
    topics, pattern = options.subscription()
    starting, ending = options.positions("starting"), options.positions("ending")
    _check_places({"starting": starting, "ending": ending}, topics, pattern)
    return SourceOptions(
        root=options.root(),
        topics=topics,
        pattern=pattern,
        columns=options.parsed("columns", parse_columns) or (),
        include_headers=options.truth("includeHeaders", False),
        fail_on_data_loss=options.truth("failOnDataLoss", True),
        starting=starting,
        ending=ending,
        when_no_later_message=options.strategy(),
        min_partitions=options.number("minPartitions"),
        max_records_per_partition=options.number("maxRecordsPerPartition"),
        max_partition_bytes=options.size("maxPartitionBytes") or DEFAULT_PARTITION_BYTES,
        max_rows_per_batch=options.number("maxRowsPerBatch") or 16384,
        max_offsets_per_trigger=options.number("maxOffsetsPerTrigger"),
        min_offsets_per_trigger=options.number("minOffsetsPerTrigger"),
        max_trigger_delay_seconds=options.seconds("maxTriggerDelay", 900.0),
        max_bytes_per_trigger=options.size("maxBytesPerTrigger"),
    )


class OptionReader:
    """Options by name, whatever their case; one that is neither among `names` nor a setting is refused."""

    def __init__(
        self, given: Mapping[str, str], names: Sequence[str], settings_type: type[Settings] = Settings
    ) -> None:
        settings = settings_of(settings_type)
        self._given = {name.lower(): str(value) for name, value in given.items()}
        known = {name.lower(): name for name in (*names, *settings)}
        for name in given:
            if name.lower() not in known:
                raise _unknown(name, list(known.values()))
        places = ("dir", "store", "metadata")
        self._settings = {name: self._given[name] for name in settings if name in self._given and name not in places}

    def text(self, name: str) -> str | None:
        return self._given.get(name.lower())

    def root(self) -> Root:
        return find_root(
            self.location("It is a log directory, or a store such as s3://bucket/prefix"),
            self.text("metadata"),
            **self.settings(),
        )

    def location(self, hint: str) -> str:
        """The one place that the options name; `hint` says what it may be."""
        places = [place for name in ("root", "path", "dir") if (place := self.text(name))]
        if len(set(places)) > 1:
            raise InputError(
                f"two places are given: {' and '.join(places)}", hint="Give the option root, or load(path)"
            )
        if not places:
            raise InputError("the option root is missing", hint=hint)
        return places[0]

    def settings(self) -> dict[str, str]:
        """Settings among the options, and the file that has others."""
        config = self.text("config")
        return self._settings if config is None else {**self._settings, "config": config}

    def parsed(self, name: str, parse: Callable[[str], Parsed]) -> Parsed | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text)
        except InputError as error:
            raise InputError(f"the option {name}: {error.message}", hint=error.hint) from error

    def truth(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in _TRUTH_VALUES:
            raise InputError(f"the option {name} is true or false, not {text!r}")
        return _TRUTH_VALUES[text.strip().lower()]

    def number(self, name: str) -> int | None:
        return self._positive(name, _whole_number, "a number of 1 or more")

    def count(self, name: str) -> int | None:
        """As `number`, from 0 on."""
        text = self.text(name)
        number = None if text is None else _whole_number(text.strip())
        if text is not None and number is None:
            raise InputError(f"the option {name} is a number of 0 or more, not {text!r}")
        return number

    def size(self, name: str) -> int | None:
        return self._positive(name, parse_bytes, "a number of bytes, such as 64MiB")

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        seconds = default if text is None else parse_seconds(_spark_duration(text))
        if seconds is None or seconds < 0:
            raise InputError(f"the option {name} is a time such as 30s or 15m, not {text!r}")
        return float(seconds)

    def _positive(self, name: str, parse: Callable[[str], int | float | None], what: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        number = parse(text.strip())
        if not isinstance(number, int) or number < 1:
            raise InputError(f"the option {name} is {what}, not {text!r}")
        return number


class _SourceReader(OptionReader):
    def subscription(self) -> tuple[tuple[str, ...] | None, str | None]:
        """The topics, or the pattern of their names."""
        named = [name for name in _SUBSCRIPTIONS if self.text(name) is not None]
        if len(named) != 1:
            problem = "none of them is given" if not named else f"{' and '.join(named)} are given"
            raise InputError(f"exactly one of {', '.join(_SUBSCRIPTIONS)} says what is read; {problem}")
        text = self.text(named[0]) or ""
        if named[0] == "subscribePattern":
            return None, _checked_pattern(text)
        topics = _assigned(text) if named[0] == "assign" else [name.strip() for name in text.split(",")]
        return _checked_topics([name for name in topics if name], named[0]), None

    def positions(self, end: Literal["starting", "ending"]) -> Positions | None:
        """What was given; a time for all wins over times for each, and those over offsets."""
        found = self.parsed(f"{end}Timestamp", parse_timestamp)
        found = found or self.parsed(f"{end}OffsetsByTimestamp", parse_by_timestamp)
        return found or self.parsed(f"{end}Offsets", parse_offsets)

    def strategy(self) -> Literal["error", "latest"]:
        text = (self.text("startingOffsetsByTimestampStrategy") or "error").lower()
        if text == "error":
            return "error"
        if text == "latest":
            return "latest"
        raise InputError(f"startingOffsetsByTimestampStrategy is error or latest, not {text}")


def _whole_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def _spark_duration(text: str) -> str:
    """Spark's users write `15 minutes` and `15m` alike."""
    plain = text.strip().lower().replace(" ", "")
    for word, unit in (("milliseconds", "ms"), ("seconds", "s"), ("minutes", "m"), ("hours", "h"), ("days", "d")):
        plain = plain.replace(word, unit).replace(word[:-1], unit)
    return plain.replace("min", "m")


def _checked_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise InputError(f"subscribePattern is not a regular expression: {error}") from error
    return text


def _assigned(text: str) -> list[str]:
    """Kafka's `{"topic": [0]}`; the partitions of a topic are the one numbered 0."""
    try:
        found = msgspec.json.decode(text, type=dict[str, list[int]])
    except msgspec.MsgspecError as error:
        raise InputError(f'assign is JSON such as {{"shop/orders": [0]}}: {error}') from error
    wrong = next((topic for topic, partitions in found.items() if partitions != [0]), None)
    if wrong is not None:
        raise InputError(f"assign names partitions {found[wrong]} of {wrong}: a topic has the partition 0 alone")
    return list(found)


def _checked_topics(names: list[str], option: str) -> tuple[str, ...]:
    if not names:
        raise InputError(f"the option {option} names no topic")
    return tuple(dict.fromkeys(str(parse_topic_name(name)) for name in names))


def _check_places(given: Mapping[str, Positions | None], topics: tuple[str, ...] | None, pattern: str | None) -> None:
    """A place for a topic that is not read is a slip in its name; ignored, the one that is meant is read whole."""
    for end, positions in given.items():
        for topic in () if positions is None else (*positions.offsets, *positions.times_us):
            is_read = topic in topics if topics is not None else re.fullmatch(pattern or "", topic) is not None
            if not is_read:
                read = f"what matches {pattern}" if topics is None else ", ".join(topics)
                raise InputError(f"a {end} place is given for {topic}, which is not read", hint=f"Read is {read}")


def _unknown(name: str, known: list[str]) -> InputError:
    if name.lower().startswith("kafka."):
        return InputError(
            f"{name} is an option of Kafka's clients", hint="Leave it out; root says where the topics are"
        )
    near = get_close_matches(name, known, n=1)
    return InputError(f"there is no option {name}", hint=f"Did you mean {near[0]}?" if near else None)
