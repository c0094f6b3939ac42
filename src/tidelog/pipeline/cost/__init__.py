"""The cost of an engine's store."""
