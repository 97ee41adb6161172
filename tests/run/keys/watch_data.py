"""Watchers of `data`: they see the texts of prompts. A wave has three."""

from tests.run.keys.looking import by_length, refusal
from tests.run.keys.watching import differs, watch


def path(name):
    return f"questions/{name}.jsonl"


def sums(plus, count=3):
    """The prompts of a file of sums."""
    return [f"{n}+{plus}" for n in range(count)]


TRAIN, OTHER, TEST, LONG, SUMS = (
    {"source": "jsonl", "path": path(name)} for name in ("train", "other", "test", "long", "sums")
)
IN_ORDER = {
    "data.source": "jsonl",
    "data.path": path("train"),
    "data.shuffle": False,
    "eval.datasets": [TEST],
}
OPTIONS = {"prompt": "question", "answer": "solution"}
CHAT = {**IN_ORDER, "model.source": "chat_model", "data.chat": True, "data.max_prompt_tokens": 100}
DATED = {**CHAT, "model.source": "dated_model"}
"""A chat template that prints the day and `mark`."""
MIXTURE = {"data.source": "mixture", "data.shuffle": False, "eval.datasets": [TEST]}
ASKED = "<|im_start|>user\n0+1<|im_end|>\n<|im_start|>assistant\n"


def texts(look):
    return look.texts()


def first_text(look):
    return look.texts()[0]


def order(look):
    """The answers of the given rows in the order in which these are asked, two epochs of four."""
    rows = [{"prompt": f"{n}+0", "answer": f"{n}"} for n in range(4)]
    return [group.prompt.answer for group in look.collected(prompts=rows, reward=by_length).sampled]


def held_out(look):
    return look.held_out()


WATCHERS = [
    watch(
        "data.source",
        texts,
        ("jsonl", sums(1)),
        ("gsm8k", sums(3)),
        also={**IN_ORDER, "data.path": path("sums")},
    ),
    watch("data.path", texts, (path("train"), sums(1)), (path("other"), sums(5)), also=IN_ORDER),
    watch("data.source_options", texts, ({}, sums(1)), (OPTIONS, ["1+0", "1+1", "1+2"]), also=IN_ORDER),
    watch(
        "data.mixture",
        lambda look: set(look.texts()),
        ([TRAIN], {*sums(1)}),
        ([OTHER], {*sums(5)}),
        also=MIXTURE,
    ),
    watch(
        "data.on_bad_row",
        refusal(texts),
        ("error", "ConfigError"),
        ("skip", ""),
        also={**IN_ORDER, "data.path": path("bad")},
    ),
    watch(
        "data.deduplicate",
        texts,
        (True, ["0+5", "1+4", "0+5", "1+4"]),
        (False, ["0+5", "1+4", "0+5", "0+5"]),
        also={**IN_ORDER, "data.path": path("twice"), "dynamic_sampling.prompts_per_wave": 4},
    ),
    watch("data.train_split", texts, ("train", sums(1)), ("train[2:]", ["2+1", "3+1", "2+1"]), also=IN_ORDER),
    watch(
        "data.eval_split",
        held_out,
        ("test", {"both": ["7+1", "8+1"]}),
        ("train[:1]", {"both": ["0+1"]}),
        also={**IN_ORDER, "data.path": "questions/both", "eval.datasets": []},
    ),
    watch(
        "data.prompt_template",
        first_text,
        ("{prompt}", "0+1"),
        ("{prompt}=?", "0+1=?"),
        also={**IN_ORDER, "data.max_prompt_tokens": 9},
    ),
    watch(
        "data.prompt_template",
        held_out,
        ("{prompt}", {"train": ["0+1"]}),
        ("{prompt}=?", {"train": ["0+1=?"]}),
        what="in evaluation",
        also={**IN_ORDER, "data.max_prompt_tokens": 9, "eval.prompts": 1, "eval.datasets": [TRAIN]},
    ),
    watch(
        "data.few_shot",
        first_text,
        ([], "0+1"),
        ([{"prompt": "2+3", "response": "=5"}], "2+3=5\n\n0+1"),
        also={**IN_ORDER, "data.max_prompt_tokens": 40, "model.source": "chat_model"},
    ),
    watch("data.chat", first_text, (False, "0+1"), (True, ASKED), also=CHAT),
    watch(
        "data.system_prompt",
        first_text,
        ("", ASKED),
        ("Add.", f"<|im_start|>system\nAdd.<|im_end|>\n{ASKED}"),
        also=CHAT,
    ),
    watch(
        "data.chat_template_kwargs",
        first_text,
        ({}, "26.07.2024 0+1"),
        ({"mark": "!"}, "26.07.2024! 0+1"),
        also={**DATED, "data.template_date": "2024-07-26"},
    ),
    watch(
        "data.template_date",
        first_text,
        ("2024-07-26", "26.07.2024 0+1"),
        ("2025-01-02", "02.01.2025 0+1"),
        also=DATED,
    ),
    watch(
        "data.shuffle",
        lambda look: order(look) == ["0", "1", "2", "3"] * 2,
        (True, False),
        (False, True),
        also={"dynamic_sampling.prompts_per_wave": 8},
    ),
    watch(
        "data.max_prompt_tokens",
        texts,
        (4, ["0+5", "0+5", "0+5"]),
        (5, ["0+5", "0+1+5", "0+5"]),
        what="in training",
        also={**IN_ORDER, "data.path": path("long")},
    ),
    watch(
        "data.max_prompt_tokens",
        lambda look: [look.run(), look.engine.capacity][1],
        (4, 10),
        (8, 14),
        what="room in a slot",
    ),
    differs("seed", order, 0, 1, what="order of prompts", also={"dynamic_sampling.prompts_per_wave": 8}),
]
