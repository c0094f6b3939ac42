"""Runs a job with spark-submit: `spark-submit .../tidelog/cli/pipeline/submit.py verify --root s3://bucket/prefix`.

The arguments are those of `tidelog pipeline`. Master and settings are those of spark-submit. To find the path of this
file, run `python -c "import tidelog.cli.pipeline.submit as file; print(file.__file__)"`.
"""

from __future__ import annotations

import sys


def run() -> int:
    """Runs the job. The directory of a script is searched for modules first: here `inspect` would be a command."""
    here = __file__.rpartition("/")[0]
    sys.path = [path for path in sys.path if path != here]
    from tidelog.cli.main import main

    return main(["pipeline", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run())
