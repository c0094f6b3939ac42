"""Builds and parses every metadata key and every object name.

Metadata, below a root that keeps several installations in one store apart:

    {root}/storage/topics/{namespace}/{topic}/segments/{start:020}     descriptor of the object that begins there
    {root}/storage/topics/{namespace}/{topic}/segments/cur             the newest descriptor, a hint
    {root}/storage/topics/{namespace}/{topic}/state                    the sealed marker
    {root}/storage/topics/{namespace}/{topic}/owner                    who writes, and under which epoch
    {root}/storage/topics/{namespace}/{topic}/start                    the oldest offset that may be read
    {root}/storage/topics/{namespace}/{topic}/settings                 the topic's own settings
    {root}/storage/topics/{namespace}/{topic}/partitions               how many partitions it has, if it has some
    {root}/storage/topics/{namespace}/{topic}/producers                what its producers have stored, a hint
    {root}/storage/topics/{namespace}/{topic}/producers-kafka          the same of those of Kafka's protocol
    {root}/storage/topics/{namespace}/{topic}/subscriptions/{name}     a subscription's cursor
    {root}/storage/topics/{namespace}/{topic}/subscriptions/_groups/{group}     a consumer group's, its name escaped
    {root}/storage/topics/{namespace}/{topic}/staging                  the staging document: commits to be ingested
    {root}/storage/topics/{namespace}/{topic}/replays/{name}           progress of a replay into the topic
    {root}/storage/topics/{namespace}/{topic}/replacements/state       progress of a rewrite
    {root}/storage/topics/{namespace}/{topic}/replacements/{generation:020}/{start:020}   what it replaces there
    {root}/storage/epoch-floor                                         the highest epoch of a deleted topic
    {root}/storage/store                                               whose catalog this is: the id of the store
    {root}/storage/nodes/{node}/{session}                              the heartbeat of a node, one for each opening
    {root}/storage/flushes/{node}/{session}/{generation:010}/{number:020}    a flush of a node (`cold/flush_log.py`)
    {root}/storage/groups/{node}/{group}                               the members of a consumer group, its name escaped
    {root}/storage/transactions/{transactional id}                     a Kafka producer's transaction, and who it is
    {root}/storage/producer-ids                                        the next id of a Kafka producer
    {root}/storage/pipelines/{name}                                    who runs a declared pipeline, and how far it is

Of a cluster of nodes, what every node watches, and beside it what only some read:

    {root}/cluster/nodes/{node}                a node that is alive: its addresses, zone and version, under its lease
    {root}/cluster/node-ids/{node}             the number by which Kafka's clients know it, for ever
    {root}/cluster/node-numbers/{number}       that the number is given
    {root}/cluster/leader                      which node runs the load manager, under its lease
    {root}/cluster/topics/{namespace}/{topic}  which node serves each partition
    {root}/cluster/engines/{name}              which node serves an engine
    {root}/cluster/coordinators                which node coordinates the groups and transactions of each slot
    {root}/cluster/settings                    how the load manager decides
    {root}/cluster/requests/{id}               what an operator asked for: the leader carries it out
    {root}/cluster-loads/{node}                what a node has to do at present, under its lease
    {root}/cluster-tails/{node}                what is only on the disk of a node; it stays when the node dies
    {root}/cluster-decisions/{time_us:020}     what the leader has decided, and why

Objects, below the URL of the store:

    storage/store.json                                                              the id of the store
    storage/pipelines/{name}/runs/{run}/{report}.json                               reports of a declared pipeline
    storage/flushes/{node}/{session}/{generation:010}/{number:020}-{token}.tflush   messages of many topics
    storage/topics/{namespace}/{topic}/objects/data-{start}-{end}-e{epoch}.tlog     offsets start to end, both inclusive
    storage/topics/{namespace}/{topic}/staging/{staged_commit}/{partition:05}-{attempt}.tlog    staged rows
    storage/topics/{namespace}/{topic}/staging/{staged_commit}/manifest-{token}.json            which of them count
    storage/topics/{namespace}/{topic}/objects/data-{start}-{end}-e{epoch}-c{generation}.tlog     the same, compacted

An engine has a prefix of its own, which is no topic's: `storage/engine/{name}/` with the same metadata keys for its log
(`segments/`, `owner`, `start`, ...), `manifest`, and the objects

    storage/engine/{name}/objects/data-{start}-{end}-e{epoch}.tlog                  records of its log
    storage/engine/{name}/checkpoints/checkpoint-{seq}-{lsn}-e{epoch}.tckp          its state at a seq
    storage/engine/{name}/checkpoints/checkpoint-{seq}-{lsn}-e{epoch}-{digest}.tckp the same, of several files
    storage/engine/{name}/{blobs,index,data,checkpoints}/...                        compacted data, see below

Invariants
- Twenty digits hold every 64-bit offset, so descriptor keys sort in the order of offsets; `cur` sorts after them.
- Building and parsing are inverse: a name that was not built here parses to None, and each name has one spelling.
- Parts are restricted as topic names are (letters, digits, `.`, `_`, `-`, no leading dot): a name from outside can
  neither escape its prefix nor alias another key.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, Literal, NamedTuple, get_args

from tidelog.codec import MAX_OFFSET
from tidelog.errors import InputError

# The names of compacted data files, below the prefix of their engine.
#
#     data/{bucket}/{key}/v{seq:010}.dat                  one large value; bucket and key are escaped
#     blobs/blob-{generation:010}-{digest}.tblb           small values, many in one
#     index/versions-{generation:010}-{digest}.trow       the version index: rows by key of the tree
#     index/values-{generation:010}-{digest}.trow         the value index: rows by position in the log
#     index/root-{generation:010}-{digest}.json           what a compaction consists of
#     checkpoints/part-{seq}-{lsn}-{digest}.trow          rows of a state that has several files
#
# Escaped: A-Z a-z 0-9 `-` and `.` stay, except for a leading dot; any other byte of the UTF-8 is `_` and two hex
# digits.
#
# Invariants
# - `digest` is BLAKE2b of the whole file, 16 bytes in hex: the same bytes have the same name, and a file that was begun
#   twice is the same file.
# - Building and parsing are inverse: a name that was not built here parses to None, and each name has one spelling.
# - No name has more characters than a store accepts: a value whose name would be longer has no file (None).


MAX_ESCAPED_LENGTH: Final = 200
DIGEST_BYTES: Final = 16
_MAX_NUMBER = (1 << 64) - 1

FileKind = Literal["blob", "versions", "values", "root"]
_FOLDERS: Final = {"blob": "blobs", "versions": "index", "values": "index", "root": "index"}
_ENDINGS: Final = {"blob": "tblb", "versions": "trow", "values": "trow", "root": "json"}
_DIGEST = r"([0-9a-f]{32})"
_NUMBER = r"(0|[1-9][0-9]{0,19})"
_PADDED = r"([0-9]{10}|[1-9][0-9]{10,19})"
_FILE = re.compile(rf"(blobs|index)/(blob|versions|values|root)-{_PADDED}-{_DIGEST}\.(tblb|trow|json)", re.ASCII)
_DATA_FILE_PART = re.compile(rf"part-{_NUMBER}-{_NUMBER}-{_DIGEST}\.trow", re.ASCII)
_DATA = re.compile(rf"([^/]+)/([^/]+)/v{_PADDED}\.dat", re.ASCII)
_OTHER_BYTES = re.compile(rb"[^A-Za-z0-9.-]")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9-]|_[0-9a-f]{2})(?:[A-Za-z0-9.-]|_[0-9a-f]{2})*", re.ASCII)
_ESCAPE = re.compile(rb"_([0-9a-f]{2})")


class CompactedId(NamedTuple):
    """The name of a blob file, of a file of an index, or of a root."""

    kind: FileKind
    generation: int
    digest: str

    def __str__(self) -> str:
        return f"{_FOLDERS[self.kind]}/{self.kind}-{self.generation:010d}-{self.digest}.{_ENDINGS[self.kind]}"


class StatePartId(NamedTuple):
    """The name of one file of a state."""

    seq: int
    lsn: int
    digest: str

    def __str__(self) -> str:
        return f"part-{self.seq}-{self.lsn}-{self.digest}.trow"


class DataFileId(NamedTuple):
    """Whose value a data file is: that of the entry which wrote it."""

    bucket: str
    key: str
    seq: int


def digest_of(data: bytes | memoryview) -> str:
    """What a file with these bytes has in its name."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def checked_compacted(name: CompactedId) -> CompactedId:
    """The same, or InputError."""
    if name.kind not in get_args(FileKind) or parse_compacted(str(name)) != name:
        raise InputError(f"{name!r} is not the name of a file of a compaction")
    return name


