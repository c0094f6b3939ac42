"""A node as a member of the cluster: its lease, its number, its documents, and its candidacy for leader.

Invariants
- A node has one lease. Its own document, its load and, if it leads, the leader's document hang on it, so that all of
  them are gone when the node is. What is only on its disk is a document of its own, which stays: it says what is
  missing while the node is dead.
- `is_alive` turns false before anybody else sees the node gone: the lease is counted here from before it was asked for.
  What a node may do only while it is a member it does only while `is_alive`.
- A lost lease is not renewed: the node joins again, under a new one. What was given to others meanwhile is theirs.
- A lease is this node's only once its document hangs on it: who renews it can be seen by others.
- A name belongs to one log directory at a time. A document of the same directory is of an earlier process of it, which
  is dead: its directory is locked by this one.
- A node id is given once and never to another name.
"""

from __future__ import annotations

import contextlib
import logging
import math
from threading import Lock
from typing import NamedTuple

import msgspec

from tidelog.clock import Clock
from tidelog.cluster.documents import Leader, NodeId, NodeInfo, decoded, decoded_settings, is_too_old
from tidelog.errors import ConfigError, ConflictError, HeldError, LeaseLostError, NotFoundError, TidelogError
from tidelog.service.cluster_control import NodeLoad, NodeTail
from tidelog.store.document import encode_json, retried
from tidelog.store.keys import ClusterKeys
from tidelog.store.metadata.base import Check, Delete, Entry, Lease, MetadataStore, Put, Write

_logger = logging.getLogger("tidelog.cluster")
BEATS_A_LEASE = 3
DEFAULT_LEASE_SECONDS = 10.0


class Identity(NamedTuple):
    """Who a node is. `directory` names its log directory among all others."""

    name: str
    directory: str
    kafka: str
    http: str
    zone: str = ""
    version: str = ""
    session: str = ""


