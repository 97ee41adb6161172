"""launch/gke_xpk.sh with XPK and kubectl stubbed."""

import shutil

import pytest

from tests.launch.clients import ASYNC_GATHERS, ROOT, TOKENS, printed

JOB = ("--name=pod", "--cluster=big", "--zone=us-east5-a", "--project=mine")
RUN = ("configs/quickstart.yaml", "run_dir=gs://bucket/pod")


def train(laptop, *more, **environment):
    shutil.copy(ROOT / "pyproject.toml", laptop.work)
    return laptop.launch("gke_xpk.sh", "train", *JOB, "--type=v5p-256", *RUN, *more, **environment)


def words_of(laptop):
    (call,) = laptop.calls("xpk")
    return call["words"]


def pods_environment(laptop):
    """A bare name takes its value from the environment of XPK."""
    return (laptop.folder / "home" / ".cache/dapo_jax/launch/pod.env").read_text().splitlines()


def test_train_submits_one_workload_that_installs_and_resumes(laptop):
    """The command is one line, for XPK's YAML. XPK restarts on 42, 127 to 255 and the listed codes: all but 0 and 2."""
    done = train(laptop, "--slices=2", "--restarts=7", 'sampling.stop=["a b"]', "parallel.data=4")
    assert done.returncode == 0, done.stderr
    program = (
        "pip install --quiet --constraint constraints/py312.txt '.[gcs,hub,tpu,wandb]' || exit 1; "
        "dapo-jax train configs/quickstart.yaml run_dir=gs://bucket/pod 'sampling.stop=[\"a b\"]' parallel.data=4 --resume"
    )
    assert [word for word in words_of(laptop) if not word.startswith("--env-file=")] == [
        "workload", "create", "--workload=pod", "--cluster=big", "--zone=us-east5-a", "--project=mine", "--tpu-type=v5p-256",
        "--num-slices=2", "--base-docker-image=python:3.12", "--script-dir=.", "--max-restarts=7",
        "--restart-on-exit-codes=1,3-126", f"--command={program}",
    ]  # fmt: skip
    between = "--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true"
    assert pods_environment(laptop) == [
        "DAPO_JAX_DISTRIBUTED=1",
        f"LIBTPU_INIT_ARGS={ASYNC_GATHERS} {between}",
    ]


def test_an_image_is_not_installed_into_and_own_flags_of_the_compiler_reach_the_pods(laptop):
    flags = "LIBTPU_INIT_ARGS=--xla_mine=1 --xla_too=2"
    done = train(laptop, "--image=gcr.io/mine/dapo:1", LIBTPU_INIT_ARGS=flags.partition("=")[2])
    assert done.returncode == 0
    assert pods_environment(laptop) == ["DAPO_JAX_DISTRIBUTED=1", flags]
    words = words_of(laptop)
    assert "--docker-image=gcr.io/mine/dapo:1" in words
    assert not [word for word in words if "script-dir" in word or "base-docker" in word]
    assert words[-1] == f"--command=dapo-jax train {' '.join(RUN)} --resume"


def test_tokens_are_named_and_not_shown(laptop):
    done = train(laptop, **TOKENS)
    assert done.returncode == 0, done.stderr
    flags = f"LIBTPU_INIT_ARGS={ASYNC_GATHERS}"
    assert pods_environment(laptop) == ["DAPO_JAX_DISTRIBUTED=1", flags, "HF_TOKEN", "WANDB_API_KEY"]
    dry = train(laptop, "--dry-run", **TOKENS)
    assert printed(dry.stdout) == laptop.commands()
    assert "SECRET" not in done.stdout + done.stderr + dry.stdout + dry.stderr + str(laptop.calls())
    kept = [path for path in laptop.folder.rglob("*") if path.is_file() and b"SECRET" in path.read_bytes()]
    assert kept == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slices=2", "parallel.data=3"], "--slices=2, parallel.data=3:"),  # only `data` may span slices
        # Two slices of 128 devices.
        (["--slices=2", "parallel.data=2", "parallel.fsdp=32"], "--type=v5p-256 --slices=2 has 256"),
        (["--type=v6e-63"], "--type=v6e-63"),
        (["--spot"], "--spot is not an option"),
    ],
)
def test_refused_command_lines_submit_nothing(laptop, words, message):
    done = train(laptop, *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert laptop.commands() == []