def parse_compacted(name: str) -> CompactedId | None:
    """The parts of a name below the engine's prefix; None for any other."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    kind: FileKind = match[2]  # type: ignore[assignment]  # the pattern knows no others
    found = CompactedId(kind, int(match[3]), match[4])
    return found if str(found) == name and 1 <= found.generation <= _MAX_NUMBER else None


def checked_state_part(name: StatePartId) -> StatePartId:
    """The same, or InputError."""
    if parse_state_part(str(name)) != name:
        raise InputError(f"{name!r} is not the name of a file of a state")
    return name


def parse_state_part(name: str) -> StatePartId | None:
    """The parts of a name below `checkpoints/`; None for any other."""
    match = _DATA_FILE_PART.fullmatch(name)
    if match is None:
        return None
    found = StatePartId(int(match[1]), int(match[2]), match[3])
    return found if max(found.seq, found.lsn) <= _MAX_NUMBER else None


def data_name(bucket: str, key: str, seq: int) -> str | None:
    """The name of a value's file below `data/`; None when it would be too long for one."""
    if not bucket or not key or not 0 <= seq <= _MAX_NUMBER:
        raise InputError(f"version {seq} of {bucket!r}/{key!r} cannot be named as a file")
    escaped = escape(bucket), escape(key)
    if max(map(len, escaped)) > MAX_ESCAPED_LENGTH:
        return None
    return f"{escaped[0]}/{escaped[1]}/v{seq:010d}.dat"