class Member:
    """The membership of one node. Threads may share it; requests to the store wait for each other."""

    def __init__(
        self,
        metadata: MetadataStore,
        keys: ClusterKeys,
        clock: Clock,
        identity: Identity,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
    ) -> None:
        self.identity = identity
        self.keys = keys
        self.lease_seconds = lease_seconds
        self.node_id = 0
        self.leases_lost = 0
        self.is_leaving = False
        self._metadata = metadata
        self._clock = clock
        self._guard = Lock()
        self._lease: Lease | None = None
        self._leader_version: str | None = None
        self._may_have_tail = True
        self._kept = NodeTail(at_us=0)
        self._started_us = clock.now_us()

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def is_alive(self) -> bool:
        """Whether it is certain that no other node sees this one gone."""
        lease = self._lease
        return lease is not None and lease.is_held

    @property
    def beat_seconds(self) -> float:
        return self.lease_seconds / BEATS_A_LEASE

    # Joining

    def prepare(self) -> None:
        """Learns the number of this node. ConfigError when it is too old for the cluster."""
        self._check_version()
        if self.node_id == 0:
            self.node_id = retried(self._settled_id, self.keys.node_ids_prefix)

    def join(self) -> None:
        """Registers the node. ConfigError when it is too old for the cluster, HeldError when another has its name."""
        self.prepare()
        with self._guard:
            lease = self._metadata.lease(math.ceil(self.lease_seconds))
            try:
                retried(lambda: self._register(lease), self.keys.node(self.name))
            except BaseException:
                with contextlib.suppress(TidelogError):  # it runs out by itself
                    lease.revoke()
                raise
            self._lease = lease

    def _check_version(self) -> None:
        settings = decoded_settings(self._metadata.get(self.keys.settings))
        if is_too_old(self.identity.version, settings.minimum_version):
            raise ConfigError(
                f"this is tidelog {self.identity.version}, the cluster requires {settings.minimum_version}",
                hint="Upgrade this node",
            )

    def _settled_id(self) -> int:
        """The id that the node had before, or the next one. Two that are new at once do not get the same: each looks at
        all ids again if one was added."""
        known = {entry.key: entry for entry in self._metadata.range(self.keys.node_ids_prefix)}
        key = self.keys.node_id(self.name)
        found = decoded(known.get(key), NodeId)
        if found is not None:
            return found.node_id
        ids = [one.node_id for entry in known.values() if (one := decoded(entry, NodeId)) is not None]
        node_id = max(ids, default=0) + 1
        # A document a number: who creates it has it.
        taken = self.keys.node_number(node_id)
        self._metadata.commit(
            [Check(key, None), Check(taken, None)],
            [Put(key, encode_json(NodeId(node_id=node_id))), Put(taken, self.name.encode())],
        )
        return node_id

    def _register(self, lease: Lease) -> None:
        key = self.keys.node(self.name)
        found = self._metadata.get(key)
        other = _directory_of(found)
        if other is not None and other != self.identity.directory:
            raise HeldError(
                f"another node of this cluster is called {self.name} (log directory {other})",
                hint="Name this one differently, with --node; or wait until the lease of the other has run out",
            )
        self._metadata.commit([Check(key, None if found is None else found.version)], [self._document(lease)])

    def _document(self, lease: Lease | None) -> Put:
        info = NodeInfo(
            name=self.name,
            node_id=self.node_id,
            kafka=self.identity.kafka,
            http=self.identity.http,
            zone=self.identity.zone,
            version=self.identity.version,
            started_us=self._started_us,
            session=self.identity.session,
            directory=self.identity.directory,
            is_leaving=self.is_leaving,
        )
        return Put(self.keys.node(self.name), encode_json(info), lease)

    # Staying

    def beat(self) -> None:
        """Renews the lease; LeaseLostError when it is too late: the node has to `join` again.

        Before that it gives up what others have claimed meanwhile: the documents may name this node again.
        """
        with self._guard:
            if self._lease is None:
                raise LeaseLostError("there is no lease")
            try:
                self._lease.refresh()
            except LeaseLostError:
                self._lease = None
                self._leader_version = None
                self.leases_lost += 1
                _logger.warning("%s was away from the cluster for longer than its lease, and joins again", self.name)
                raise

    def report(self, load: NodeLoad, tail: NodeTail) -> None:
        """Says what this node has to do, and what is only on its disk."""
        with self._guard:
            if not self.is_alive:
                return
            writes: list[Write] = [Put(self.keys.load(self.name), encode_json(load), self._lease)]
            has_tail = bool(tail.topics or tail.engines or tail.kept or tail.flushed)
            if has_tail:
                writes.append(Put(self.keys.tail(self.name), encode_json(tail)))
            elif self._may_have_tail:
                writes.append(Delete(self.keys.tail(self.name)))
            self._may_have_tail = True  # if the answer is lost
            self._metadata.commit([], writes)
            self._may_have_tail, self._kept = has_tail, NodeTail(at_us=tail.at_us, kept=tail.kept)

    def begin_to_leave(self) -> None:
        """The load manager gives away what this node has. It is a member until `leave`."""
        with self._guard:
            self.is_leaving = True
            if self.is_alive:
                self._metadata.commit([], [self._document(self._lease)])

    def leave(self, *, is_empty: bool = False) -> None:
        """Others see it gone at once, or when the lease has run out. `is_empty`: it has handed over everything, so that
        only what it keeps for a rescue is on its disk alone."""
        with self._guard, contextlib.suppress(TidelogError):
            if is_empty and self.is_alive and self._may_have_tail:
                key = self.keys.tail(self.name)
                write = Put(key, encode_json(self._kept)) if self._kept.kept else Delete(key)
                self._metadata.commit([], [write])
        with self._guard, contextlib.suppress(TidelogError):
            if self._lease is not None:
                self._lease.revoke()

    # Leading

    @property
    def leads_by(self) -> Check | None:
        """What a commit of the leader checks; None while this node does not lead."""
        return None if self._leader_version is None else Check(self.keys.leader, self._leader_version)

    def campaign(self) -> Entry | None:
        """Becomes the leader if there is none; returns the leader's document as this node wrote it."""
        with self._guard:
            if not self.is_alive or self.is_leaving:
                return None
            document = encode_json(Leader(node=self.name, since_us=self._clock.now_us()))
            try:
                written = self._metadata.commit(
                    [Check(self.keys.leader, None)], [Put(self.keys.leader, document, self._lease)]
                )
            except ConflictError:
                return None
            self._leader_version = written[self.keys.leader]
            return Entry(self.keys.leader, document, self._leader_version)

    def seen_leader(self, leader: Leader | None, version: str | None) -> None:
        """The leader's document as the watch has it. If it is not ours, this node leads no more; if it names this node,
        it leads: the answer to its candidacy was lost, and nobody else becomes the leader while it lives."""
        if leader is not None and leader.node == self.name:
            self._leader_version = version
        elif self._leader_version is not None and (version is None or int(version) > int(self._leader_version)):
            self._leader_version = None


def _directory_of(entry: Entry | None) -> str | None:
    found = decoded(entry, NodeInfo)
    return None if found is None else found.directory


def changed_drain(metadata: MetadataStore, keys: ClusterKeys, node: str, *, is_draining: bool) -> bool:
    """Marks a node as draining or not, alive or not; returns whether that is news. NotFoundError for an unknown one."""
    key = keys.node_id(node)

    def change() -> bool:
        entry = metadata.get(key)
        found = decoded(entry, NodeId)
        if entry is None or found is None:
            raise NotFoundError(f"the cluster has no node {node}", hint="`tidelog cluster nodes` lists them")
        if found.is_draining == is_draining:
            return False
        changed = msgspec.structs.replace(found, is_draining=is_draining)
        metadata.commit([Check(key, entry.version)], [Put(key, encode_json(changed, entry.value))])
        return True

    return retried(change, key)
