"""Matrices in MXFP4: their values against those of transformers, bit for bit, and tensors that do not fit."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.models.mxfp4 import dequantized
from dapo_jax.models.safetensors_files import SafetensorsFolder

GOLDEN = Path(__file__).parents[1] / "golden" / "families" / "gpt_oss_mxfp4"
EXPECTED = load_file(GOLDEN / "expected.safetensors")
DOWN = "model.layers.1.mlp.experts.down_proj"


def test_values_are_exact():
    """The example has every code in both halves of a byte, and scales from 2^-126 to 2^123."""
    blocks, scales, values = (EXPECTED[f"example.{part}"] for part in ("blocks", "scales", "values"))
    bits = dequantized(blocks, scales).swapaxes(1, 2).view(np.uint32)
    np.testing.assert_array_equal(bits, values.view(np.uint32))


def test_matrices_of_a_file_have_inputs_before_outputs():
    file = SafetensorsFolder(GOLDEN)
    wholes = {name: whole for name, whole in EXPECTED.items() if name.startswith("dequantized.")}
    assert len(wholes) == 4
    for key, whole in wholes.items():
        name = key.replace("dequantized", "model")
        assert file.shapes[name] == whole.shape
        for cut in ((slice(None),) * 3, (slice(1, 3), slice(5, 20), slice(1, 31, 2))):
            np.testing.assert_array_equal(file.read(name, cut), whole[cut], err_msg=name)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("_scales", None, rf"{DOWN} in MXFP4 .* _blocks \(4, 32, 1, 16\) and _scales None; it needs"),
        ("_blocks", None, rf"{DOWN} in MXFP4 .* _blocks None and _scales \(4, 32, 1\)"),
        ("_blocks", lambda old: old[..., :8], rf"{DOWN} in MXFP4 .* _blocks \(4, 32, 1, 8\) and _scales \(4, 32, 1\)"),
        ("_scales", lambda old: old[:, 1:], r"_scales \(4, 31, 1\); it needs"),
        ("_scales", lambda old: old.astype(np.int8), f"{DOWN}_scales has type I8"),
        ("_bias", lambda old: old.view(np.uint8), f"{DOWN}_bias has type U8, which is not supported"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(suffix, change, message, tmp_path):
    tensors = load_file(GOLDEN / "model.safetensors")
    old = tensors.pop(DOWN + suffix)
    if change is not None:
        tensors[DOWN + suffix] = np.ascontiguousarray(change(old))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        SafetensorsFolder(tmp_path)