def parse_data_name(name: str) -> DataFileId | None:
    """Whose value it is; None for a name that we would not have built."""
    match = _DATA.fullmatch(name)
    if match is None:
        return None
    bucket, key, seq = _unescaped(match[1]), _unescaped(match[2]), int(match[3])
    if bucket is None or key is None or seq > _MAX_NUMBER:
        return None
    found = DataFileId(bucket, key, seq)
    return found if data_name(*found) == name else None


def escape(text: str) -> str:
    """A name as one part of a key."""
    escaped = _OTHER_BYTES.sub(lambda match: b"_%02x" % match[0][0], text.encode()).decode("ascii")
    return "_2e" + escaped[1:] if escaped.startswith(".") else escaped


def _unescaped(text: str) -> str | None:
    if _ESCAPED.fullmatch(text) is None:
        return None
    try:
        return _ESCAPE.sub(lambda match: bytes((int(match[1], 16),)), text.encode("ascii")).decode()
    except UnicodeDecodeError:
        return None


DEFAULT_ROOT = "tidelog"
DEFAULT_ENGINE = "main"
STORE_ID = "storage/store.json"
"""The object with the id of the store (`binding.py`)."""
CURRENT = "cur"
GROUPS = "_groups"
"""Below the subscriptions, so that one listing has the cursors of both. No subscription has this name."""
# The largest number that a name may have in it: a seq, an epoch, a version; offsets are bounded by `codec.MAX_OFFSET`.
MAX_NUMBER = (1 << 64) - 1
MAX_PART_LENGTH = 200
# S3's limit is 1024 bytes together with the prefix of the store's URL.
MAX_KEY_LENGTH = 900

_TOPICS = "storage/topics"
_ENGINE = "storage/engine"
_NODES = "storage/nodes"
_FLUSHES = "storage/flushes"
_TRANSACTIONS = "storage/transactions"
_MEMBERS = "storage/groups"
_PIPELINES = "storage/pipelines"
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
_KEY = re.compile(rf"{_PART.pattern}(?:/{_PART.pattern})*", re.ASCII)
_DESCRIPTOR = re.compile(r"[0-9]{20}", re.ASCII)
_STAGED = re.compile(r"([0-9a-f]{32}-(?:0|[1-9][0-9]{0,19}))/[^/]+", re.ASCII)
_OBJECT = re.compile(rf"data-{_NUMBER}-{_NUMBER}-e{_NUMBER}(?:-c([1-9][0-9]{{0,19}}))?\.tlog", re.ASCII)
_CHECKPOINT = re.compile(rf"checkpoint-{_NUMBER}-{_NUMBER}-e{_NUMBER}-([0-9a-f]{{32}})\.tckp", re.ASCII)
_TOPIC_KEY = re.compile(rf"{_TOPICS}/([^/]+)/([^/]+)/(.+)", re.ASCII)
PARTITION_SUFFIX = "-part-"
_PARTITION = re.compile(rf"([^/]+/{_TOPICS}/[^/]+/[^/]+){PARTITION_SUFFIX}(0|[1-9][0-9]{{0,4}})/", re.ASCII)
_OWNED = re.compile(rf"([^/]+/(?:{_TOPICS}/[^/]+|{_ENGINE})/[^/]+/)(.*)", re.ASCII)


