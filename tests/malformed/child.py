"""Runs commands of the library, one after another, for a parent that watches: a crash or a hang costs this process alone.

A line in is a JSON object with `argv` and `folder`, a line out one with `status`, `said` (standard output and standard error, as
the file descriptors saw them: a panic of a library in Rust is written past Python) and `raised`, the traceback of what left `main`.
"""

import json
import os
import resource
import sys
import tempfile
import traceback

MEMORY = 10 << 30
"""Bytes of address space: several times what any of these commands needs."""


def main():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a command prints goes into a file, so that the pipe to the parent holds answers alone.
    answers = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        from dapo_jax import cli

        for line in sys.stdin:
            asked = json.loads(line)
            os.chdir(asked["folder"])
            os.ftruncate(said.fileno(), 0)
            os.lseek(said.fileno(), 0, os.SEEK_SET)
            status, raised = None, ""
            try:
                status = cli.main(asked["argv"])
            except SystemExit as end:
                status = end.code
            except BaseException:  # also PanicException, which is none of Python's Exceptions
                raised = traceback.format_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os.lseek(said.fileno(), 0, os.SEEK_SET)
            heard = os.read(said.fileno(), 1 << 20).decode(errors="replace")
            answers.write(json.dumps({"status": status, "said": heard, "raised": raised}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
