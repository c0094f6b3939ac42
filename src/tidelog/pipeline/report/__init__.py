"""The HTML report of all topics of a log."""