class TopicKey(NamedTuple):
    """A metadata key taken apart: whose it is, and what it is called there (`segments/cur`, `state`, ...)."""

    namespace: str
    topic: str
    rest: str


class OwnedKey(NamedTuple):
    """A metadata key, or a prefix of some, of a topic or an engine: its owner's document, and what it is called
    there."""

    prefix: str
    rest: str

    @property
    def key(self) -> str:
        return self.prefix + self.rest

    @property
    def owner(self) -> str:
        return self.prefix + "owner"

    @property
    def heads(self) -> tuple[str, str]:
        """The documents that make it something: its owner's, and that of a topic with partitions."""
        return self.owner, self.prefix + "partitions"

    @property
    def is_head(self) -> bool:
        return self.key in self.heads

    @property
    def layout(self) -> OwnedKey | None:
        """Where the number of partitions is, if this belongs to a partition of a topic, by its name."""
        match = _PARTITION.fullmatch(self.prefix)
        return None if match is None else OwnedKey(f"{match[1]}/", "partitions")


class ObjectId(NamedTuple):
    """The name of a data object. It says what is inside, so that a catalog can be rebuilt from the objects alone.

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
    """What these keys belong to, for messages to people."""
    rebuilt_by = "`tidelog topic rebuild-catalog` rebuilds it from the objects"
    """What to do when the metadata is lost."""

    sends_ahead = False
    """Whether an object may be there before the one in front of it is published."""

    def __init__(self, namespace: str, topic: str, root: str = DEFAULT_ROOT) -> None:
        for part in (root, namespace, topic):
            check_part(part)
        self.subject = f"{namespace}/{topic}"
        """The name of what the keys belong to."""
        self._set_place(f"{_TOPICS}/{namespace}/{topic}/", root)

    def _set_place(self, place: str, root: str) -> None:
        self.root = root
        """Keeps installations in one metadata store apart."""
        self.metadata_prefix = f"{root}/{place}"
        """Everything that the metadata store knows about the topic begins with it."""
        self.objects_prefix = f"{place}objects/"
        """Where the topic's data objects are."""
        self.staging_prefix = f"{place}staging/"
        """Where staged rows are, in the object store."""
        self.segments_prefix = self.metadata_prefix + "segments/"
        """The descriptors and `cur`."""
        self.subscriptions_prefix = self.metadata_prefix + "subscriptions/"
        self.groups_prefix = f"{self.subscriptions_prefix}{GROUPS}/"
        self.rewrites_prefix = self.metadata_prefix + "replacements/"
        """The progress of compactions."""
        self.replays_prefix = self.metadata_prefix + "replays/"
        self.current = self.segments_prefix + CURRENT
        self.state = self.metadata_prefix + "state"
        self.owner = self.metadata_prefix + "owner"
        self.start = self.metadata_prefix + "start"
        self.settings = self.metadata_prefix + "settings"
        self.partitions = self.metadata_prefix + "partitions"
        self.producers = self.metadata_prefix + "producers"
        self.epochs = self.metadata_prefix + "epochs"
        self.kafka_producers = self.metadata_prefix + "producers-kafka"
        self.staging = self.metadata_prefix + "staging"
        """The staging document of the topic."""
        self.writes = self.metadata_prefix + "writes"
        """Writes over several partitions of the topic."""
        self.rewrite_state = self.rewrites_prefix + "state"
        self.epoch_floor = f"{root}/storage/epoch-floor"
        """One for all topics of an installation."""

    def replacement(self, generation: int, start: int) -> str:
        """What a compaction replaces from an offset on."""
        return f"{self.rewrites_prefix}{padded(generation)}/{padded(start)}"

    def replay(self, name: str) -> str:
        """How far a replay into the topic is, by the name of the replay."""
        return f"{self.replays_prefix}{check_part(name)}"

    def staged_commit_prefix(self, staged_commit: str) -> str:
        return f"{self.staging_prefix}{check_part(staged_commit)}/"

    def staged_part(self, staged_commit: str, partition: int, attempt: str) -> str:
        """Rows of one task; `attempt` is different whenever a task is tried again."""
        name = f"{_checked_number(partition, 'a partition'):05d}-{attempt}.tlog"
        return self.staged_commit_prefix(staged_commit) + check_part(name)

    def manifest(self, staged_commit: str, token: str) -> str:
        return self.staged_commit_prefix(staged_commit) + check_part(f"manifest-{token}.json")

    def parse_staged(self, key: str) -> str | None:
        """The staged commit that an object belongs to; None for any other key."""
        if not key.startswith(self.staging_prefix):
            return None
        match = _STAGED.fullmatch(key.removeprefix(self.staging_prefix))
        return None if match is None else match[1]

    def descriptor(self, start: int) -> str:
        """The key of the descriptor of the object that begins there."""
        return f"{self.segments_prefix}{_checked_number(start, 'an offset'):020d}"

    def parse_descriptor(self, key: str) -> int | None:
        """The start offset in a descriptor's key; None for any other key."""
        if not key.startswith(self.segments_prefix):
            return None
        return parse_padded(key.removeprefix(self.segments_prefix))

    def subscription(self, name: str) -> str:
        """The key of a cursor: a subscription's by its name, a consumer group's by its `group_cursor`."""
        if not is_subscription(name) and group_of_cursor(name) is None:
            check_part(name)
            raise InputError(f"{name} cannot be the name of a subscription", hint="Take another name")
        return self.subscriptions_prefix + name

    def parse_subscription(self, key: str) -> str | None:
        """The name in a subscription's key; None for any other key."""
        if not key.startswith(self.subscriptions_prefix):
            return None
        name = key.removeprefix(self.subscriptions_prefix)
        return name if is_subscription(name) else None

    def parse_cursor(self, key: str) -> str | None:
        """What `subscription` made the key from: a name or a `group_cursor`; None for any other key."""
        if not key.startswith(self.subscriptions_prefix):
            return None
        name = key.removeprefix(self.subscriptions_prefix)
        return name if is_subscription(name) or group_of_cursor(name) is not None else None

    def parse_group(self, key: str) -> str | None:
        """The consumer group whose cursor has this key; None for any other key."""
        return group_of_cursor(key.removeprefix(self.subscriptions_prefix))

    def object(self, name: ObjectId) -> str:
        """Where the object is, relative to the store's URL."""
        for number in name:
            _checked_number(number, "an offset or epoch")
        if name.start > name.end:
            raise InputError(f"an object cannot begin at {name.start} and end at {name.end}")
        return self.objects_prefix + str(name)

    def parse_object(self, key: str) -> ObjectId | None:
        """The id in an object's key; None for a key that we would not have built."""
        if not key.startswith(self.objects_prefix):
            return None
        return parse_object_id(key.removeprefix(self.objects_prefix))


