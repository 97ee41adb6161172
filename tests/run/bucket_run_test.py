"""A run in a bucket: a machine with an empty disk resumes it, and errors name the key."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax import locks
from dapo_jax.commands import evaluate
from dapo_jax.commands.convert import convert
from dapo_jax.commands.score import score
from dapo_jax.config import ConfigError, to_yaml
from dapo_jax.locks import LockLostError
from dapo_jax.run.policy import find_policy
from dapo_jax.storage import path_of
from dapo_jax.trackers import read_metrics
from tests.run.conftest import learnt

ROOT = Path(__file__).parent.parent.parent
RUN, COMPILED = "gs://runs/micro", "gs://runs/compiled"


def one_process(config, folder, *last):
    """Trains in a process with an empty home and working folder; with `last` it dies after that step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(replace(config, compilation_cache=COMPILED)))
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.run.bucket_process", "config.yaml", *map(str, last)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == (9 if last else 0), done.stderr


@pytest.fixture(scope="module", params=["one process", pytest.param("two processes", marks=pytest.mark.slow)])
def config(request, micro, storage_server):
    """(two processes?, configuration): one process that resumes, or two with separate disks, the first of them killed."""
    storage_server.buckets["runs"].clear()
    made = micro(RUN, checkpoint__every_steps=2, log__rollouts_every_steps=2)
    return request.param == "two processes", made


@pytest.fixture(scope="module")
def preempted(storage_server, config, run_micro, rows, tmp_path_factory):
    """All objects after a run that ended at step 3, one step after its checkpoint."""
    killed, made = config
    if killed:
        one_process(made, tmp_path_factory.mktemp("first") / "disk", 3)
    else:

        def interrupt(step, metrics):
            if step == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_micro(made, eval_rows=rows, on_step=interrupt)
    return storage_server.files("gs://runs")


@pytest.fixture(scope="module")
def resumed(preempted, storage_server, config, run_micro, rows, tmp_path_factory):
    """All objects after the resumed run, and its requests."""
    before = len(storage_server.requests)
    killed, made = config
    if killed:
        one_process(made, tmp_path_factory.mktemp("second") / "disk")
    else:
        run_micro(made, eval_rows=rows, resume=True)
    return storage_server.files("gs://runs"), storage_server.requests[before:]


