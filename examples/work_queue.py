"""A work queue: several workers share a subscription, one of them fails and one leaves, and every job is done.

python examples/work_queue.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter

import tidelog

JOBS = 200
WORKERS = 4


def work(jobs: tidelog.Topic, worker: str, done: Counter[bytes]) -> None:
    """Takes jobs until there are none: acknowledges what is done, gives back what failed."""
    with jobs.subscribe("work", "shared", consumer=worker, redelivery_backoff_seconds=0.01) as queue:
        while (job := queue.receive(timeout=0.5)) is not None:
            if job.value.endswith(b"7") and job.delivery_count == 1:
                queue.nack(job)  # it failed: the next consumer tries again
                continue
            if worker == "worker-1" and job.offset > JOBS // 4:
                return  # it leaves with an unfinished job, which goes to another consumer
            done[job.value] += 1
            queue.ack(job)


def main(directory: str) -> None:
    """Runs against a log directory, which is made when absent."""
    with tidelog.open(directory) as log:
        jobs = log.topic("shop/jobs")
        jobs.append_many([b"job %d" % number for number in range(JOBS)])
        jobs.subscribe("work", "shared", redelivery_backoff_seconds=0.01).close()  # it is made, at the first job

        done: Counter[bytes] = Counter()
        threads = [
            threading.Thread(target=work, args=(jobs, f"worker-{number}", done)) for number in range(1, WORKERS + 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert done == Counter(b"job %d" % number for number in range(JOBS))
        print(f"{len(done)} jobs were done by {WORKERS} workers, each once, though some failed and a worker left")

    # Opened again, the queue goes on where it was left: nothing that was acknowledged comes again.
    with tidelog.open(directory) as log:
        jobs = log.topic("shop/jobs")
        jobs.append(b"one more")
        with jobs.subscribe("work", "shared") as queue:
            job = queue.receive(timeout=5)
            assert job is not None
            print(f"after a restart the next one is {job.value!r}, at offset {job.offset}")
            queue.ack(job)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
