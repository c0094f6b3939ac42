"""Every metadata key and every object name is built and parsed here.

Metadata, below a root that keeps several installations in one store apart:

    {root}/storage/topics/{namespace}/{topic}/segments/{start:020}     descriptor of the object that begins there
    {root}/storage/topics/{namespace}/{topic}/segments/cur             the newest descriptor, a hint
    {root}/storage/topics/{namespace}/{topic}/state                    the sealed marker
    {root}/storage/topics/{namespace}/{topic}/owner                    who writes, and under which epoch
    {root}/storage/topics/{namespace}/{topic}/start                    the oldest offset that may be read
    {root}/storage/topics/{namespace}/{topic}/settings                 the topic's own settings
    {root}/storage/topics/{namespace}/{topic}/producers                what its producers have stored, a hint
    {root}/storage/topics/{namespace}/{topic}/subscriptions/{name}     a subscription's cursor
    {root}/storage/topics/{namespace}/{topic}/intake                   what was handed over and is to be taken in
    {root}/storage/topics/{namespace}/{topic}/replays/{name}           how far a replay into the topic is
    {root}/storage/topics/{namespace}/{topic}/replacements/state       how far a compaction is
    {root}/storage/topics/{namespace}/{topic}/replacements/{generation:020}/{start:020}   what it replaces there
    {root}/storage/epoch-floor                                         the highest epoch of a deleted topic
    {root}/storage/nodes/{node}/{session}                              the heartbeat of a node, one for each opening

Objects, below the URL of the store:

    storage/topics/{namespace}/{topic}/objects/data-{start}-{end}-e{epoch}.tlog     offsets start to end, both inclusive
    storage/topics/{namespace}/{topic}/intake/{consignment}/{partition:05}-{attempt}.tlog     staged rows
    storage/topics/{namespace}/{topic}/intake/{consignment}/manifest-{token}.json             which of them count
    storage/topics/{namespace}/{topic}/objects/data-{start}-{end}-e{epoch}-c{generation}.tlog     the same, compacted

An engine has a place of its own, which is no topic's: `storage/engine/{name}/` with the same metadata keys for its log
(`segments/`, `owner`, `start`, ...), `manifest`, and the objects

    storage/engine/{name}/objects/data-{start}-{end}-e{epoch}.tlog                  records of its log
    storage/engine/{name}/checkpoints/checkpoint-{seq}-{lsn}-e{epoch}.tckp          its state at a seq
    storage/engine/{name}/checkpoints/checkpoint-{seq}-{lsn}-e{epoch}-{digest}.tckp the same, of several files
    storage/engine/{name}/{packs,index,data,checkpoints}/...                        see `compacted_names`

Invariants
- Twenty digits hold every 64-bit offset, so descriptor keys are in the order of offsets; `cur` sorts behind them.
- Building and parsing are inverse: a name that was not built here parses to None, and there is one spelling for each.
- Parts are as narrow as topic names are (letters, digits, `.`, `_`, `-`, no dot in front): a name from outside can
  neither climb out of its place nor come to mean another key.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from tidelog.errors import InputError
from tidelog.tier.compacted_names import (
    CompactedId,
    DataFileId,
    StatePartId,
    checked_compacted,
    checked_state_part,
    data_name,
    parse_compacted,
    parse_data_name,
    parse_state_part,
)

DEFAULT_ROOT = "tidelog"
DEFAULT_ENGINE = "main"
CURRENT = "cur"
MAX_OFFSET = (1 << 64) - 1
MAX_PART_LENGTH = 200
# S3's limit is 1024 bytes together with the prefix of the store's URL.
MAX_KEY_LENGTH = 900

_TOPICS = "storage/topics"
_ENGINE = "storage/engine"
_NODES = "storage/nodes"
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
_DESCRIPTOR = re.compile(r"[0-9]{20}", re.ASCII)
_NUMBER = r"(0|[1-9][0-9]{0,19})"
_INTAKE = re.compile(r"([0-9a-f]{32}-(?:0|[1-9][0-9]{0,19}))/[^/]+", re.ASCII)
_OBJECT = re.compile(rf"data-{_NUMBER}-{_NUMBER}-e{_NUMBER}(?:-c([1-9][0-9]{{0,19}}))?\.tlog", re.ASCII)
_CHECKPOINT = re.compile(rf"checkpoint-{_NUMBER}-{_NUMBER}-e{_NUMBER}(?:-([0-9a-f]{{32}}))?\.tckp", re.ASCII)
_TOPIC_KEY = re.compile(rf"{_TOPICS}/([^/]+)/([^/]+)/(.+)", re.ASCII)


class TopicKey(NamedTuple):
    """A metadata key taken apart: whose it is, and what it is called there (`segments/cur`, `state`, ...)."""

    namespace: str
    topic: str
    rest: str


class ObjectId(NamedTuple):
    """The name of a data object. It says what is inside, so that a catalog can be made anew from the objects alone.

    `generation` is 0 for what an owner shipped. A compaction makes objects of a higher one, which no other has used.
    """

    start: int
    end: int
    epoch: int
    generation: int = 0

    def __str__(self) -> str:
        compacted = f"-c{self.generation}" if self.generation else ""
        return f"data-{self.start}-{self.end}-e{self.epoch}{compacted}.tlog"


class TopicKeys:
    """All keys and object names of one topic."""

    noun = "topic"
    """What it is that these keys belong to, for those who tell people about it."""

    sends_ahead = False
    """Whether an object may be there before the one in front of it is published."""

    def __init__(self, namespace: str, topic: str, root: str = DEFAULT_ROOT) -> None:
        for part in (root, namespace, topic):
            check_part(part)
        self._set_place(f"{_TOPICS}/{namespace}/{topic}/", root)

    def _set_place(self, place: str, root: str) -> None:
        self._root = root
        self._objects = f"{place}objects/"
        self._intake = f"{place}intake/"
        self._metadata = f"{root}/{place}"

    @property
    def metadata_prefix(self) -> str:
        """Everything that the metadata store knows about the topic begins with it."""
        return self._metadata

    @property
    def segments_prefix(self) -> str:
        """The descriptors and `cur`."""
        return self._metadata + "segments/"

    @property
    def subscriptions_prefix(self) -> str:
        return self._metadata + "subscriptions/"

    @property
    def objects_prefix(self) -> str:
        """Where the topic's data objects are."""
        return self._objects

    @property
    def current(self) -> str:
        return self.segments_prefix + CURRENT

    @property
    def state(self) -> str:
        return self._metadata + "state"

    @property
    def owner(self) -> str:
        return self._metadata + "owner"

    @property
    def start(self) -> str:
        return self._metadata + "start"

    @property
    def settings(self) -> str:
        return self._metadata + "settings"

    @property
    def producers(self) -> str:
        return self._metadata + "producers"

    @property
    def replacements_prefix(self) -> str:
        """What compactions write down."""
        return self._metadata + "replacements/"

    @property
    def replacement_state(self) -> str:
        return self.replacements_prefix + "state"

    def replacement(self, generation: int, start: int) -> str:
        """What a compaction replaces from an offset on."""
        return f"{self.replacements_prefix}{padded(generation)}/{padded(start)}"

    @property
    def replays_prefix(self) -> str:
        return self._metadata + "replays/"

    def replay(self, name: str) -> str:
        """How far a replay into the topic is, by the name of the replay."""
        return f"{self.replays_prefix}{check_part(name)}"

    @property
    def intake(self) -> str:
        """What was handed over to the topic, as one document."""
        return self._metadata + "intake"

    @property
    def intake_prefix(self) -> str:
        """Where what is handed over waits, in the object store."""
        return self._intake

    def consignment_prefix(self, consignment: str) -> str:
        """All objects of one consignment."""
        return f"{self._intake}{check_part(consignment)}/"

    def staged_part(self, consignment: str, partition: int, attempt: str) -> str:
        """Rows of one task; `attempt` is different whenever a task is tried again."""
        name = f"{_checked_number(partition, 'a partition'):05d}-{attempt}.tlog"
        return self.consignment_prefix(consignment) + check_part(name)

    def manifest(self, consignment: str, token: str) -> str:
        """The list of the parts that count."""
        return self.consignment_prefix(consignment) + check_part(f"manifest-{token}.json")

    def parse_staged(self, key: str) -> str | None:
        """The consignment that an object belongs to; None for any other key."""
        if not key.startswith(self._intake):
            return None
        match = _INTAKE.fullmatch(key.removeprefix(self._intake))
        return None if match is None else match[1]

    @property
    def epoch_floor(self) -> str:
        """One for all topics of an installation."""
        return f"{self._root}/storage/epoch-floor"

    def descriptor(self, start: int) -> str:
        """The key of the descriptor of the object that begins there."""
        return f"{self.segments_prefix}{_checked_number(start, 'an offset'):020d}"

    def parse_descriptor(self, key: str) -> int | None:
        """The start offset in a descriptor's key; None for any other key."""
        if not key.startswith(self.segments_prefix):
            return None
        return parse_padded(key.removeprefix(self.segments_prefix))

    def subscription(self, name: str) -> str:
        return self.subscriptions_prefix + check_part(name)

    def parse_subscription(self, key: str) -> str | None:
        """The name in a subscription's key; None for any other key."""
        if not key.startswith(self.subscriptions_prefix):
            return None
        name = key.removeprefix(self.subscriptions_prefix)
        return name if is_part(name) else None

    def object(self, name: ObjectId) -> str:
        """Where the object is, relative to the store's URL."""
        for number in name:
            _checked_number(number, "an offset or epoch")
        if name.start > name.end:
            raise InputError(f"an object cannot begin at {name.start} and end at {name.end}")
        return self._objects + str(name)

    def parse_object(self, key: str) -> ObjectId | None:
        """The id in an object's key; None for a key that we would not have built."""
        if not key.startswith(self._objects):
            return None
        return parse_object_id(key.removeprefix(self._objects))


