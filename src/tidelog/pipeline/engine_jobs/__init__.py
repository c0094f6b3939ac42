"""The jobs that Spark runs over an engine's log in its store, each a function of a session and an `EngineRoot`."""
