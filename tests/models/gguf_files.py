"""Writes small GGUF files with the names, row order and metadata of llama.cpp's converter."""

import gguf
import numpy as np
from gguf import GGUFWriter

from dapo_jax.models.tensors import exported

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("1 2", "12 3", "Ġ t", "h e", "Ġt he", "' S")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def byte_characters():
    """GPT-2's 256 characters for the bytes: printable Latin-1 characters are themselves, the others begin at U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


TOKENS = (
    *SPECIALS,
    *byte_characters(),
    *(merge.replace(" ", "") for merge in MERGES),
    "<think>",
    "[PAD266]",
    "[PAD267]",
)
TYPES = (3, 3, 3, *[1] * (256 + len(MERGES)), 4, 5, 5)


def interleaved(weight, heads):
    """Interleaves the rows i and i + dim / 2 of each head, index by index: the inverse of the reader."""
    dim = weight.shape[0] // heads
    rows = [
        head * dim + half * dim // 2 + i for head in range(heads) for i in range(dim // 2) for half in (0, 1)
    ]
    return weight[rows]


GEMMA_TOKENS = {
    "<pad>": (3, -1000.0), "<eos>": (3, -1000.0), "<bos>": (3, -1000.0), "<unk>": (3, -1000.0), "<end_of_turn>": (3, -1000.0),
    "\n": (4, -1000.0), "\n\n": (4, -1000.0), "  ": (4, -1000.0), "   ": (4, -1000.0), "<b>": (4, -1000.0),
    **{f"<0x{byte:02X}>": (6, 0.0) for byte in range(256)},
    **{token: (1, -float(rank)) for rank, token in enumerate(("ab", "bc", "abc", "▁a", "▁ab", "▁", "a", "b", "c"))},
}  # fmt: skip
"""A vocabulary like Gemma's: the type and score of each token. The scores of ordinary tokens fall by 1, and of others are not used."""
GEMMA = {
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": list(GEMMA_TOKENS),
    "tokenizer.ggml.token_type": [kind for kind, _ in GEMMA_TOKENS.values()],
    "tokenizer.ggml.scores": [score for _, score in GEMMA_TOKENS.values()], "tokenizer.ggml.merges": None,
    "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_space_prefix": False, "tokenizer.chat_template": None,
}  # fmt: skip
"""The metadata of the tokenizer in a Gemma file."""
ARCHITECTURES = {"gemma3_text": "gemma3"}


def write_gguf(path, config, params, *, pre="smollm", kinds=(), extra=None, tensors=None, types=TYPES):
    """`kinds` maps the end of a tensor's name to its stored type. `extra` adds or replaces metadata, and None removes a key."""
    family, extra = ARCHITECTURES.get(config.family, config.family), dict(extra or {})
    writer = GGUFWriter(str(path), extra.pop("general.architecture", family))
    metadata = {
        f"{family}.block_count": config.layers,
        f"{family}.context_length": config.max_positions,
        f"{family}.embedding_length": config.embed_dim,
        f"{family}.feed_forward_length": config.mlp_dim,
        f"{family}.attention.head_count": config.heads,
        f"{family}.attention.head_count_kv": config.kv_heads,
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.attention.value_length": config.head_dim,
        f"{family}.rope.freq_base": float(config.ropes[0].theta),
        f"{family}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.merges": list(MERGES),
        **({f"{family}.attention.sliding_window": max(config.windows)} if config.windows else {}),
        **extra,
    }
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.layers)
    for tensor in exported(config, params):
        name = names.get_name(tensor.name, (".weight", ".bias"))
        value = np.ascontiguousarray(tensor.fetch())
        if name.endswith("norm.weight"):
            value = value + np.float32(config.norm_offset)
        if family == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            value = interleaved(value, config.heads if "attn_q" in name else config.kv_heads)
        kind = next((kind for end, kind in dict(kinds).items() if name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
