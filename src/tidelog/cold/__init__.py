"""The cold tier: history in an object store, and the metadata that locates it.

Payloads are opaque here. Published objects are immutable; only small metadata entries change, and only by
compare-and-swap.
"""
