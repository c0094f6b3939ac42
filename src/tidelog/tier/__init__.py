"""The cold tier: history in an object store, and the metadata that says what is where.

Payloads are opaque here. An object, once published, is never changed; what changes are small metadata entries, and
those only by compare-and-swap.
"""
