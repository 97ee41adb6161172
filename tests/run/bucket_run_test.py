"""A run in a bucket: what a machine with an empty disk goes on from, and what is said when it cannot."""

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
    """Trains in a process whose home and working folder are empty at first; with `last` it dies after that step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(replace(config, compilation_cache=COMPILED)))
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.run.bucket_process", "config.yaml", *map(str, last)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == (9 if last else 0), done.stderr


@pytest.fixture(scope="module", params=["one process", pytest.param("two processes", marks=pytest.mark.slow)])
def config(request, micro, storage_server):
    """In one process for speed; in two, each with a disk of its own and the first killed, for certainty."""
    storage_server.buckets["runs"].clear()
    made = micro(RUN, checkpoint__every_steps=2, log__rollouts_every_steps=2)
    return request.param == "two processes", made


@pytest.fixture(scope="module")
def preempted(storage_server, config, run_micro, rows, tmp_path_factory):
    """All objects after a run that ended at step 3, one past the checkpoint."""
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
    """All objects after it has gone on to the end from what the bucket held; and what was asked for then."""
    before = len(storage_server.requests)
    killed, made = config
    if killed:
        one_process(made, tmp_path_factory.mktemp("second") / "disk")
    else:
        run_micro(made, eval_rows=rows, resume=True)
    return storage_server.files("gs://runs"), storage_server.requests[before:]


def below(files, folder):
    return {name.removeprefix(folder + "/"): data for name, data in files.items() if name.startswith(folder)}


def test_the_first_process_left_a_line_past_its_checkpoint(preempted):
    """Otherwise the cut below would have nothing to cut."""
    assert preempted[f"{RUN}/metrics/000000.jsonl"].count(b"\n") == 4  # steps 0 to 3
    assert {name.split("/")[0] for name in below(preempted, f"{RUN}/checkpoints")} == {"2"}


def test_resumed_from_the_bucket_alone_it_is_the_uninterrupted_local_run(resumed, finished):
    """Every metric but the clock's, and the trained weights bit for bit."""
    metrics = read_metrics(f"{RUN}/metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert learnt(metrics) == learnt(finished.metrics)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert resumed[0][f"{RUN}/model/{name}"] == (finished.run_dir / "model" / name).read_bytes()


def test_the_same_files_are_written_as_on_a_disk(resumed, finished):
    """But for the metrics' objects, and the checkpoint at every step that the local run keeps."""
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
        pytest.skip("of one process the programs are in its memory")
    files, requests = resumed
    compiled = below(preempted, COMPILED)
    assert any(name.startswith("jit__update_program") for name in compiled)
    read = {path.rpartition("/")[2] for method, path, query in requests if query.get("alt") == "media"}
    # Not every one: prompts are filled in by as many as there are at once, and a number of the first steps may not come again.
    for kind in ("jit__update", "jit__generate", "jit__prefill"):
        assert any(name in read for name in compiled if name.startswith(kind)), kind
    assert {name for name in below(files, COMPILED).keys() - compiled.keys() if "_program" in name} == set()


def test_an_existing_run_is_refused(resumed, config, run_micro):
    with pytest.raises(ConfigError, match=rf"run_dir={RUN} already holds a run; resume it with --resume"):
        run_micro(config[1])


def test_what_reads_a_run_reads_one_in_a_bucket(resumed, finished, rows, tmp_path):
    """Weights, scores, rollouts and a model folder are those of the local run."""
    found, expected = find_policy(RUN), find_policy(str(finished.run_dir))
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
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


def test_what_is_neither_a_run_nor_a_model_in_a_bucket_is_said(storage_server):
    with pytest.raises(ConfigError, match=r"gs://runs/nothing is neither a run, with config\.yaml and check"):
        find_policy("gs://runs/nothing")


def test_a_model_in_a_bucket_is_trained_evaluated_and_converted_as_one_on_a_disk(
    bucket, model, micro, run_micro, rows, tmp_path
):
    """Nothing of it is written to the run's folder or the working folder on the way."""
    bucket.store(Path(model), "gs://bucket/model")
    results = [
        run_micro(micro(model__source=source, steps=1, checkpoint__every_steps=1))
        for source in (model, "gs://bucket/model")
    ]
    for a, b in zip(*(jax.tree.leaves(result.policy.params) for result in results), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    scores = [
        evaluate(
            source,
            rows=rows,
            overrides=["eval.prompts=2", "data.max_prompt_tokens=4", "sampling.max_response_tokens=6"],
        ).scores
        for source in (model, "gs://bucket/model")
    ]
    assert scores[0] == scores[1]
    for source in (model, "gs://bucket/model"):
        convert(source, str(tmp_path / source.replace("/", "_")))
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / source.replace("/", "_")).iterdir()}
        for source in (model, "gs://bucket/model")
    )
    assert first == second
    # It goes on without the weights, which are gone from the bucket, and as the one on a disk does.
    del bucket.buckets["bucket"]["model/model.safetensors"]
    more = [
        run_micro(
            micro(result.run_dir, model__source=source, steps=2, checkpoint__every_steps=1), resume=True
        )
        for result, source in zip(results, (model, "gs://bucket/model"), strict=True)
    ]
    for a, b in zip(*(jax.tree.leaves(result.policy.params) for result in more), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_dir": "gs://no-such-bucket/run"}, "^run_dir=gs://no-such-bucket/run: asking about the bucket"),
        ({"compilation_cache": "gs://no-such-bucket/x"}, "^compilation_cache=gs://no-such-bucket/x: asking"),
        ({"run_dir": "s3://bucket/run"}, "^run_dir=s3://bucket/run: .* begins with gs://"),
        ({"log__tensorboard": True}, r"^log.tensorboard=true with run_dir=gs://bucket/run: .* cannot be"),
    ],
)
def test_what_cannot_be_is_said_before_the_model_is_loaded(bucket, micro, run_micro, changes, message):
    """The model does not exist: an error about it would come first if it were looked for."""
    config = micro(**{"run_dir": "gs://bucket/run", "model__source": "shipped:nothing", **changes})
    with pytest.raises(ConfigError, match=message):
        run_micro(config)
    assert bucket.files("gs://bucket") == {}


