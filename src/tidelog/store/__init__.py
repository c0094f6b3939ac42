"""Object stores, metadata stores, the keys of both, and the threads that work on them. Imports files and errors."""
