"""What `import tidelog` offers: the public names, and nothing that gets in the way."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from pathlib import Path

import pytest

import tidelog
from tidelog.errors import NotFoundError, NotSupportedError

# Whatever an editor offers of the public classes. A name belongs here when it is meant for users, and documented; all
# others begin with an underscore.
ATTRIBUTES = {
    "RemoteEngine": """
        applied_seq apply apply_async apply_many apply_many_async changes changes_async
        collect_garbage collect_garbage_async compact compact_async compact_index compact_index_async create_checkpoint
        create_checkpoint_async digest digest_async high_water_mark list_buckets list_buckets_async
        list_objects list_objects_async low_water_mark name open_object open_object_async plan_garbage
        plan_garbage_async read read_async read_many read_many_async rollback_to rollback_to_async scan scan_async
        ship ship_async stat stat_async truncation_mark update_low_water_mark update_low_water_mark_async verify
        verify_async versions versions_async
    """,
    "Client": """
        close close_async configure_topic configure_topic_async delete_topic delete_topic_async engine engines
        engines_async has_topic has_topic_async topic topic_async topics topics_async url
    """,
    "RemoteTopic": """
        append append_async append_many append_many_async
        delete_before delete_before_async delete_subscription delete_subscription_async
        durable_offset flush flush_async hot_start_offset is_reliable name next_offset partition partitions
        producer producer_async prune prune_async read read_async seal seal_async ship ship_async shipped_offset
        start_offset statistics statistics_async subscribe subscribe_async subscriptions subscriptions_async
        verify verify_async
    """,
    "RemoteProducer": """
        append append_async append_many append_many_async close close_async last_sequence last_sequence_async
        name
    """,
    "RemotePartitionedTopic": """
        append append_async append_many append_many_async
        delete_before delete_before_async delete_subscription delete_subscription_async flush
        flush_async is_reliable name next_offsets partition partitions producer producer_async prune prune_async
        read read_async seal seal_async ship ship_async shipped_offsets start_offsets statistics
        statistics_async subscribe subscribe_async subscriptions subscriptions_async verify verify_async
    """,
    "RemoteConsumer": """
        ack ack_async ack_cumulative ack_cumulative_async ack_many ack_many_async close close_async consumer
        flush flush_async lag lag_async nack nack_async name open receive receive_async receive_many
        receive_many_async seek seek_async unsubscribe unsubscribe_async
    """,
    "AsyncObjectFile": """
        close closed metadata read seek seq size tell tier
    """,
    "AsyncScan": """
        aclose seek
    """,
    "Batch": """
        entries
    """,
    "Change": """
        entry result seq
    """,
    "Consumer": """
        ack ack_async ack_cumulative ack_cumulative_async ack_many ack_many_async close close_async consumer
        flush flush_async lag lag_async nack nack_async name receive receive_async receive_many
        receive_many_async seek seek_async unsubscribe unsubscribe_async
    """,
    "CopyObject": """
        dest_bucket dest_key if_absent if_match if_match_crc src_bucket src_key
    """,
    "CreateBucket": """
        bucket
    """,
    "DeleteBucket": """
        bucket force
    """,
    "DeleteObject": """
        bucket if_match if_match_crc key
    """,
    "Delivery": """
        deliver_at delivery_count header_list headers key offset partition timestamp value
    """,
    "Engine": """
        applied_seq apply apply_async apply_many apply_many_async changes changes_async close close_async
        collect_garbage collect_garbage_async compact compact_async compact_index compact_index_async
        create_checkpoint create_checkpoint_async digest digest_async find_object find_object_async has_bucket
        has_bucket_async high_water_mark is_follower list_buckets list_buckets_async list_objects list_objects_async
        low_water_mark open_object open_object_async owner_is_alive owner_is_alive_async pin plan_garbage
        plan_garbage_async prefetch prefetch_async read read_async read_many read_many_async rollback_to
        rollback_to_async scan scan_async ship ship_async stat stat_async statistics take_over take_over_async
        transaction truncation_mark update_low_water_mark update_low_water_mark_async verify verify_async versions
        versions_async
    """,
    "EngineReader": """
        applied_seq changes changes_async close close_async digest digest_async find_object find_object_async
        has_bucket has_bucket_async history_start_seq list_buckets list_buckets_async list_objects
        list_objects_async open_object open_object_async pin read read_async read_many read_many_async refresh
        refresh_async scan scan_async
        stat stat_async statistics versions versions_async
    """,
    "Finding": """
        byte first_offset fix kind last_offset message path severity subject text unit where
    """,
    "Guarded": """
        batch reads refusal
    """,
    "Headers": """
        clear copy fromkeys get is_plain items keys pairs pop popitem setdefault update values
    """,
    "LatestByKey": """
        get items keys next_offset offset_of refresh refresh_async values
    """,
    "ListingRead": """
        bucket changed digest of prefix
    """,
    "LiveTopic": """
        append append_async append_many append_many_async delete_subscription delete_subscription_async
        durable_offset flush flush_async hot_start_offset is_reliable name next_offset partition partitions
        prune prune_async read read_async shipped_offset start_offset statistics subscribe subscribe_async
        subscription_info subscription_info_async subscriptions subscriptions_async
    """,
    "LogDirectory": """
        close close_async configure_topic configure_topic_async delete_topic delete_topic_async has_topic
        has_topic_async mode open_topics open_topics_async partition_logs partition_logs_async read_only root
        topic topic_async topics topics_async
    """,
    "Message": """
        deliver_at header_list headers key offset partition timestamp value
    """,
    "ObjectFile": """
        close closed detach fileno flush isatty metadata mode name peek raw read read1 readable readinto
        readinto1 readline readlines seek seekable seq size tell tier truncate writable write writelines
    """,
    "ObjectInfo": """
        is_prefix key seq size
    """,
    "ObjectRead": """
        bucket changed key seq
    """,
    "ObjectStat": """
        crc metadata seq size tier
    """,
    "OpenTransaction": """
        epoch first_offset last_offset producer_id
    """,
    "Orchestrator": """
        entries low_water_mark truncate
    """,
    "PartitionOffset": """
        as_integer_ratio bit_count bit_length conjugate denominator from_bytes imag numerator real to_bytes
    """,
    "PartitionedTopic": """
        append append_async append_many append_many_async
        delete_before delete_before_async delete_subscription delete_subscription_async flush
        flush_async ingest ingest_async is_reliable latest_by_key latest_by_key_async name next_offsets
        partition partition_async partitions producer producer_async prune prune_async read read_async seal
        seal_async ship ship_async shipped_offsets start_offsets statistics subscribe subscribe_async
        subscription_info subscription_info_async subscriptions subscriptions_async verify verify_async
    """,
    "Producer": """
        append append_async append_many append_many_async close close_async epoch last_sequence
        last_sequence_async name
    """,
    "PutObject": """
        bucket data if_absent if_match if_match_crc key metadata
    """,
    "RestoringEngine": """
        applied_seq changes changes_async close close_async digest digest_async find_object find_object_async has_bucket
        has_bucket_async is_restored list_buckets list_buckets_async list_objects list_objects_async
        open_object open_object_async progress read read_async read_many read_many_async scan scan_async stat
        stat_async versions versions_async wait wait_async
    """,
    "Result": """
        applied reason seq status
    """,
    "Scan": """
        close seek
    """,
    "ScannedObject": """
        crc data key metadata seq size
    """,
    "StoredObject": """
        data metadata seq tier
    """,
    "Topic": """
        abort_transaction abort_transaction_async append append_async append_frames
        append_frames_async append_many append_many_async delete_before delete_before_async
        delete_subscription
        delete_subscription_async durable_offset flush flush_async hot_start_offset ingest
        ingest_async is_reliable last_stable_offset last_stable_offset_async latest_by_key
        latest_by_key_async name next_offset open_transactions open_transactions_async partition
        partitions plan_orphans plan_orphans_async plan_retention plan_retention_async producer
        producer_async prune prune_async read read_async remove_orphans remove_orphans_async seal
        seal_async ship ship_async shipped_offset start_offset statistics subscribe subscribe_async subscription_info
        subscription_info_async subscriptions subscriptions_async verify verify_async
    """,
    "TopicOrchestrator": """
        agreed_seq append entries last_seq low_water_mark note_applied truncate truncated_seq
    """,
    "Transaction": """
        batch copy create_bucket delete delete_bucket guarded list_objects lock lock_async put read reads seq
    """,
    "VerifyReport": """
        findings notes ok read subject verdict
    """,
    "VersionInfo": """
        is_deleted seq size tier
    """,
}


def attributes_of(kind: type) -> set[str]:
    """What has no underscore: in the class, and what its methods set."""
    found = {name for name in dir(kind) if not name.startswith("_")}
    for base in kind.__mro__:
        if base.__module__.startswith("tidelog.") and "msgspec" not in str(type(base)):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and not node.attr.startswith("_")
                ):
                    found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def test_public_classes_show_what_is_for_users() -> None:
    """What is added without an underscore is added on purpose, here too."""
    exported = {name: getattr(tidelog, name) for name in tidelog.__all__}
    classes = {name: one for name, one in exported.items() if inspect.isclass(one) and not issubclass(one, Exception)}
    shown = {name: " ".join(sorted(attributes_of(kind))) for name, kind in classes.items()}
    assert shown == {name: " ".join(text.split()) for name, text in ATTRIBUTES.items()}


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    """An editor offers what is meant to be used."""
    assert dir(tidelog) == sorted([*tidelog.__all__, "open"])
    assert [name for name in dir(tidelog) if not hasattr(tidelog, name)] == []


def test_a_star_import_leaves_open_alone() -> None:
    """`from tidelog import *` does not put `tidelog.open` in the place of Python's own."""
    names: dict[str, object] = {}
    exec("from tidelog import *", names)
    assert names.get("open", builtins.open) is builtins.open
    assert names["Message"] is tidelog.Message


def test_sealing_without_a_store_is_refused() -> None:
    """There is nobody to hand the topic to; it stays open."""
    with tidelog.open(None) as log:
        topic = log.topic("shop/orders")
        with pytest.raises(NotSupportedError, match="no object store"):
            topic.seal()
        assert topic.append(b"goes on") == 0


def test_opening_what_must_be_there_makes_nothing(tmp_path: Path) -> None:
    """With `create=False` a mistyped path is an error, and no empty log or engine."""
    with pytest.raises(NotFoundError, match="no log directory at"):
        tidelog.open(tmp_path / "daat", create=False)
    with pytest.raises(NotFoundError, match="no engine in"):
        tidelog.open_engine(tmp_path / "engien", create=False)
    assert list(tmp_path.iterdir()) == []
    tidelog.open(tmp_path / "data").close()
    tidelog.open(tmp_path / "data", create=False).close()
    tidelog.open_engine(tmp_path / "engine").close()
    tidelog.open_engine(tmp_path / "engine", create=False).close()
