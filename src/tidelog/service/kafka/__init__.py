"""Kafka's protocol without its I/O: codecs, record batches, groups, idempotent producers and transactions.

Nothing in this package opens a socket, a file or a topic, and nothing asks for the time: bytes and moments are passed
in, answers and effects are returned.
"""
