"""The command line of launch/tpu_vm.sh: names of slices, and checks before anything is paid for."""

import pytest

from tests.launch.tpu_vm_test import POD, train


@pytest.mark.parametrize(
    ("typed", "named", "image"),
    [
        ("v4-64", "v4-64", "tpu-ubuntu2204-base"),
        ("v5e-8", "v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5p-256", "v5p-256", "v2-alpha-tpuv5"),
        ("v6e-64", "v6e-64", "v2-alpha-tpuv6e"),
    ],
)
def test_each_generation_has_its_image(laptop, typed, named, image):
    more = ("--reserved", "--create-flag=--network=mine", "--create-flag", "--internal-ips", "--project=p")
    done = laptop.launch("tpu_vm.sh", "up", "--name", "pod", "--type", typed, "--zone", "z", *more)
    assert done.returncode == 0, done.stderr
    [words] = [words for words in laptop.commands() if "create" in words]
    assert words[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "pod"]
    assert set(words[6:]) == {
        "--node-id=pod", f"--accelerator-type={named}", f"--runtime-version={image}", "--zone=z", "--reserved", "--quiet",
        "--network=mine", "--internal-ips", "--project=p",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--type=v5p:4x4x8"], "--type=v5p-256"),
        (["--type=v5p"], "--type=v5p has no size"),
        (["--name=Pod_1"], "--name=Pod_1"),
        (["--spot", "--reserved"], "--spot --reserved"),
        (["--sopt"], "--sopt"),
        (["reward.grader=../mine.py:f"], "../mine.py"),
        (["data.source=gsm8k", "data.path=data/gsm8k"], "data/gsm8k, which CONFIG names; add --file"),
        (["sampling.slotz=3"], "sampling.slotz"),
        (["--file=no.txt"], "no.txt"),
        (["--type=v6e-63"], "v6e has 1, 4, 8, 16, 32, 64, 128 or 256 chips"),
        # v5p-256 has 128 chips, and each is a device.
        (["parallel.fsdp=256"], "need 256 devices, but --type=v5p-256 has 128"),
        (["parallel.tensor=3"], "need a multiple of 3 devices, but --type=v5p-256 has 128"),
        (["log.wandb=true"], "log.wandb=true needs WANDB_API_KEY"),
        (["log.wandb=true", "--extras=gcs,tpu"], "needs the extra wandb on the workers"),
    ],
)
def test_errors_end_the_command_before_anything_is_paid_for(laptop, words, message):
    done = train(laptop, *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert laptop.calls("gcloud") == []


@pytest.mark.parametrize(
    ("words", "dry"),
    [
        (("--type=v5p-384", "parallel.fsdp=192"), []),
        (("--type=v5e-8", "parallel.tensor=2"), ["--dry-run"]),
        (("--type=v4-8", "parallel.fsdp=4"), ["--dry-run"]),
        (("--type=v4-8", "parallel.fsdp=8"), ["--dry-run"]),
        (("log.wandb=true",), []),
    ],
)
def test_slices_meshes_and_trackers_that_fit_are_accepted(laptop, words, dry):
    """v5p-384 has 192 devices. On v4 the number depends on the version of libtpu, so any is accepted."""
    done = train(laptop, *words, *dry, WANDB_API_KEY="key")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND= must be one of train"),
        (["train", *POD, "run_dir=gs://b/x"], "CONFIG is missing"),
        (["down", *POD, "configs/quickstart.yaml"], "down does not accept configs/quickstart.yaml"),
        (["status", "--name=pod"], "--zone is needed"),
        (["status", "--name"], "--name needs a value"),
    ],
)
def test_misuse_is_reported(laptop, words, message):
    done = laptop.launch("tpu_vm.sh", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert laptop.calls("gcloud") == []
