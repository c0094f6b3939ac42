"""Spark integration: reads and writes topics and engines, and runs the bulk jobs on them.

Importing this package imports neither Spark nor Arrow: it also contains the code that runs on executors, and a command
that only prints help imports it. Its public names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.pipeline.address import EngineRoot, Root, find_engine, find_root
    from tidelog.pipeline.changes import change_data
    from tidelog.pipeline.cost.cost import engine_cost
    from tidelog.pipeline.jobs.engine.compact import compact_engine
    from tidelog.pipeline.jobs.engine.digest import digest_engine
    from tidelog.pipeline.jobs.engine.replay import replay_engine, replay_engine_to_topic
    from tidelog.pipeline.jobs.engine.restore import restore_engine_directory
    from tidelog.pipeline.jobs.engine.snapshot import checkpoint_engine
    from tidelog.pipeline.jobs.engine.verify import verify_engine
    from tidelog.pipeline.jobs.gc import apply_engine_gc, plan_engine_gc
    from tidelog.pipeline.listener import LagListener
    from tidelog.pipeline.session.cluster import cluster_settings, pack_for_cluster
    from tidelog.pipeline.session.session import register, spark_session
    from tidelog.pipeline.source.explained import explain
    from tidelog.pipeline.tables.tasks import read_table

__all__ = [
    "EngineRoot",
    "LagListener",
    "Root",
    "apply_engine_gc",
    "change_data",
    "checkpoint_engine",
    "cluster_settings",
    "compact_engine",
    "digest_engine",
    "engine_cost",
    "explain",
    "find_engine",
    "find_root",
    "pack_for_cluster",
    "plan_engine_gc",
    "read_table",
    "register",
    "replay_engine",
    "replay_engine_to_topic",
    "restore_engine_directory",
    "spark_session",
    "verify_engine",
]

_HOMES = {
    "EngineRoot": "tidelog.pipeline.address",
    "change_data": "tidelog.pipeline.changes",
    "find_engine": "tidelog.pipeline.address",
    "apply_engine_gc": "tidelog.pipeline.jobs.gc",
    "plan_engine_gc": "tidelog.pipeline.jobs.gc",
    "replay_engine": "tidelog.pipeline.jobs.engine.replay",
    "replay_engine_to_topic": "tidelog.pipeline.jobs.engine.replay",
    "restore_engine_directory": "tidelog.pipeline.jobs.engine.restore",
    "compact_engine": "tidelog.pipeline.jobs.engine.compact",
    "checkpoint_engine": "tidelog.pipeline.jobs.engine.snapshot",
    "digest_engine": "tidelog.pipeline.jobs.engine.digest",
    "engine_cost": "tidelog.pipeline.cost.cost",
    "verify_engine": "tidelog.pipeline.jobs.engine.verify",
    "explain": "tidelog.pipeline.source.explained",
    "LagListener": "tidelog.pipeline.listener",
    "Root": "tidelog.pipeline.address",
    "find_root": "tidelog.pipeline.address",
    "pack_for_cluster": "tidelog.pipeline.session.cluster",
    "cluster_settings": "tidelog.pipeline.session.cluster",
    "read_table": "tidelog.pipeline.tables.tasks",
    "register": "tidelog.pipeline.session.session",
    "spark_session": "tidelog.pipeline.session.session",
}


def __getattr__(name: str) -> object:
    """A public name, from the module that has it."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
