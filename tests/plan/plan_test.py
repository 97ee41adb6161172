"""`dapo-jax plan` from shapes: the published configurations, and the output."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dapo_jax.cli import main
from dapo_jax.config import load_config
from dapo_jax.plan.output import as_data, show
from dapo_jax.plan.plan import plan
from dapo_jax.plan.topologies import parse

CONFIGS = Path(__file__).parents[2] / "configs"
LARGE = ["dapo_qwen2.5_32b", "dapo_qwen2.5_32b_early", "dapo_qwen2.5_7b", "gsm8k_qwen3_0.6b"]


@pytest.mark.parametrize("name", LARGE)
def test_every_configuration_of_a_large_run_is_planned_from_shapes(name):
    made = plan(load_config(CONFIGS / f"{name}.yaml"))
    json.dumps(as_data(made))
    # All devices together have 12 bytes per parameter, and a little more for arrays that are not sharded.
    assert 12 <= made.resident.state * made.sizes.devices / made.decoder.parameters < 12.5
    assert made.fits


def test_the_32b_run_by_hand():
    """Weights in bfloat16 over 4 chips: 32,763,876,352 x 2 / 4 bytes, and norms in float32. A cached token: 2 x 64 layers x 8 x 128
    x 2 bytes; a sampler on each of 32 hosts."""
    made = plan(load_config(CONFIGS / "dapo_qwen2.5_32b.yaml"))
    norms = (64 * 2 + 1) * 5120
    assert made.resident.weights == (made.decoder.parameters - norms) // 2 + 4 * norms
    assert as_data(made)["cached_token_bytes"] == 262_144
    assert (made.sizes.samplers, made.sizes.devices) == (32, 128)


def test_a_layer_with_a_window_keeps_the_pages_of_its_window():
    """Gemma 3 1B with responses of 8,192 tokens after prompts of 512: 8,704 tokens in 136 pages of 64. In 22 of 26 layers, a call of 16 steps reads and writes
    512 + 16 - 1 = 527 tokens. They are in 1 + 9 pages if the first is the last of its page. So a response needs 4 x 136 + 22 x 10 = 764 pages instead of
    26 x 136 = 3,536, which is 0.216 of them. A token of a layer has a key and a value of 256 numbers of 2 bytes."""
    changes = ["sampling.max_response_tokens=8192", "batch.row_tokens=8704"]
    made = plan(load_config(CONFIGS / "gsm8k_gemma3_1b.yaml", ["parallel.fsdp=1", *changes]))
    page = 64 * 2 * 256 * 2
    assert made.response_bytes == 764 * page
    assert made.response_bytes <= 0.35 * 3536 * page
    assert made.cache_bytes == 256 * 764 * page
    assert 0 <= made.resident.decode_state - made.cache_bytes < 1.01 * 256 * 4 * made.decoder.vocab_rows
    assert as_data(made)["cached_token_bytes"] == 26 * 2 * 256 * 2


def test_a_cached_token_of_deepseek_v3_has_the_size_of_its_latents(tmp_path, capsys):
    """61 layers have a latent of 512 numbers and a rotated key of 64, of 2 bytes each: 70,272 bytes, whatever the number of devices along `tensor`. The keys and
    values of 128 heads would have 128 x (128 + 64 + 128) = 40,960 numbers in each layer."""
    described = {
        "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "max_position_embeddings": 163_840,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    changes = [f"model.source={tmp_path}", "model.compute_dtype=bfloat16", "parallel.fsdp=1"]
    made = plan(load_config("quickstart", changes))
    assert as_data(made)["cached_token_bytes"] == 61 * 576 * 2 == 70_272
    assert made.token_bytes == {0: 70_272}
    assert made.cache_bytes == 70_272 * made.pages.tokens
    show(made, Console(width=200))
    printed = capsys.readouterr().out
    assert re.search(r"one cached token, on all devices of a sampler\W+68\.6 KiB", printed)


def test_layers_that_read_the_keys_of_earlier_layers_have_no_cache():
    """Gemma 4 E4B with 8,192 tokens. Of 42 layers, the first 24 have keys and values: 20 with a window of 512 tokens (2 heads of 256), and 4 without (2 heads of 512). In
    bfloat16, a token needs 20 x 2 x 2 x 256 x 2 = 40 KiB and 4 x 2 x 2 x 512 x 2 = 16 KiB. A response keeps all tokens in the latter, and as above, 10 pages of 64 in the
    former: 0.34 of a full cache."""
    changes = [
        "sampling.max_response_tokens=7680",
        "batch.row_tokens=8192",
        "parallel.fsdp=1",
        "parallel.tensor=1",
        "parallel.sampler_tensor=1",
        "batch.rows_per_microbatch=4",
    ]
    made = plan(load_config(CONFIGS / "gsm8k_gemma4_e4b_lora.yaml", changes))
    assert made.response_bytes == (8192 * 16 + 10 * 64 * 40) * 1024
    assert made.response_bytes <= 0.4 * 8192 * 56 * 1024
    assert as_data(made)["cached_token_bytes"] == 56 * 1024


def test_the_table_with_embeddings_of_the_layers_is_split_over_the_devices_of_a_sampler():
    """Gemma 4 E4B on 8 devices: rows of the table over tensor 2, columns over data 4. Three kinds of small matrices are whole, and norms and factors are in float32."""
    mesh = [
        "parallel.fsdp=4",
        "parallel.tensor=2",
        "parallel.sampler_tensor=2",
        "batch.rows_per_microbatch=4",
    ]
    changes = ["lora.rank=0", *mesh]
    made = plan(load_config(CONFIGS / "gsm8k_gemma4_e4b_lora.yaml", changes))
    table, whole = 262_144 * 42 * 256, 2560 * 42 * 3 * 256
    in_float32 = 42 * (5 * 2560 + 1) + 35 * 256 + 7 * 512 + 20 * 256 + 4 * 512 + 2560 + 256
    others = made.decoder.parameters - table - whole - in_float32
    assert made.resident.weights == 2 * (table // 8 + whole + others // 2) + 4 * in_float32


def test_muon_has_one_moment_for_a_matrix():
    """4 bytes per element of a layer's matrices, 8 of other parameters. Besides, two step counts and three coefficients of 4 bytes."""
    names = ("adamw", "muon")
    made = [plan(load_config("quickstart", ["parallel.fsdp=1", f"optimizer.name={name}"])) for name in names]
    (adamw, muon), decoder = (each.resident for each in made), made[0].decoder
    heads = (2 * decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim
    matrices = decoder.layers * decoder.embed_dim * (heads + 3 * decoder.mlp_dim)
    assert muon.moments == adamw.moments - 4 * matrices + 4 * (1 + 3)
    assert muon.state - muon.moments == adamw.state - adamw.moments


def test_the_command_writes_tables_or_json(capsys):
    name = str(CONFIGS / "dapo_qwen2.5_32b.yaml")
    assert main(["plan", name, "--response-tokens", "5000,4000", "--informative", "0.25"]) == 0
    printed = capsys.readouterr().out
    assert "train state (parameters and moments)" in printed
    assert "2 waves of 1536 prompts" in printed
    assert main(["plan", name, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    # Weights and two moments in float32.
    assert data["checkpoint_bytes"] == 12 * data["model"]["parameters"]
    assert data["work"]["response_mean"] == 20480
    assert data["schema_version"] == 8
    assert [data[key] for key in ("fits", "roofline", "chip_hours")] == [None] * 3


def test_a_slice_gives_the_roofline_and_chip_hours():
    """Nothing is compiled, so the times are without collectives. All steps run on 8 chips."""
    config = load_config(CONFIGS / "gsm8k_qwen3_0.6b.yaml")
    found = replace(plan(config), topology=parse("v5e:2x4"))
    data = as_data(found)
    seconds = sum(phase["seconds"] for phase in data["roofline"]["phases"])
    assert data["roofline"]["step_s"] == pytest.approx(seconds)
    assert data["chip_hours"] == pytest.approx(config.steps * seconds * 8 / 3600)
    assert 0 < data["roofline"]["mfu_bound"] < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v5p-257"], "v5p-256"),
        (["--topology", "v5e:2x2"], r"pip install -e '.[tpu]'"),
        (["--sweep"], "--topology"),
        (["--network", "400"], "--topology h100:16"),
        (["--informative", "0"], "--informative=0"),
        (["--turns", "2"], "environment.source"),
    ],
)
def test_a_wrong_option_is_one_message(options, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert main(["plan", str(CONFIGS / "dapo_qwen2.5_32b.yaml"), *options]) == 2
    assert message in capsys.readouterr().err
