"""Small tokenizers in the files of real models, made by the library `tokenizers` itself."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>")
"""Ids 0, 1, 2 and 3."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = [
    "the end is near, END of text; Question: what is 12 + 34? Answer: 46",
    "日本語のテキスト 終わり héllo",
] * 5


@cache
def byte_level_json():
    """As in Llama 3, Qwen and SmolLM2: byte-level pairs, every byte in the vocabulary, four special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    made.train_from_iterator(_TEXT, trainer)
    return made.to_str()


@cache
def byte_fallback_json():
    """As in Llama 2 and Gemma: spaces become ▁, unknown characters become byte tokens, and the decoder drops the first space."""
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyzEND.:", "EN", "▁E", "▁EN"):
        pieces[piece] = len(pieces)
    made = Tokenizer(
        models.BPE(
            vocab=pieces, merges=[("E", "N"), ("▁", "E"), ("▁", "EN")], unk_token="<unk>", byte_fallback=True
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made.to_str()


def with_beginning(text):
    """The same tokenizer, with Llama 3's way of putting a token before the text."""
    made = Tokenizer.from_str(text)
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 3)]
            ),
        ]
    )
    return made.to_str()


def files_of(tokenizer=None, *, template=CHATML, generation=None, **config):
    """File contents of a folder; `config` goes into tokenizer_config.json."""
    files = {
        "tokenizer.json": tokenizer or byte_level_json(),
        "tokenizer_config.json": json.dumps(
            {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **config}
        ),
    }
    if template is not None:
        files["chat_template.jinja"] = template
    if generation is not None:
        files["generation_config.json"] = json.dumps(generation)
    return {name: content.encode() for name, content in files.items()}


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
