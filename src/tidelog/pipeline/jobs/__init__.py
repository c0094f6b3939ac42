"""The jobs: bulk operations on topics and engines, on one machine or on a cluster, each with a proof at its end.

One module per job. They share `job.py` (progress, proofs, reports, sessions), `tally.py` (counts and sums of input and
output) and, a level above, `work.py` (work that is spread over workers).
"""

from __future__ import annotations


# The jobs that Spark runs over an engine's log in its store, each a function of a session and an `EngineRoot`.
