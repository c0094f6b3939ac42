"""A job by spark-submit: `spark-submit .../tidelog/cli/pipeline_submit.py verify --root s3://bucket/prefix`.

The arguments are those of `tidelog pipeline`. Master and settings are spark-submit's; where this file is says
`python -c "import tidelog.cli.pipeline_submit as file; print(file.__file__)"`.
"""

from __future__ import annotations

import sys

from tidelog.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["pipeline", *sys.argv[1:]]))