def test_a_bucket_that_may_not_be_written_to_is_said_by_its_key(bucket, micro, run_micro):
    bucket.granted = {"storage.buckets.get", "storage.objects.list", "storage.objects.get"}
    with pytest.raises(ConfigError, match=r"^run_dir=gs://bucket/run: writing to .*storage\.objects\.create"):
        run_micro(micro("gs://bucket/run"))


def test_a_run_whose_lease_was_taken_over_writes_nothing_more(bucket, micro, run_micro, rows, monkeypatch):
    """As one that was stopped for longer than a lease lasts: before it writes it asks, and finds another's lease."""
    monkeypatch.setattr(locks, "RENEW_S", 1e6)
    theirs = json.dumps({"pid": 7, "host": "far", "since": "then", "key": "theirs"}).encode()
    before = {}

    def taken_over(step, metrics):
        if step == 1:
            bucket.buckets["bucket"]["run/.lock"] = (theirs, next(bucket.generations))
            monkeypatch.setattr(locks, "LEASE_S", -1.0)
            before.update(bucket.files("gs://bucket/run"))

    with pytest.raises(LockLostError, match="is held by process 7 on far since then now"):
        run_micro(
            micro(
                "gs://bucket/run",
                checkpoint__every_steps=0,
                checkpoint__keep_best=False,
                log__rollouts_every_steps=1,
                eval__every_steps=1,
            ),
            eval_rows=rows,
            on_step=taken_over,
        )
    assert b"theirs" in before["gs://bucket/run/.lock"]
    assert bucket.files("gs://bucket/run") == before


def test_a_lease_that_was_taken_over_during_an_evaluation_keeps_its_problems_from_being_written(
    bucket, micro, run_micro, rows, even_sum, monkeypatch
):
    """The last rollouts before an evaluation are written by this run, the problems of that evaluation would be in the other's."""
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