class CheckpointId(NamedTuple):
    """The name of an engine's snapshot: its seq, how far its log was shipped then, the epoch, the digest of its bytes.

    A process that does not own the engine may write one: the digest keeps it apart from the owner's.
    """

    seq: int
    lsn: int
    epoch: int
    digest: str = ""

    def __str__(self) -> str:
        return f"checkpoint-{self.seq}-{self.lsn}-e{self.epoch}-{self.digest}.tckp"


class EngineKeys(TopicKeys):
    """All keys and object names of one engine: those of a log, and its own."""

    noun = "engine"
    rebuilt_by = "`tidelog engine rebuild-manifest` rebuilds it from the copy in the store"
    sends_ahead = True

    def __init__(self, name: str = DEFAULT_ENGINE, root: str = DEFAULT_ROOT) -> None:
        for part in (root, name):
            check_part(part)
        self.subject = self.name = name
        self._place = f"{_ENGINE}/{name}/"
        self._set_place(self._place, root)
        self.engine_manifest = self.metadata_prefix + "manifest"
        """The manifest of the engine, as one document."""
        self.checkpoints_prefix = self._place + "checkpoints/"
        """Where its snapshots are, in the object store."""
        self.data_prefix = self._place + "data/"
        """Where large values of a compaction are, each a file."""
        self.values_prefix = self._place + "values/"
        """Where value files are: values that never were in the log."""
        self.blobs_prefix = self._place + "blobs/"
        """Where blob files are."""
        self.index_prefix = self._place + "index/"
        """Where sorted indexes and roots are."""

    def checkpoint(self, name: CheckpointId) -> str:
        """Where a state is, relative to the store's URL."""
        for number in (name.seq, name.lsn, name.epoch):
            _checked_number(number, "a seq, LSN or epoch")
        key = self.checkpoints_prefix + str(name)
        if self.parse_checkpoint(key) is None:
            raise InputError(f"{_shown(name)} is not the name of a state")
        return key

    def parse_checkpoint(self, key: str) -> CheckpointId | None:
        """Parses the name of a state; None for a key that tidelog would not have built."""
        match = _CHECKPOINT.fullmatch(key.removeprefix(self.checkpoints_prefix))
        if match is None or not key.startswith(self.checkpoints_prefix):
            return None
        found = CheckpointId(int(match[1]), int(match[2]), int(match[3]), match[4])
        return found if max(found[:3]) <= MAX_NUMBER else None

    def state_part(self, name: StatePartId) -> str:
        return self.checkpoints_prefix + str(checked_state_part(name))

    def parse_state_part(self, key: str) -> StatePartId | None:
        """What is in the name of a file of a state; None for any other key."""
        prefix = self.checkpoints_prefix
        return parse_state_part(key.removeprefix(prefix)) if key.startswith(prefix) else None

    def compacted(self, name: CompactedId) -> str:
        """Where a blob file, a file of an index or a root is."""
        return self._place + str(checked_compacted(name))

    def parse_compacted(self, key: str) -> CompactedId | None:
        """What is in the name of a blob file, a file of an index or a root; None for any other key."""
        return parse_compacted(key.removeprefix(self._place)) if key.startswith(self._place) else None

    def data_file(self, bucket: str, key: str, seq: int) -> str | None:
        """Where a large value has its file; None when that would be too long for a key: a blob file has it then."""
        name = data_name(bucket, key, seq)
        return None if name is None else self.data_file_named(name)

    def data_file_named(self, name: str) -> str | None:
        """The key of a file by its name below `data/`, as value pointers have it; None when that is not a valid
        name."""
        key = self.data_prefix + name
        return None if parse_data_name(name) is None or len(key) > MAX_KEY_LENGTH else key

    def parse_data_file(self, key: str) -> DataFileId | None:
        """Whose value a file is; None for any other key."""
        return parse_data_name(key.removeprefix(self.data_prefix)) if key.startswith(self.data_prefix) else None


