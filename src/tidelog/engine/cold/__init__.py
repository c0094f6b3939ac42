"""The engine's data in the object store: manifest, shipping, reading, merging, garbage collection, replicas."""