class CheckpointId(NamedTuple):
    """The name of an engine's state in the store: at which seq, how far its log was shipped then, under which epoch.

    A state of several files has its digest in its name: it is written by somebody who does not own the engine, and must
    not come to be in the place of the owner's.
    """

    seq: int
    lsn: int
    epoch: int
    digest: str = ""

    def __str__(self) -> str:
        digest = f"-{self.digest}" if self.digest else ""
        return f"checkpoint-{self.seq}-{self.lsn}-e{self.epoch}{digest}.tckp"


class EngineKeys(TopicKeys):
    """All keys and object names of one engine: those of a log, and its own."""

    noun = "engine"
    sends_ahead = True

    def __init__(self, name: str = DEFAULT_ENGINE, root: str = DEFAULT_ROOT) -> None:
        for part in (root, name):
            check_part(part)
        self.name = name
        self._place = f"{_ENGINE}/{name}/"
        self._set_place(self._place, root)

    @property
    def engine_manifest(self) -> str:
        """What the engine says about itself, as one document."""
        return self._metadata + "manifest"

    @property
    def checkpoints_prefix(self) -> str:
        """Where its states are, in the object store."""
        return self._place + "checkpoints/"

    @property
    def data_prefix(self) -> str:
        """Where large bodies are, each a file."""
        return self._place + "data/"

    @property
    def packs_prefix(self) -> str:
        """Where packs of small bodies are."""
        return self._place + "packs/"

    @property
    def index_prefix(self) -> str:
        """Where the files of indexes are, and roots."""
        return self._place + "index/"

    def checkpoint(self, name: CheckpointId) -> str:
        """Where a state is, relative to the store's URL."""
        for number in (name.seq, name.lsn, name.epoch):
            _checked_number(number, "a seq, LSN or epoch")
        key = self.checkpoints_prefix + str(name)
        if self.parse_checkpoint(key) is None:
            raise InputError(f"{_shown(name)} is not the name of a state")
        return key

    def parse_checkpoint(self, key: str) -> CheckpointId | None:
        """What is in the name of a state; None for a key that we would not have built."""
        match = _CHECKPOINT.fullmatch(key.removeprefix(self.checkpoints_prefix))
        if match is None or not key.startswith(self.checkpoints_prefix):
            return None
        found = CheckpointId(int(match[1]), int(match[2]), int(match[3]), match[4] or "")
        return found if max(found[:3]) <= MAX_OFFSET else None

    def state_part(self, name: StatePartId) -> str:
        """Where one file of a state is."""
        return self.checkpoints_prefix + str(checked_state_part(name))

    def parse_state_part(self, key: str) -> StatePartId | None:
        """What is in the name of a file of a state; None for any other key."""
        prefix = self.checkpoints_prefix
        return parse_state_part(key.removeprefix(prefix)) if key.startswith(prefix) else None

    def compacted(self, name: CompactedId) -> str:
        """Where a pack, a file of an index or a root is."""
        return self._place + str(checked_compacted(name))

    def parse_compacted(self, key: str) -> CompactedId | None:
        """What is in the name of a pack, a file of an index or a root; None for any other key."""
        return parse_compacted(key.removeprefix(self._place)) if key.startswith(self._place) else None

    def data_file(self, bucket: str, key: str, seq: int) -> str | None:
        """Where a large body has its file; None when that would be too long for a key: then it goes into a pack."""
        name = data_name(bucket, key, seq)
        return None if name is None else self.data_file_named(name)

    def data_file_named(self, name: str) -> str | None:
        """The key of a file by its name below `data/`, as places have it; None when that is no name of ours."""
        key = self.data_prefix + name
        return None if parse_data_name(name) is None or len(key) > MAX_KEY_LENGTH else key

    def parse_data_file(self, key: str) -> DataFileId | None:
        """Whose body a file is; None for any other key."""
        return parse_data_name(key.removeprefix(self.data_prefix)) if key.startswith(self.data_prefix) else None


