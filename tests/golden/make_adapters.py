"""Makes golden adapters of the golden models, and the results of transformers and PEFT for both.

Run by hand, in an environment with torch, transformers and peft (last: torch 2.13.0, transformers 5.24.0, peft 0.21.2, on a CPU), after `make_golden.py`:

    python tests/golden/make_adapters.py

The folder `adapter` of a golden model then holds adapter_config.json and adapter_model.safetensors as PEFT writes them, and golden.safetensors with `tokens`,
`logits` and `greedy` as `make_golden.py` has them. `tests/models/adapter_folder_test.py` opens our own adapters with PEFT, if it is installed.
"""

import torch
import transformers
from make_golden import HERE, first_clear
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {"qwen2": (4, 6, ALL), "qwen3": (3, 12, ALL), "llama": (2, 8, ALL[:4])}
"""Golden model -> rank, alpha, target modules."""


def random_adapter(name, seed):
    rank, alpha, targets = CASES[name]
    base = transformers.AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32).eval()
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, config).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "lora_" in path:
                weight.copy_(torch.randn(weight.shape, generator=random) * weight.shape[1] ** -0.5)
    return model


def make(name):
    model, expected = first_clear(name, lambda seed: random_adapter(name, seed))
    model.peft_config["default"].base_model_name_or_path = f"tests/golden/{name}"
    folder = HERE / name / "adapter"
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    save_file(expected, folder / "golden.safetensors")


if __name__ == "__main__":
    for name in CASES:
        make(name)
