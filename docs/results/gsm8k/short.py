"""Selects the problems with short solutions: `python docs/results/gsm8k/short.py gsm8k gsm8k_short`. Both folders have a train.jsonl and a test.jsonl."""

import json
import shutil
import sys
from pathlib import Path


def main() -> None:
    """Writes the training problems with at most two calculations and 160 characters, and all test problems."""
    source, target = map(Path, sys.argv[1:])
    target.mkdir(exist_ok=True)
    shutil.copy(source / "test.jsonl", target)
    with (source / "train.jsonl").open() as lines, (target / "train.jsonl").open("w") as short:
        for line in lines:
            answer = json.loads(line)["answer"]
            if answer.count("<<") <= 2 and len(answer) <= 160:
                short.write(line)


if __name__ == "__main__":
    main()