def consignment_name(app: str, version: int) -> str:
    """How the rows of one version of an application are called: the same from wherever they are written."""
    digest = hashlib.sha256(app.encode()).hexdigest()[:32]
    return f"{digest}-{_checked_number(version, 'a version')}"


def padded(offset: int) -> str:
    """An offset as it is in a descriptor's key and in `cur`."""
    return f"{_checked_number(offset, 'an offset'):020d}"


def parse_padded(text: str) -> int | None:
    """The offset in twenty digits; None for anything else."""
    if _DESCRIPTOR.fullmatch(text) is None:
        return None
    offset = int(text)
    return offset if offset <= MAX_OFFSET else None


def parse_object_id(name: str) -> ObjectId | None:
    """The numbers in the name of a data object; None for any other name."""
    match = _OBJECT.fullmatch(name)
    if match is None:
        return None
    found = ObjectId(*(int(number or 0) for number in match.groups()))
    return found if found.start <= found.end and max(found) <= MAX_OFFSET else None


def node_prefix(node: str, root: str = DEFAULT_ROOT) -> str:
    """The heartbeats of one node, in the metadata store."""
    return f"{check_part(root)}/{_NODES}/{check_part(node)}/"


def node_key(node: str, session: str, root: str = DEFAULT_ROOT) -> str:
    """The heartbeat of one opening of a node."""
    return node_prefix(node, root) + check_part(session)


