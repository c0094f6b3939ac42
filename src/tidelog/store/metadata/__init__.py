"""Metadata stores: small values by key, changed by compare-and-swap. One interface, four stores, one contract suite."""

from tidelog.store.metadata.base import Check, Delete, Entry, MetadataStore, Put, Write

__all__ = ["Check", "Delete", "Entry", "MetadataStore", "Put", "Write"]
