"""A log directory: the topics in it, made, opened once each, listed and deleted.

    <root>/tidelog.json            what this directory is, remembered from its first opening
    <root>/.lock                   held by the owner
    <root>/<namespace>/<name>/     one topic: topic.json and the files of its log
    <root>/.deleted/               topics on their way out

Invariants
- A topic exists when its `topic.json` does, or WAL files that lost theirs.
- A topic is opened once: all callers share one `Topic`, so there is never a second writer.
- Deleting is one rename, then a removal that can be finished later; a crash leaves all of a topic or none of it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TypeVar

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.errors import ClosedError, DataError, InputError, NotFoundError, TidelogError
from tidelog.files import Files, LocalFiles, Lock, explained
from tidelog.log import Log, LogSettings, stopping
from tidelog.log.names import wal_files
from tidelog.log.view import LogView
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import TopicName, is_name_part, parse_topic_name
from tidelog.topics.topic import Topic

_logger = logging.getLogger("tidelog.topics")
_DIRECTORY_FILE = "tidelog.json"
_TOPIC_FILE = "topic.json"
_LOCK_FILE = ".lock"
_DELETED = ".deleted"
_FORMAT = 1


class _DirectoryInfo(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    created_us: int


class _TopicInfo(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    name: str
    created_us: int


_Info = TypeVar("_Info", _DirectoryInfo, _TopicInfo)


class LogDirectory:
    """An open log directory; `tidelog.open` makes one. Use it as a context manager or close it."""

    def __init__(
        self,
        root: Path,
        settings: LogSettings | None = None,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        read_only: bool = False,
    ) -> None:
        self.root = root
        self.read_only = read_only
        self._settings = settings or LogSettings()
        self._files = files or LocalFiles()
        self._clock = clock or SystemClock()
        self._guard = RLock()
        self._topics: dict[TopicName, Topic] = {}
        self._logs: dict[TopicName, Log | LogView] = {}
        self._lock: Lock | None = None
        self._closed = False
        if read_only:
            self._look()
        else:
            self._take()

    def _look(self) -> None:
        if not self._files.is_directory(self.root):
            raise NotFoundError(
                "there is no log directory", path=self.root, hint="Open it without read_only to make it"
            )
        info = self._read_info(self.root / _DIRECTORY_FILE, _DirectoryInfo)
        if info is None:
            raise NotFoundError(
                f"this is not a log directory: there is no {_DIRECTORY_FILE} in it",
                path=self.root,
                hint="Check the path; opening it without read_only makes it one",
            )
        _check_format(info, self.root)

    def _take(self) -> None:
        with explained("open", self.root):
            self._files.make_directories(self.root)
            self._lock = self._files.lock(self.root / _LOCK_FILE)
            try:
                self._introduce()
                self._finish_deletions()
            except BaseException:
                self._lock.release()
                raise
        stopping.closes_at_exit(self)

    def _introduce(self) -> None:
        """Finds out what this directory is, or writes it down the first time."""
        info = self._read_info(self.root / _DIRECTORY_FILE, _DirectoryInfo)
        _check_format(info, self.root)
        if info is None:
            made = _DirectoryInfo(format=_FORMAT, created_us=self._clock.now_us())
            self._files.write_atomically(self.root / _DIRECTORY_FILE, _pretty(made))

    # Topics

    def topic(self, name: str) -> Topic:
        """The topic of this name, always the same object while the directory is open.

        It is made when absent; a directory that is open for reading only raises NotFoundError instead.
        """
        parsed = parse_topic_name(name)
        with self._guard, explained(f"topic {name}", self.root):
            self._check_open()
            if parsed not in self._topics:
                self._logs[parsed] = self._open_view(parsed) if self.read_only else self._open_log(parsed)
                self._topics[parsed] = Topic(parsed, self._logs[parsed], self._clock)
            return self._topics[parsed]

    def has_topic(self, name: str) -> bool:
        """Whether the topic exists."""
        return self._is_topic(parse_topic_name(name))

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        self._check_open()
        found = []
        for namespace in self._folders(self.root):
            for name in self._folders(self.root / namespace):
                topic = TopicName(namespace, name)
                if self._is_topic(topic):
                    found.append(str(topic))
        return sorted(found)

    def topic_directory(self, name: str) -> Path:
        """Where the files of an existing topic are."""
        parsed = parse_topic_name(name)
        self._require(parsed)
        return parsed.directory(self.root)

    def delete_topic(self, name: str) -> None:
        """Removes a topic and everything in it, for good. Its open readers end."""
        parsed = parse_topic_name(name)
        with self._guard, explained(f"delete topic {name}", self.root):
            self._check_writable()
            self._require(parsed)
            self._topics.pop(parsed, None)
            log = self._logs.pop(parsed, None)
            if log is not None:
                _close_quietly(log)
            if isinstance(log, Log):
                log.forget()
            self._delete_directory(parsed)

    def _open_log(self, name: TopicName) -> Log:
        directory = name.directory(self.root)
        if self._read_info(directory / _TOPIC_FILE, _TopicInfo) is None:
            self._files.make_directories(directory)
            info = _TopicInfo(format=_FORMAT, name=str(name), created_us=self._clock.now_us())
            self._files.write_atomically(directory / _TOPIC_FILE, _pretty(info))
        return Log.open(directory, self._settings, files=self._files, clock=self._clock, time_field=TIMESTAMP_FIELD)

    def _open_view(self, name: TopicName) -> LogView:
        self._require(name)
        directory = name.directory(self.root)
        return LogView(directory, self._settings, files=self._files, clock=self._clock, time_field=TIMESTAMP_FIELD)

    def _is_topic(self, name: TopicName) -> bool:
        """Messages without a `topic.json` are a topic too: it was lost, and is written again when it is opened."""
        directory = name.directory(self.root)
        if not self._files.is_directory(directory):
            return False
        names = self._files.list(directory)
        return _TOPIC_FILE in names or bool(wal_files(names))

    def _require(self, name: TopicName) -> None:
        if not self._is_topic(name):
            raise NotFoundError(f"there is no topic {name}", path=self.root, hint="`tidelog topic list` shows them")

    def _folders(self, directory: Path) -> list[str]:
        names = self._files.list(directory)
        return [name for name in names if is_name_part(name) and self._files.is_directory(directory / name)]

    # Deleting

    def _delete_directory(self, name: TopicName) -> None:
        graveyard = self.root / _DELETED
        self._files.make_directories(graveyard)
        source = name.directory(self.root)
        self._files.rename(source, self._grave(graveyard))
        self._files.sync_directory(source.parent)
        self._files.sync_directory(graveyard)
        if not self._files.list(source.parent):
            self._files.remove_directory(source.parent)
        self._finish_deletions()

    def _grave(self, graveyard: Path) -> Path:
        """A free name; the topic's own two parts together may be longer than a file system allows."""
        number = self._clock.now_us()
        while self._files.exists(graveyard / str(number)):
            number += 1
        return graveyard / str(number)

    def _finish_deletions(self) -> None:
        graveyard = self.root / _DELETED
        if not self._files.is_directory(graveyard):
            return
        try:
            self._files.remove_tree(graveyard)
        except OSError as error:
            # What is in there is deleted already as far as anybody can see; it must not keep the others from opening.
            _logger.warning("%s: deleted topics could not be removed from the disk yet: %s", self.root, error)

    # Ending

    def close(self) -> None:
        """Flushes and closes every topic and gives the directory back. Closing twice is fine."""
        with self._guard:
            if self._closed:
                return
            errors = [error for log in self._logs.values() if (error := _close_quietly(log)) is not None]
            self._release_lock()
            self._closed = True  # last: who was interrupted in here can close again
            stopping.no_longer_open(self)
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """In a forked child: the parent goes on, this copy lets go of the lock it inherited."""
        self._guard = RLock()  # another thread of the parent may have held it
        self._closed = True
        if self._lock is not None:
            self._lock.abandon()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> LogDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LogDirectory {self.root}{' closed' if self._closed else ''}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the log directory is closed", path=self.root, hint="Open it again")

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise InputError("the log directory was opened with read_only=True", path=self.root)

    def _read_info(self, path: Path, kind: type[_Info]) -> _Info | None:
        """The content of one of our JSON files; None when it is not there."""
        try:
            data = self._files.read(path)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path.name} cannot be understood: {error}",
                path=path,
                hint="Put it back from a copy, or move it away: it is written anew, messages are elsewhere",
            ) from error


def _check_format(info: _DirectoryInfo | None, root: Path) -> None:
    if info is not None and info.format != _FORMAT:
        raise InputError(
            f"the log directory has format {info.format}, this tidelog knows format {_FORMAT}",
            path=root,
            hint="Use the tidelog that made it, or a newer one",
        )


def _pretty(info: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n"


def _close_quietly(log: Log | LogView) -> TidelogError | None:
    try:
        log.close()
    except TidelogError as error:
        return error
    return None
