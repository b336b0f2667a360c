"""Starts processes of the `axcore` command quickly: it imports everything once and forks for each command.

No jax backend exists before the fork. A child exits like the console script, through the interpreter's normal exit.
The protocol is JSON lines: a job on stdin returns `{"pid": ...}`, and `{"wait": pid}` returns `{"status": ...}`, which
is None while the process runs.
"""

import json
import os
import sys

import grain  # noqa: F401
import orbax.checkpoint  # noqa: F401
import tensorboardX.event_file_writer  # noqa: F401

import axcore.cli
import axcore.infer
import axcore.train


def serve():
    """Returns only in a child, with its job."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                return request
            answer = {"pid": pid}
        os.write(1, (json.dumps(answer) + "\n").encode())
    os._exit(0)


def become(job):
    """Makes this process look like one started for the job."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if job["stdout"] is None:  # a pipe without a reader
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(job["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(writer, 1)
    os.dup2(os.open(job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    exec(job["prepare"], {})
    sys.argv = ["axcore", *job["argv"]]


if __name__ == "__main__":
    become(serve())
    sys.exit(axcore.cli.main())
