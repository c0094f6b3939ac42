"""The console at `/`: pages that are served as they are, and talk to the public HTTP API."""