def staged_commit_name(app: str, version: int) -> str:
    """The name of the rows of one version of an application: the same from every process."""
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
    return offset if offset <= MAX_NUMBER else None


def parse_object_id(name: str) -> ObjectId | None:
    """The numbers in the name of a data object; None for any other name."""
    match = _OBJECT.fullmatch(name)
    if match is None:
        return None
    found = ObjectId(*(int(number or 0) for number in match.groups()))
    return found if found.start <= found.end <= MAX_OFFSET and max(found) <= MAX_NUMBER else None


def node_prefix(node: str, root: str = DEFAULT_ROOT) -> str:
    """The heartbeats of one node, in the metadata store."""
    return f"{check_part(root)}/{_NODES}/{check_part(node)}/"


def node_key(node: str, session: str, root: str = DEFAULT_ROOT) -> str:
    """The heartbeat of one opening of a node."""
    return node_prefix(node, root) + check_part(session)


def is_node_key(key: str) -> bool:
    """Whether this is the key of a heartbeat of any installation."""
    return len(parts := key.split("/")) == 5 and "/".join(parts[1:3]) == _NODES


class FlushKey(NamedTuple):
    """A step of a generation of flushes of a session of a node."""

    node: str
    session: str
    generation: int
    number: int


class FlushSource(NamedTuple):
    """The flushes, of a session and under an epoch, that may have what the catalog of a topic lacks."""

    node: str
    session: str
    epoch: int


def flushes_prefix(root: str = DEFAULT_ROOT, *parts: str) -> str:
    """All flushes, or those of a node, or of a session of it."""
    return "/".join((check_part(root), _FLUSHES, *map(check_part, parts), ""))


def flush_key(key: FlushKey, root: str = DEFAULT_ROOT) -> str:
    """The document of a flush, in the metadata store."""
    return f"{flushes_prefix(root, key.node, key.session)}{key.generation:010d}/{padded(key.number)}"


def parse_flush_key(key: str, root: str = DEFAULT_ROOT) -> FlushKey | None:
    """Whose flush it is; None for any other key."""
    prefix = flushes_prefix(root)
    parts = key.removeprefix(prefix).split("/")
    if not key.startswith(prefix) or len(parts) != 4 or not (parts[2].isdigit() and parts[3].isdigit()):
        return None
    found = FlushKey(parts[0], parts[1], int(parts[2]), int(parts[3]))
    return found if flush_key(found, root) == key else None


