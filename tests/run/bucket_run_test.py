"""A run in a bucket: it is resumed from there alone, and errors name the key."""

import json

import pytest

from dapo_jax.commands import evaluate
from dapo_jax.commands.convert import convert
from dapo_jax.commands.score import score
from dapo_jax.config import ConfigError
from dapo_jax.run.policy import find_policy
from dapo_jax.storage import locks, path_of
from dapo_jax.storage.locks import LockLostError
from dapo_jax.trackers import read_metrics
from tests.run.conftest import assert_equal_weights, learnt

RUN = "gs://runs/micro"


@pytest.fixture(scope="module")
def config(micro, storage_server):
    storage_server.buckets["runs"].clear()
    return micro(RUN, checkpoint__every_steps=2, log__rollouts_every_steps=2)


@pytest.fixture(scope="module")
def preempted(storage_server, config, run_micro, rows):
    """All objects after a run that ended at step 3, one step after its checkpoint."""

    def interrupt(step, metrics):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_micro(config, eval_rows=rows, on_step=interrupt)
    return storage_server.files("gs://runs")


@pytest.fixture(scope="module")
def resumed(preempted, storage_server, config, run_micro, rows):
    run_micro(config, eval_rows=rows, resume=True)
    return storage_server.files("gs://runs")


def below(files, folder):
    return {name.removeprefix(folder + "/"): data for name, data in files.items() if name.startswith(folder)}


def test_the_first_process_left_a_line_past_its_checkpoint(preempted):
    """Resuming must remove it."""
    assert preempted[f"{RUN}/metrics/000000.jsonl"].count(b"\n") == 4  # steps 0 to 3
    assert {name.split("/")[0] for name in below(preempted, f"{RUN}/checkpoints")} == {"2"}


def test_resumed_from_the_bucket_it_equals_the_uninterrupted_local_run(resumed, finished):
    metrics = read_metrics(f"{RUN}/metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert learnt(metrics) == learnt(finished.metrics)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert resumed[f"{RUN}/model/{name}"] == (finished.run_dir / "model" / name).read_bytes()


def test_the_same_files_are_written_as_on_a_disk(resumed, finished):
    """Except metrics and checkpoints."""
    for folder in ("rollouts", "evaluations", "model"):
        local = {
            path.relative_to(finished.run_dir / folder).as_posix(): path.read_bytes()
            for path in (finished.run_dir / folder).rglob("*")
            if path.is_file()
        }
        assert local
        assert below(resumed, f"{RUN}/{folder}") == local
    top = {name.split("/")[0] for name in below(resumed, RUN)}
    assert top == {"checkpoints", "config.yaml", "evaluations", "metrics", "model", "rollouts", "status.json"}


def test_commands_read_a_run_in_a_bucket(resumed, config, run_micro, finished, rows, tmp_path):
    with pytest.raises(ConfigError, match=rf"run_dir={RUN} already contains a run; resume it with --resume"):
        run_micro(config)
    with pytest.raises(ConfigError, match=r"gs://runs/nothing is neither a run"):
        find_policy("gs://runs/nothing")
    assert_equal_weights(*map(find_policy, (RUN, str(finished.run_dir))))
    scores = [
        evaluate(str(where), rows=rows, overrides=["eval.prompts=2"]).scores
        for where in (RUN, finished.run_dir)
    ]
    assert scores[0] == scores[1]
    assert (
        len(score(f"{RUN}/rollouts", ["exact"], workers=0).rows) == 36
    )  # three files of three groups of four
    files = (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
    assert convert(RUN, "gs://runs/converted").files == files
    convert(str(finished.run_dir), str(tmp_path / "converted"))
    written = (path_of("gs://runs/converted") / "model.safetensors").read_bytes()
    assert written == (tmp_path / "converted" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_dir": "gs://no-such-bucket/run"}, "^run_dir=gs://no-such-bucket/run: "),
        ({"run_dir": "s3://bucket/run"}, "^run_dir=s3://bucket/run: .*gs://"),
        ({"log__trackers": ["tensorboard"]}, r"^log.trackers=tensorboard: run_dir=gs://bucket/run: "),
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


@pytest.fixture
def take_over(bucket, monkeypatch):
    """Lets another run take the lease, as after a pause longer than the lease."""
    monkeypatch.setattr(locks, "RENEW_S", 1e6)

    def take():
        theirs = json.dumps({"pid": 7, "host": "far", "since": "then", "key": "theirs"}).encode()
        bucket.buckets["bucket"]["run/.lock"] = (theirs, next(bucket.generations))
        monkeypatch.setattr(locks, "LEASE_S", -1.0)

    return take


def test_a_run_whose_lease_was_taken_over_writes_nothing_more(bucket, take_over, micro, run_micro, rows):
    before = {}

    def taken_over(step, metrics):
        if step == 1:
            take_over()
            before.update(bucket.files("gs://bucket/run"))

    never = {"checkpoint__every_steps": 0, "checkpoint__keep_best": False}
    config = micro("gs://bucket/run", **never, log__rollouts_every_steps=1, eval__every_steps=1)
    with pytest.raises(LockLostError, match="process 7 on far since then"):
        run_micro(config, eval_rows=rows, on_step=taken_over)
    assert b"theirs" in before["gs://bucket/run/.lock"]
    assert bucket.files("gs://bucket/run") == before


def test_an_evaluation_during_which_the_lease_was_lost_is_not_written(
    bucket, take_over, micro, run_micro, rows, even_sum
):
    def taken_over(sample):
        if sample.prompt.row.get("held_out"):
            take_over()
        return even_sum(sample)

    held_out = [row | {"held_out": True} for row in rows]
    with pytest.raises(LockLostError, match="is now held by process 7 on far since then"):
        run_micro(micro("gs://bucket/run"), eval_rows=held_out, reward=taken_over)
    assert not any("evaluations" in name for name in bucket.files("gs://bucket/run"))
