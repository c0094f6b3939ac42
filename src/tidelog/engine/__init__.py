"""The engine: a materialised view of a log that somebody else owns, hot on the disk and cold in a bucket."""