def flush_object(key: FlushKey, token: str) -> str:
    """The object of an attempt to flush; `token` is unlike that of any other."""
    return f"{flush_objects_prefix(key)}{padded(key.number)}-{check_part(token)}.tflush"


def flush_objects_prefix(key: FlushKey) -> str:
    """The objects of a generation, in the object store."""
    return f"{_FLUSHES}/{check_part(key.node)}/{check_part(key.session)}/{key.generation:010d}/"


def store_key(root: str = DEFAULT_ROOT) -> str:
    """Whose catalog it is that is below the root, in the metadata store."""
    return f"{check_part(root)}/storage/store"


def groups_prefix(node: str, root: str = DEFAULT_ROOT) -> str:
    """The members of all consumer groups that a node coordinates."""
    return f"{check_part(root)}/{_MEMBERS}/{check_part(node)}/"


def group_key(group: str, node: str, root: str = DEFAULT_ROOT) -> str:
    """The members of a consumer group."""
    return groups_prefix(node, root) + group_cursor(group).removeprefix(f"{GROUPS}/")


def parse_group_key(key: str, node: str, root: str = DEFAULT_ROOT) -> str | None:
    """The consumer group whose members are under this key; None for any other key."""
    prefix = groups_prefix(node, root)
    return group_of_cursor(f"{GROUPS}/{key.removeprefix(prefix)}") if key.startswith(prefix) else None


def transactions_prefix(root: str = DEFAULT_ROOT) -> str:
    """The transactions of all Kafka producers of an installation."""
    return f"{check_part(root)}/{_TRANSACTIONS}/"


def transaction_key(transactional_id: str, root: str = DEFAULT_ROOT) -> str:
    """The record of a transactional id, which may be any text: a long one is named by its digest."""
    name = escape(transactional_id)
    if len(name) > MAX_PART_LENGTH // 2:
        # Longer than any name that is not shortened: the two never meet.
        name = f"{name[: MAX_PART_LENGTH // 2]}-{hashlib.sha256(transactional_id.encode()).hexdigest()}"
    return transactions_prefix(root) + check_part(name)


def slot_key(slot: int, root: str = DEFAULT_ROOT) -> str:
    """Who coordinates the groups and transactional ids of a slot."""
    return f"{check_part(root)}/storage/slots/{slot:02d}"


def node_secret_key(root: str = DEFAULT_ROOT) -> str:
    """What the nodes of an installation prove themselves to each other with."""
    return f"{check_part(root)}/storage/node-secret"


def producer_ids_key(root: str = DEFAULT_ROOT) -> str:
    """Which ids of Kafka producers are given already."""
    return f"{check_part(root)}/storage/producer-ids"


def pipeline_key(name: str, root: str = DEFAULT_ROOT) -> str:
    """Who runs a declared pipeline, and how far its run is."""
    return f"{check_part(root)}/{_PIPELINES}/{check_part(name)}"


def pipeline_runs_prefix(name: str) -> str:
    """The reports of a declared pipeline, in the object store."""
    return f"{_PIPELINES}/{check_part(name)}/runs/"


def kafka_quotas_key(root: str = DEFAULT_ROOT) -> str:
    """The quotas of Kafka's clients of an installation."""
    return f"{check_part(root)}/storage/kafka-quotas"


def http_producer_key(topic_id: str, name: str, root: str = DEFAULT_ROOT) -> str:
    """The newest epoch of a producer of HTTP clients. Names are anything, so that the key has their digest."""
    return f"{check_part(root)}/storage/producers/{topic_id}/{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def kafka_group_configs_key(root: str = DEFAULT_ROOT) -> str:
    """The configs of groups of Kafka's clients."""
    return f"{check_part(root)}/storage/kafka-group-configs"


def accounts_key(root: str = DEFAULT_ROOT) -> str:
    """The users, tokens and grants of an installation."""
    return f"{check_part(root)}/storage/accounts"