def is_node_key(key: str) -> bool:
    """Whether this is the key of a heartbeat, of whatever installation."""
    return len(parts := key.split("/")) == 5 and "/".join(parts[1:3]) == _NODES


def topics_prefix(root: str = DEFAULT_ROOT) -> str:
    """All topics of an installation, in the metadata store."""
    return f"{check_part(root)}/{_TOPICS}/"


def parse_topic_key(key: str, root: str = DEFAULT_ROOT) -> TopicKey | None:
    """Whose metadata key this is; None for a key that belongs to no topic of this installation."""
    if not key.startswith(f"{root}/"):
        return None
    match = _TOPIC_KEY.fullmatch(key.removeprefix(f"{root}/"))
    if match is None or not (is_part(match[1]) and is_part(match[2])):
        return None
    return TopicKey(match[1], match[2], match[3])


def is_part(text: str) -> bool:
    """Whether this can stand between two slashes of a key."""
    return len(text) <= MAX_PART_LENGTH and _PART.fullmatch(text) is not None


def check_part(text: str) -> str:
    """The same text, or InputError."""
    if not is_part(text):
        raise InputError(
            f"{_shown(text)} cannot be part of a key",
            hint=f"Use 1 to {MAX_PART_LENGTH} of the characters A-Z a-z 0-9 . _ - and no dot in front",
        )
    return text


def is_key(text: str) -> bool:
    """Whether this is a key: parts with single slashes between them."""
    return len(text) <= MAX_KEY_LENGTH and all(map(is_part, text.split("/")))


def check_key(key: str) -> str:
    """The same key, or InputError."""
    if not is_key(key):
        raise InputError(
            f"{_shown(key)} is not a key",
            hint=f"A key has at most {MAX_KEY_LENGTH} characters: parts of A-Z a-z 0-9 . _ - with slashes between them",
        )
    return key


def check_prefix(prefix: str) -> str:
    """The same prefix, or InputError: empty, or a key with a slash behind it. (Stores list whole parts only.)"""
    if prefix == "":
        return prefix
    if not prefix.endswith("/"):
        raise InputError(f"{_shown(prefix)} is not a prefix", hint="A prefix ends with a slash")
    check_key(prefix[:-1])
    return prefix


def _checked_number(number: int, what: str) -> int:
    if not 0 <= number <= MAX_OFFSET:
        raise InputError(f"{_shown(number)} is not {what}")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
