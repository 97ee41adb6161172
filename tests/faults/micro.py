"""A run so small that it can be killed hundreds of times: its files, and its command as a process."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from etils import epath

from dapo_jax.checkpoints.manifest import check_digests, sealed_files
from dapo_jax.models.adapter_folder import is_adapter, read_adapter
from dapo_jax.models.folder import load_model
from dapo_jax.trackers import read_metrics
from tests.run.conftest import ROWS, learnt, save_micro_model
from tests.several import ROOT

GRADER = '''
import time
from pathlib import Path

def seventh(sample):
    """Accepts about a third of the responses; waits if there is a file grader_waits."""
    waiting = Path(__file__).with_name("grader_waits")
    if waiting.exists():
        waiting.with_name("grader_waits_now").touch()
        time.sleep(600)
    return int(sample.tokens.sum()) % 3 == 0
'''

CONFIG = """
run_dir: {folder}/run
steps: {steps}
model: {{source: {folder}/model}}
data: {{source: jsonl, path: {folder}/rows.jsonl, max_prompt_tokens: 4, eval_split: train}}
sampling: {{slots: 8, max_response_tokens: 6}}
reward: {{grader: "{folder}/grader.py:seventh", overlong: {{buffer_tokens: 2}}}}
workers: {{count: 0, timeout_s: 600}}
dynamic_sampling: {{prompts_per_wave: 3, surplus: carry}}
batch: {{prompts_per_step: 2, group_size: 4, groups_per_update: 1, row_tokens: 12, rows_per_microbatch: 8}}
optimizer: {{learning_rate: 1.0e-4, warmup_steps: 2}}
eval: {{every_steps: {eval_every}, prompts: 2, samples_per_prompt: 4}}
checkpoint: {{every_steps: 1, keep: 3}}
log: {{rollouts_every_steps: 5}}
"""


@dataclass(frozen=True)
class Run:
    """The folder of one run: its configuration, and its results in `run`."""

    folder: Path

    @property
    def run_dir(self):
        return self.folder / "run"

    @property
    def config(self):
        return self.folder / "micro.yaml"

    def steps(self):
        """Returns the steps of the complete checkpoints."""
        folder = self.run_dir / "checkpoints"
        return (
            sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
            if folder.exists()
            else []
        )

    def start(self, *options, **how):
        """Starts the command as a process."""
        return started("train", self.config, *options, **how)

    def finish(self, *options, within_s=600):
        """Runs to the end, and fails if the status is not 0."""
        process = self.start(*options)
        output, _ = process.communicate(timeout=within_s)
        assert process.returncode == 0, output
        return output

    def wait_for(self, process, happened, within_s=120):
        """Waits until `happened()` is true, while the process is alive."""
        end = time.monotonic() + within_s
        while not happened():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.002)


def started(*arguments, program=("-m", "dapo_jax.cli"), **how):
    """Starts `dapo-jax` or another Python program with one device. `how` has other arguments of `Popen`."""
    environment = {
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "TERM": "xterm",
    }
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **how}
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **how)


def make_run(folder, *, steps, eval_every=0):
    """Returns a run that has not begun."""
    folder.mkdir(parents=True, exist_ok=True)
    save_micro_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "grader.py").write_text(GRADER)
    text = CONFIG.format(folder=folder, steps=steps, eval_every=eval_every)
    (folder / "micro.yaml").write_text(text)
    return Run(folder)


def kill_often(start, run_dir, *, kills, rng, longest_s):
    """Starts a run and kills it (-9), `kills` times: each time at a random moment after it has saved a further step."""
    run = Run(run_dir.parent)
    for _ in range(kills):
        before, process = max(run.steps(), default=0), start()
        try:
            run.wait_for(process, lambda before=before: max(run.steps(), default=0) > before, within_s=900)
            time.sleep(rng.uniform(0.0, longest_s))
            assert process.poll() is None, "it has finished: too few steps for so many kills"
        finally:
            process.kill()
            process.communicate()


def assert_the_same_run(found, expected):
    """Compares weights and all metrics that do not depend on time, bit for bit; all checkpoints must be whole."""
    lines, wanted = (learnt(read_metrics(run_dir / "metrics.jsonl")) for run_dir in (found, expected))
    assert lines == wanted
    for one, other in zip(weights_of(found), weights_of(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    for step in (found / "checkpoints").iterdir():
        assert step.name.isdigit(), f"not removed: {step}"
        check_digests(epath.Path(step), sealed_files(epath.Path(step)))


def weights_of(run_dir):
    import jax

    if is_adapter(run_dir / "model"):
        file = read_adapter(run_dir / "model")[1]
        return [file.read(name, (slice(None), slice(None))) for name in sorted(file.shapes)]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_model(run_dir / "model")[1])]
