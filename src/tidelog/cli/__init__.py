"""The command line. It imports everything below it, lazily, and nothing imports it."""
