"""Metadata stores: small values by key, changed by compare-and-swap. One interface, four stores, one contract suite."""

from tidelog.tier.metadata.open import open_metadata_store
from tidelog.tier.metadata.store import Check, Delete, Entry, MetadataStore, Put, Write

__all__ = ["Check", "Delete", "Entry", "MetadataStore", "Put", "Write", "open_metadata_store"]
