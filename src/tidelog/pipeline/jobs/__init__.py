"""The jobs: everything bulk that is done with topics, on one machine or on a cluster, each with a proof at its end.

One module a job. What they share is in `job.py` (progress, reports, sessions), `proof.py` (sums of what went in and
came out) and, a level above, `work.py` (work that is spread over workers).
"""
