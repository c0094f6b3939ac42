"""Orchestrators: the owners of the log of entries, and the drivers that apply it to engines."""