def assert_equal_weights(policies):
    for a, b in zip(*(jax.tree.leaves(policy.params) for policy in policies), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def below(files, folder):
    return {name.removeprefix(folder + "/"): data for name, data in files.items() if name.startswith(folder)}


def test_the_first_process_left_a_line_past_its_checkpoint(preempted):
    """Resuming must remove it."""
    assert preempted[f"{RUN}/metrics/000000.jsonl"].count(b"\n") == 4  # steps 0 to 3
    assert {name.split("/")[0] for name in below(preempted, f"{RUN}/checkpoints")} == {"2"}


def test_resumed_from_the_bucket_it_equals_the_uninterrupted_local_run(resumed, finished):
    """In every metric but times, and in the weights bit for bit."""
    metrics = read_metrics(f"{RUN}/metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert learnt(metrics) == learnt(finished.metrics)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert resumed[0][f"{RUN}/model/{name}"] == (finished.run_dir / "model" / name).read_bytes()


def test_the_same_files_are_written_as_on_a_disk(resumed, finished):
    """Except metrics and checkpoints."""
    for folder in ("rollouts", "evaluations", "model"):
        local = {
            path.relative_to(finished.run_dir / folder).as_posix(): path.read_bytes()
            for path in (finished.run_dir / folder).rglob("*")
            if path.is_file()
        }
        assert local
        assert below(resumed[0], f"{RUN}/{folder}") == local
    top = {name.split("/")[0] for name in below(resumed[0], RUN)}
    assert top == {"checkpoints", "config.yaml", "evaluations", "metrics", "model", "rollouts", "status.json"}


def test_the_second_process_compiles_nothing_that_the_first_has_compiled(config, preempted, resumed):
    if not config[0]:
        pytest.skip("one process has its programs in memory")
    files, requests = resumed
    compiled = below(preempted, COMPILED)
    assert any(name.startswith("jit__update_program") for name in compiled)
    read = {path.rpartition("/")[2] for method, path, query in requests if query.get("alt") == "media"}
    # Programs for some numbers of prompts may not be needed again.
    for kind in ("jit__update", "jit__generate", "jit__prefill"):
        assert any(name in read for name in compiled if name.startswith(kind)), kind
    assert {name for name in below(files, COMPILED).keys() - compiled.keys() if "_program" in name} == set()


def test_an_existing_run_is_refused(resumed, config, run_micro):
    with pytest.raises(ConfigError, match=rf"run_dir={RUN} already holds a run; resume it with --resume"):
        run_micro(config[1])


def test_commands_read_a_run_in_a_bucket(resumed, finished, rows, tmp_path):
    """Weights, scores, rollouts and the model folder equal the local run's."""
    assert_equal_weights(map(find_policy, (RUN, str(finished.run_dir))))
    scores = [
        evaluate(str(where), rows=rows, overrides=["eval.prompts=2"]).scores
        for where in (RUN, finished.run_dir)
    ]
    assert scores[0] == scores[1]
    assert (
        len(score(f"{RUN}/rollouts", ["exact"], workers=0).rows) == 36
    )  # three files of three groups of four
    assert convert(RUN, "gs://runs/converted").files == ("config.json", "model.safetensors", "tokenizer.json")
    convert(str(finished.run_dir), str(tmp_path / "converted"))
    written = (path_of("gs://runs/converted") / "model.safetensors").read_bytes()
    assert written == (tmp_path / "converted" / "model.safetensors").read_bytes()


def test_a_folder_without_a_run_or_model_is_refused(storage_server):
    with pytest.raises(ConfigError, match=r"gs://runs/nothing is neither a run"):
        find_policy("gs://runs/nothing")


def test_a_model_in_a_bucket_is_trained_evaluated_and_converted_as_a_local_one(
    bucket, model, micro, run_micro, rows, tmp_path
):
    """Resuming does not need its weights, which are deleted then."""
    bucket.store(Path(model), "gs://bucket/model")
    small = ["eval.prompts=2", "data.max_prompt_tokens=4", "sampling.max_response_tokens=6"]
    trained, scores, written = [], [], []
    for source in (model, "gs://bucket/model"):
        trained.append(run_micro(micro(model__source=source, steps=1, checkpoint__every_steps=1)))
        scores.append(evaluate(source, rows=rows, overrides=small).scores)
        folder = tmp_path / str(len(written))
        convert(source, str(folder))
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert_equal_weights(run.policy for run in trained)
    assert scores[0] == scores[1]
    assert written[0] == written[1]
    del bucket.buckets["bucket"]["model/model.safetensors"]
    sources = zip(trained, (model, "gs://bucket/model"), strict=True)
    settings = {"steps": 2, "checkpoint__every_steps": 1}
    assert_equal_weights(
        run_micro(micro(run.run_dir, model__source=source, **settings), resume=True).policy
        for run, source in sources
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_dir": "gs://no-such-bucket/run"}, "^run_dir=gs://no-such-bucket/run: "),
        ({"compilation_cache": "gs://no-such-bucket/x"}, "^compilation_cache=gs://no-such-bucket/x: "),
        ({"run_dir": "s3://bucket/run"}, "^run_dir=s3://bucket/run: .*gs://"),
        ({"log__tensorboard": True}, r"^log.tensorboard=true with run_dir=gs://bucket/run: "),
    ],
)
def test_errors_of_buckets_come_before_the_model_is_loaded(bucket, micro, run_micro, changes, message):
    """The model does not exist, which would be another error."""
    config = micro(**{"run_dir": "gs://bucket/run", "model__source": "shipped:nothing", **changes})
    with pytest.raises(ConfigError, match=message):
        run_micro(config)
    assert bucket.files("gs://bucket") == {}


def test_a_bucket_without_write_access_is_refused_by_its_key(bucket, micro, run_micro):
    bucket.granted = {"storage.buckets.get", "storage.objects.list", "storage.objects.get"}
    with pytest.raises(ConfigError, match=r"^run_dir=gs://bucket/run: writing to .*storage\.objects\.create"):
        run_micro(micro("gs://bucket/run"))


def test_a_run_whose_lease_was_taken_over_writes_nothing_more(bucket, micro, run_micro, rows, monkeypatch):
    """As after a pause longer than its lease: before it writes, it finds the lease of another run."""
    monkeypatch.setattr(locks, "RENEW_S", 1e6)
    theirs = json.dumps({"pid": 7, "host": "far", "since": "then", "key": "theirs"}).encode()
    before = {}

    def taken_over(step, metrics):
        if step == 1:
            bucket.buckets["bucket"]["run/.lock"] = (theirs, next(bucket.generations))
            monkeypatch.setattr(locks, "LEASE_S", -1.0)
            before.update(bucket.files("gs://bucket/run"))

    never = {"checkpoint__every_steps": 0, "checkpoint__keep_best": False}
    config = micro("gs://bucket/run", **never, log__rollouts_every_steps=1, eval__every_steps=1)
    with pytest.raises(LockLostError, match="process 7 on far since then"):
        run_micro(config, eval_rows=rows, on_step=taken_over)
    assert b"theirs" in before["gs://bucket/run/.lock"]
    assert bucket.files("gs://bucket/run") == before


def test_an_evaluation_during_which_the_lease_was_lost_is_not_written(
    bucket, micro, run_micro, rows, even_sum, monkeypatch
):
    monkeypatch.setattr(locks, "RENEW_S", 1e6)
    theirs = json.dumps({"pid": 7, "host": "far", "since": "then", "key": "theirs"}).encode()

    def taken_over(sample):
        if sample.prompt.row.get("held_out"):
            bucket.buckets["bucket"]["run/.lock"] = (theirs, next(bucket.generations))
            monkeypatch.setattr(locks, "LEASE_S", -1.0)
        return even_sum(sample)

    with pytest.raises(LockLostError, match="is held by process 7 on far since then now"):
        run_micro(
            micro("gs://bucket/run"), eval_rows=[row | {"held_out": True} for row in rows], reward=taken_over
        )
    assert not any("evaluations" in name for name in bucket.files("gs://bucket/run"))
