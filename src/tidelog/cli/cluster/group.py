"""`tidelog cluster`: what operators see of a cluster, and ask of it.

Invariant: every command works on the metadata store itself, through no node: it works beside nodes that run, and tells
of those that do not. What it asks for is a document that the leader carries out.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import asdict

from tidelog.cli.cluster.dev import DirOption, dev
from tidelog.cli.errors import ExitCode
from tidelog.cli.output import Row, counted
from tidelog.cli.session import DirectoryOption, Session, command, command_group, confirm
from tidelog.errors import ConfigError, InputError, NotFoundError

if TYPE_CHECKING:
    from tidelog.cluster.documents import Decision
    from tidelog.cluster.operations import ClusterOperations
    from tidelog.cluster.promotion import PromotedLog, Promotion
    from tidelog.service.cluster_control import ClusterNode

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The name of a node.")]
EngineArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the engine.")]
WaitOption = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait until it is done; 0: not at all.")
]
AllOption = Annotated[
    bool, typer.Option("--all", help="With the slots of coordinators, of groups and transactions, too.")
]
_DECISIONS = ("kind", "what", "from", "to", "reason")
_WAIT_SECONDS = 120.0


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("Several nodes over one etcd and one bucket.")
    commands: list[tuple[str, Callable[..., None]]] = [
        *(("dev", dev), ("status", status), ("nodes", nodes), ("topics", topics), ("plan", plan)),
        *(("decisions", decisions), ("move", move), ("drain", drain), ("undrain", undrain), ("balance", balance)),
        *(("engines", engines), ("add-engine", add_engine), ("remove-engine", remove_engine)),
        *(("move-engine", move_engine), ("restore-point", restore_point), ("settings", settings)),
        ("promote", promote),
    ]
    for name, work in commands:
        command(group, name, DirOption if work is dev else DirectoryOption)(work)
    app.add_typer(group, name="cluster")


@contextmanager
def _operations(session: Session) -> Iterator[ClusterOperations]:
    """The cluster of --metadata, else of the directory."""
    from tidelog.cluster.operations import ClusterOperations
    from tidelog.store.keys import DEFAULT_ROOT
    from tidelog.store.metadata.open import open_metadata_store
    from tidelog.wiring import open_shared_metadata

    found = session.settings
    if found.metadata is not None:
        if not found.metadata.startswith("etcd"):
            raise ConfigError(
                f"{found.metadata} has no cluster: nodes agree by etcd", hint="Name it with --metadata etcd://host:port"
            )
        with open_metadata_store(found.metadata, settings=found.metadata_store) as metadata:
            yield ClusterOperations(metadata, found.metadata_root or DEFAULT_ROOT)
        return
    try:
        with open_shared_metadata(session.root, found) as (metadata, root):
            yield ClusterOperations(metadata, root)
    except NotFoundError as error:
        if str(error.path) != os.path.abspath(session.root):
            raise
        hint = "Name its etcd with --metadata etcd://host:port, or the directory of a node with --dir"
        raise ConfigError("no cluster was named", hint=hint) from error


# Looking


def status(session: Session) -> None:
    """Shows the cluster in a few numbers."""
    with _operations(session) as cluster:
        session.output.record(asdict(cluster.status()))


def nodes(session: Session) -> None:
    """Lists the nodes, and what they have and do.

    Those that are gone are listed, too.
    """
    with _operations(session) as cluster:
        rows = [_node_row(node) for node in cluster.nodes()]
    shown = ("name", "state", "leader", "partitions", "engines", "slots", "zone", "kafka", "http")
    session.output.rows((*shown, "bytes_in", "cpu", "version"), rows)


def _node_row(node: ClusterNode) -> Row:
    load = node.load
    row: dict[str, object] = {
        "name": node.name,
        "state": node.state,
        "leader": node.is_leader,
        "node_id": node.node_id,
        "partitions": node.partitions,
        "engines": node.engines,
        "slots": node.slots,
        "zone": node.zone,
        "kafka": node.kafka,
        "http": node.http,
        "version": node.version,
    }
    measured = () if load is None else ("cpu", "memory_bytes", "disk_free_bytes", "cold_reads", "open", "opening")
    row |= {name: getattr(load, name) for name in measured}
    if load is not None:
        row |= {name: getattr(load.total, name) for name in ("bytes_in", "bytes_out", "messages_in", "messages_out")}
    return row


def topics(
    session: Session,
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="namespace/name; without it, all.")] = None,
) -> None:
    """Lists partitions, and who serves them."""
    from tidelog.topics.names import parse_topic_name

    with _operations(session) as cluster:
        found = cluster.topics()
    if topic is not None:
        name = str(parse_topic_name(topic))
        found = [one for one in found if one.name == name]
        if not found:
            raise NotFoundError(f"the cluster has no topic {name}", hint="`tidelog cluster topics` lists them")
    rows: list[Row] = [
        {"topic": one.name, "partition": number, "node": node, "pin": one.pins.get(number)}
        for one in found
        for number, node in enumerate(one.partitions)
    ]
    session.output.rows(("topic", "partition", "node", "pin"), rows)


def plan(
    session: Session,
    drain: Annotated[
        list[str] | None, typer.Option("--drain", metavar="NODE", help="As if this node were drained.")
    ] = None,
    lose: Annotated[list[str] | None, typer.Option("--lose", metavar="NODE", help="As if this node died.")] = None,
    balance: Annotated[bool, typer.Option("--balance", help="As if balance were asked for.")] = False,
    shows_all: AllOption = False,
) -> None:
    """Shows what the leader would decide now, and why.

    Nothing is changed.
    """
    with _operations(session) as cluster:
        found = cluster.plan(drain=drain or (), lose=lose or (), balance=balance)
    _show_decisions(session, [one for one in found if shows_all or not one.is_of_slot])


def decisions(
    session: Session,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="So many of the newest.")] = 50,
    shows_all: AllOption = False,
) -> None:
    """Lists what the leader has decided, and why.

    The newest is the last.
    """
    from tidelog.clock import iso_time, to_datetime

    with _operations(session) as cluster:
        found = [
            (rounds, decision)
            for rounds in cluster.decisions()
            for decision in rounds.decisions
            if shows_all or not decision.is_of_slot
        ][-last:]
    rows = [
        {"time": iso_time(to_datetime(rounds.at_us)), "leader": rounds.leader, **_decision_row(decision)}
        for rounds, decision in found
    ]
    session.output.rows(("time", *_DECISIONS), rows)


def _decision_row(decision: Decision) -> dict[str, object]:
    return {
        "kind": decision.kind,
        "what": decision.subject,
        "from": decision.source or None,
        "to": decision.to,
        "reason": decision.reason,
    }


def _show_decisions(session: Session, found: Sequence[Decision]) -> None:
    if not found and not session.as_json:
        session.output.note("Nothing would be moved.")
        return
    session.output.rows(_DECISIONS, [_decision_row(decision) for decision in found])


_RESTORE_POINT = ("node", "is_alive", "to_rescue", "topic", "engine", "messages", "bytes", "seconds", "reported")


def restore_point(session: Session) -> None:
    """Shows what is only on the disk of one node.

    That much would be missing if it were lost now; of a node that is gone, it is missing until it comes back. Where
    `to_rescue` is true, another node went on without it: it is missing until `tidelog topic rescue TOPIC --dir DIR`
    brings it back from the directory of that node, or `--server URL` of any node. It is what the nodes have reported
    last, every few seconds. Messages of topics with `durability = shipped` are in the bucket before their producers
    hear of it. Entries of an engine are also in the log of its orchestrator, which applies them again.
    """
    from tidelog.clock import iso_time

    with _operations(session) as cluster:
        rows: list[Row] = [asdict(one) | {"reported": iso_time(one.reported)} for one in cluster.restore_point()]
    if not rows and not session.as_json:
        session.output.note("Everything is in the store.")
        return
    session.output.rows(_RESTORE_POINT, rows)


def engines(session: Session) -> None:
    """Lists the engines, and who serves them.

    An engine that its node cannot open is `failing`, with the reason; it is tried again. `unshipped` counts the entries
    that their orchestrators would apply again if the node died now.
    """
    with _operations(session) as cluster:
        rows: list[Row] = [asdict(one) for one in cluster.engines()]
    session.output.rows(("name", "node", "state", "pin", "store", "unshipped", "reason"), rows)


# Asking


def add_engine(
    session: Session,
    name: EngineArgument,
    engine_store: Annotated[
        str | None,
        typer.Option("--engine-store", metavar="URL", help="Of one that exists and has a store of its own."),
    ] = None,
    engine_metadata: Annotated[
        str | None, typer.Option("--engine-metadata", metavar="URL", help="Its metadata [default: that store].")
    ] = None,
    existing: Annotated[bool, typer.Option("--existing", help="It is there, and not to be created.")] = False,
) -> None:
    """Has a node serve an engine.

    It is created in the store of the cluster, if it is not there. With --engine-store it is one that exists, and that
    nobody else has open.
    """
    with _operations(session) as cluster:
        cluster.add_engine(name, store=engine_store, metadata=engine_metadata, must_exist=existing)
    session.output.result({"engine": name}, f"A node will serve the engine {name}.")


def remove_engine(session: Session, name: EngineArgument) -> None:
    """Has no node serve an engine any more.

    What its store has stays: `tidelog cluster add-engine` brings it back.
    """
    with _operations(session) as cluster:
        cluster.remove_engine(name)
    session.output.result({"engine": name}, f"No node serves the engine {name} any more.")


def _refuse_both(pin: bool, unpin: bool) -> None:
    if pin and unpin:
        raise InputError("--pin and --unpin contradict each other", hint="Give one of them")


def move_engine(
    session: Session,
    name: EngineArgument,
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="Where it goes.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it there, whatever the balance says.")] = False,
    unpin: Annotated[bool, typer.Option("--unpin", help="Let the load manager move it again.")] = False,
    wait: WaitOption = _WAIT_SECONDS,
) -> None:
    """Moves an engine to a node.

    The old one ships what is committed and closes it, the new one restores it from the store. What is not committed is
    applied again by the orchestrator.
    """
    _refuse_both(pin, unpin)
    with _operations(session) as cluster:
        if unpin:
            was_pinned = cluster.unpin_engine(name)
            text = "is not pinned any more" if was_pinned else "was not pinned"
            session.output.result({"unpinned": was_pinned}, f"The engine {name} {text}.")
        if node is None:
            if not unpin:
                raise InputError("where the engine goes is missing: tidelog cluster move-engine NAME NODE")
            return
        request = cluster.move_engine(name, node, pin=pin, by=_operator())
        is_done = wait > 0 and cluster.until(cluster.is_carried_out(request), wait)
        document = {"engine": name, "node": node, "done": is_done}
        _tell(session, document, f"The engine {name} is assigned to {node}.", is_done, wait)


def move(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/name")],
    partition: Annotated[int, typer.Argument(metavar="PARTITION", help="Its number.")],
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="Where it goes.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it there, whatever the balance says.")] = False,
    unpin: Annotated[bool, typer.Option("--unpin", help="Let the load manager move it again.")] = False,
    wait: WaitOption = _WAIT_SECONDS,
) -> None:
    """Moves a partition to a node.

    The old one ships what it has, the new one goes on. Clients follow by themselves.
    """
    _refuse_both(pin, unpin)
    with _operations(session) as cluster:
        if unpin:
            was_pinned = cluster.unpin(topic, partition)
            text = "is not pinned any more" if was_pinned else "was not pinned"
            session.output.result({"unpinned": was_pinned}, f"{topic}/{partition} {text}.")
        if node is None:
            if not unpin:
                raise InputError("where the partition goes is missing: tidelog cluster move TOPIC PARTITION NODE")
            return
        request = cluster.move(topic, partition, node, pin=pin, by=_operator())
        is_done = wait > 0 and cluster.until(cluster.is_carried_out(request), wait)
        document = {"topic": topic, "partition": partition, "node": node, "done": is_done}
        _tell(session, document, f"{topic}/{partition} is assigned to {node}.", is_done, wait)


def drain(session: Session, node: NodeArgument, wait: WaitOption = _WAIT_SECONDS) -> None:
    """Moves everything off a node and keeps it empty.

    For maintenance, until `tidelog cluster undrain`. Clients see a pause, and no errors.
    """
    with _operations(session) as cluster:
        cluster.drain(node)
        is_done = wait > 0 and cluster.until(cluster.is_empty(node), wait)
        _tell(session, {"node": node, "done": is_done}, f"{node} serves nothing any more.", is_done, wait)


def undrain(session: Session, node: NodeArgument) -> None:
    """Lets a node serve again.

    Balance gives it partitions.
    """
    with _operations(session) as cluster:
        is_news = cluster.undrain(node)
        text = f"{node} may serve again." if is_news else f"{node} was not drained."
        session.output.result({"node": node, "changed": is_news}, text)


def balance(session: Session, wait: WaitOption = _WAIT_SECONDS) -> None:
    """Balances now, whatever was moved within the hour.

    `tidelog cluster plan --balance` shows it before.
    """
    with _operations(session) as cluster:
        moves = len([one for one in cluster.plan(balance=True) if one.kind == "balance"])
        request = cluster.balance(by=_operator())
        is_done = wait > 0 and cluster.until(cluster.is_carried_out(request), wait)
        _tell(session, {"moves": moves, "done": is_done}, f"{counted(moves, 'partition')} moved.", is_done, wait)


def _tell(session: Session, document: dict[str, object], text: str, is_done: bool, wait: float) -> None:
    """What became of a request; TRY_LATER for one that takes longer than somebody waited."""
    if is_done:
        session.output.result(document, text)
    elif wait == 0:
        session.output.result(document, "The leader carries it out.")
    else:
        session.output.result(document, f"It is not done after {wait:g} s; the leader goes on with it.")
        raise typer.Exit(ExitCode.TRY_LATER)


def settings(
    session: Session,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="What to change; NAME= takes it back.")
    ] = None,
) -> None:
    """Shows or changes how the load manager decides.

    It is changed for the whole cluster.
    """
    given: dict[str, object] = {}
    for text in changes or []:
        name, sign, value = text.partition("=")
        if not sign:
            raise InputError(f"a setting is NAME=VALUE, for example strategy=fair, not {text!r}")
        given[name.strip()] = value.strip() or None
    with _operations(session) as cluster:
        session.output.record(asdict(cluster.settings(**given)))


def promote(
    session: Session,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be lost.")] = False,
) -> None:
    """Makes the replica of --store the first store.

    For the loss of the first one, with all nodes stopped. It shows before what is lost. Nodes are started with the new
    store after it, in directories of their own.
    """
    from tidelog.store.urls import open_store

    if session.settings.store is None:
        raise InputError("the replica is missing", hint="Name it with --store s3://bucket/prefix")
    replica = open_store(session.settings.store, session.settings.object_store)
    with _operations(session) as cluster:
        found = cluster.plan_promotion(replica)
        rows = [_promoted_row(log) for log in found.logs]
        document: dict[str, object] = {"store": found.store, "first": found.first, "lost": found.lost("topic")}
        document |= {"lost_entries": found.lost("engine"), "unshipped": found.unshipped("topic")}
        document |= {"unshipped_entries": found.unshipped("engine"), "logs": rows, "done": not dry_run}
        if not session.output.as_json:
            shown: list[Row] = [{**row, "lost": "unknown"} if row["lost"] is None else row for row in rows]
            session.output.table(("kind", "log", "catalog", "replica", "lost", "unshipped"), shown)
        loss = _loss(found)
        if None in (found.lost("topic"), found.lost("engine")):
            session.output.note(
                "This metadata store does not know all of these logs, as after the loss of a region with its etcd: how "
                "much the first store had of them is unknown. Users, grants, engine placements and transactions that "
                "were in the lost one are gone with it."
            )
        if not dry_run:
            what = f"promote {found.store}, which loses {loss}"
            confirm(session, yes, f"{what[0].upper()}{what[1:]}?", what)
            cluster.promote(replica)
    text = f"Lost would be {loss}."
    if not dry_run:
        text = f"{found.store} is the first store now. Start the nodes with --store {found.store}."
    session.output.result(document, text)


def _loss(found: Promotion) -> str:
    """What a promotion loses, in words."""
    messages, entries = found.lost("topic"), found.lost("engine")
    loss = "an unknown number of messages" if messages is None else counted(messages, "message")
    if any(log.kind == "engine" for log in found.logs):
        of_engines = "an unknown number of entries" if entries is None else counted(entries, "entry", "entries")
        loss += f" and {of_engines} of engines"
    loss += f" that {found.first or 'the first store'} had"
    unshipped = found.unshipped("topic")
    if unshipped is None:
        return f"{loss}, and what was not shipped"
    return f"{loss}, and {counted(unshipped, 'message')} that nodes had not shipped when they reported last"


def _promoted_row(log: PromotedLog) -> Row:
    ends = {"catalog": log.in_catalog, "replica": log.in_replica}
    return {"kind": log.kind, "log": log.name, **ends, "lost": log.lost, "unshipped": log.unshipped}


def _operator() -> str:
    """Who asks, for the log of decisions."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
