"""Promises of SECURITY.md; damaged files of every kind are in `damaged_files_test.py`."""

import ast
import json
from pathlib import Path

import pytest
import yaml

from dapo_jax.cli import _parser, main
from dapo_jax.config import load_config, to_yaml
from dapo_jax.config.reading import _Loader
from dapo_jax.serving.serve import ServeOptions
from tests.faults.damaged_files_test import model_files

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "dapo_jax").rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in SOURCES}
RUN_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch", "tarfile", "zipfile", "pty", "code"}  # fmt: skip
"""Modules that run code from a file, or that unpack paths."""
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load", "pandas.read_pickle", "np.load", "numpy.load", "np.fromregex", "jax.numpy.load", "jnp.load", "shutil.unpack_archive",
}  # fmt: skip
SECRET = "hf_ThisIsNotToBeSeen0123456789"


def name_of(node):
    return (
        f"{name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    )


def calls():
    return [
        (file, node, name_of(node.func))
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def test_nothing_in_the_package_runs_code_from_a_file():
    """YAML is read with a subclass of `SafeLoader` only, and numpy's own files are not read at all."""
    assert issubclass(_Loader, yaml.SafeLoader)
    safe = ("dapo_jax/config/reading.py", "yaml.load", "Loader=_Loader")
    inside = {"dapo_jax/sandbox/server.py", "dapo_jax/rewards/code_judge.py"}  # run programs inside a sandbox
    found = [
        f"{file}:{node.lineno} {name}"
        for file, node, name in calls()
        if name in CALLS
        and file not in inside
        and (file, name, ", ".join(map(ast.unparse, node.keywords))) != safe
    ]
    found += [
        f"{file}:{node.lineno} shell"
        for file, node, _ in calls()
        if "shell" in {k.arg for k in node.keywords}
    ]
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [
                f"{file}:{node.lineno} {name}"
                for name in names
                if name.split(".")[0] in RUN_CODE or "code_judge" in name.split(".")
            ]
    assert not found, found


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
@pytest.mark.parametrize("inside", [False, True])
def test_pickled_weights_are_refused_and_safetensors_named(suffix, inside, tmp_path, capsys, monkeypatch):
    """The pickle would make a file if anything opened it."""
    monkeypatch.chdir(tmp_path)
    pickled = b"cposix\nsystem\n(S'touch opened'\ntR."
    if inside:
        Path("model").mkdir()
        for name, content in model_files().items():
            if not name.endswith(".safetensors"):
                Path("model", name).write_bytes(content)
        Path("model", f"pytorch_model{suffix}").write_bytes(pickled)
    else:
        Path(f"model{suffix}").write_bytes(pickled)
    assert main(["convert", "model" if inside else f"model{suffix}", "out"]) == 2
    output = capsys.readouterr().err
    assert "pickle" in output
    assert "safetensors" in output
    assert not Path("opened").exists()


def test_the_code_in_a_model_folder_is_never_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = model_files()
    files["modeling.py"] = files["tokenizer.py"] = b"open('opened', 'w')"
    files["tokenizer_config.json"] = json.dumps(
        json.loads(files["tokenizer_config.json"]) | {"auto_map": {"AutoTokenizer": ["tokenizer.Evil", None]}}
    ).encode()
    Path("model").mkdir()
    for name, content in files.items():
        Path("model", name).write_bytes(content)
    assert main(["convert", "model", "out"]) == 0
    described = json.loads(files["config.json"]) | {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}
    Path("model", "config.json").write_text(json.dumps(described))
    assert main(["convert", "model", "again"]) == 2
    assert "auto_map=" in capsys.readouterr().err
    assert not Path("opened").exists()


def test_by_default_the_server_listens_at_this_machine_alone():
    assert ServeOptions().host == _parser().parse_args(["serve", "model"]).host == "127.0.0.1"


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY"])
def test_tokens_are_neither_printed_nor_kept(name, tmp_path, monkeypatch, capsys):
    """Also where a user, or a library's error, has put one into a message."""
    monkeypatch.setenv(name, SECRET)
    monkeypatch.chdir(tmp_path)
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    assert SECRET not in to_yaml(config)
    assert main(["convert", f"hf:{SECRET}/../x", "out"]) == 2
    output = capsys.readouterr().err
    assert SECRET not in output
    assert f"${name}" in output
    with pytest.raises(SystemExit, match="2"):
        main(["train", "quickstart", f"--{SECRET}"])
    output = capsys.readouterr().err
    assert SECRET not in output
    assert f"${name}" in output
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and SECRET in path.read_text(errors="replace")
    ]


@pytest.mark.parametrize("key", ["run_dir", "model.source", "data.path"])
def test_a_password_in_a_place_is_refused_and_not_repeated(key, capsys):
    """It would be written to config.yaml and sent to trackers."""
    override = f"{key}=https://me:{SECRET}@host/x"
    assert main(["config", str(ROOT / "configs" / "quickstart.yaml"), override]) == 2
    output = capsys.readouterr().err
    assert SECRET not in output
    assert f"{key}: found 'https://me:...@host/x', needs a place without a password" in output
