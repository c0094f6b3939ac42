"""The engine: a materialised view of a log that somebody else owns, hot on local disk and cold in a bucket."""
