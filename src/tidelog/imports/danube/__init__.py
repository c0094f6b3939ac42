"""Danube: decodes its frames, messages and objects, and imports them into a topic."""