class ClusterKeys:
    """The keys of a cluster of nodes."""

    def __init__(self, root: str = DEFAULT_ROOT) -> None:
        self.prefix = f"{check_part(root)}/cluster/"
        """What every node watches."""
        self.nodes_prefix = self.prefix + "nodes/"
        self.node_ids_prefix = self.prefix + "node-ids/"
        self.topics_prefix = self.prefix + "topics/"
        self.engines_prefix = self.prefix + "engines/"
        self.requests_prefix = self.prefix + "requests/"
        self.leader = self.prefix + "leader"
        self.coordinators = self.prefix + "coordinators"
        self.settings = self.prefix + "settings"
        self.loads_prefix = f"{root}/cluster-loads/"
        self.tails_prefix = f"{root}/cluster-tails/"
        self.decisions_prefix = f"{root}/cluster-decisions/"

    def node(self, name: str) -> str:
        return self.nodes_prefix + check_part(name)

    def node_id(self, name: str) -> str:
        return self.node_ids_prefix + check_part(name)

    def node_number(self, number: int) -> str:
        return f"{self.prefix}node-numbers/{_checked_number(number, 'a number')}"

    def topic(self, namespace: str, name: str) -> str:
        return f"{self.topics_prefix}{check_part(namespace)}/{check_part(name)}"

    def engine(self, name: str) -> str:
        return self.engines_prefix + check_part(name)

    def request(self, name: str) -> str:
        return self.requests_prefix + check_part(name)

    def load(self, node: str) -> str:
        return self.loads_prefix + check_part(node)

    def tail(self, node: str) -> str:
        return self.tails_prefix + check_part(node)

    def decision(self, time_us: int) -> str:
        return f"{self.decisions_prefix}{_checked_number(time_us, 'a time'):020d}"


def topics_prefix(root: str = DEFAULT_ROOT) -> str:
    """All topics of an installation, in the metadata store."""
    return f"{check_part(root)}/{_TOPICS}/"


def engines_prefix(root: str = DEFAULT_ROOT) -> str:
    """What the metadata store knows about all engines of an installation."""
    return f"{check_part(root)}/{_ENGINE}/"


def parse_topic_key(key: str, root: str = DEFAULT_ROOT) -> TopicKey | None:
    """Whose metadata key this is; None for a key that belongs to no topic of this installation."""
    if not key.startswith(f"{root}/"):
        return None
    match = _TOPIC_KEY.fullmatch(key.removeprefix(f"{root}/"))
    if match is None or not (is_part(match[1]) and is_part(match[2])):
        return None
    return TopicKey(match[1], match[2], match[3])


def parse_owned_key(key: str) -> OwnedKey | None:
    """Which topic or engine of whatever installation this key or prefix belongs to; None if it belongs to none."""
    match = _OWNED.fullmatch(key)
    return None if match is None else OwnedKey(match[1], match[2])


def is_part(text: str) -> bool:
    """Whether this can stand between two slashes of a key."""
    return len(text) <= MAX_PART_LENGTH and _PART.fullmatch(text) is not None


def is_subscription(text: str) -> bool:
    """Whether a subscription can have this name."""
    return is_part(text) and text != GROUPS


def group_cursor(group: str) -> str:
    """What the cursor of a consumer group is called beside those of subscriptions; InputError for a name too long."""
    escaped = escape(group)
    if not 1 <= len(escaped) <= MAX_PART_LENGTH:
        raise InputError(
            f"{_shown(group)} cannot be the name of a consumer group",
            hint=f"Use 1 to {MAX_PART_LENGTH} characters; each byte other than A-Z a-z 0-9 . - counts as three",
        )
    return f"{GROUPS}/{escaped}"


def group_of_cursor(name: str) -> str | None:
    """The consumer group whose cursor has this name; None for any other."""
    folder, _, escaped = name.rpartition("/")
    group = _unescaped(escaped) if folder == GROUPS and len(escaped) <= MAX_PART_LENGTH else None
    return group if group is not None and escape(group) == escaped else None


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
    if len(text) > MAX_KEY_LENGTH or _KEY.fullmatch(text) is None:
        return False
    return len(text) <= MAX_PART_LENGTH or all(map(is_part, text.split("/")))


def check_key(key: str) -> str:
    """The same key, or InputError."""
    if not is_key(key):
        raise InputError(
            f"{_shown(key)} is not a key",
            hint=f"A key has at most {MAX_KEY_LENGTH} characters: parts of A-Z a-z 0-9 . _ - with slashes between them",
        )
    return key


def check_prefix(prefix: str) -> str:
    """The same prefix, or InputError: empty, or a key with a slash after it. (Stores list whole parts only.)"""
    if prefix == "":
        return prefix
    if not prefix.endswith("/"):
        raise InputError(f"{_shown(prefix)} is not a prefix", hint="A prefix ends with a slash")
    check_key(prefix[:-1])
    return prefix


def _checked_number(number: int, what: str) -> int:
    if not 0 <= number <= MAX_NUMBER:
        raise InputError(f"{_shown(number)} is not {what}")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
