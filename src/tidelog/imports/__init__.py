"""Importers from other systems into topics. Nothing in `topics` depends on them."""
