"""Wrong files and overrides, and the message about each."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import dapo_jax.config
from dapo_jax.config import (
    BatchConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    LossConfig,
    OptimizerConfig,
    SamplingConfig,
    SftConfig,
    TrainConfig,
    changed_keys,
    load_config,
    load_evaluation,
    to_yaml,
)
from dapo_jax.config.loading import replaced
from dapo_jax.config.reading import read_yaml, write_yaml
from dapo_jax.config.section import leaf_types

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("**/*.yaml"))
KEYS = {schema: sorted(leaf_types(schema)) for schema in (TrainConfig, SftConfig)}


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def message_of(path, *overrides, schema=TrainConfig):
    """The error of a load that must fail: exactly one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, schema=schema)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_with_only_a_run_dir_is_the_recipe(tmp_path):
    assert load_config(write(tmp_path, "run_dir: out\n")) == TrainConfig(run_dir="out")


def test_scientific_notation_is_a_float_and_an_integer_is_one_too(tmp_path):
    text = "run_dir: out\noptimizer: {learning_rate: 1e-4, epsilon: 1E-8, weight_decay: 0}\n"
    config = load_config(write(tmp_path, text), ["optimizer.learning_rate=1e-6", "loss.drop_off_policy=10"])
    assert config.optimizer == OptimizerConfig(learning_rate=1e-6, epsilon=1e-8, weight_decay=0.0)
    assert [type(config.optimizer.weight_decay), type(config.loss.drop_off_policy)] == [float, float]


def test_the_last_override_of_a_key_wins_over_the_file(tmp_path):
    path = write(tmp_path, "run_dir: out\nsteps: 7\n")
    assert load_config(path, ["steps=8", "steps=9"]).steps == 9


def test_yaml_is_read_back_with_the_same_types(tmp_path):
    """Unlike YAML 1.1, 1e-6 is a number and a date is text; 12:30 and 0.5 keep their types."""
    text = "{a: 1e-6, b: '1e-6', c: 2024-07-26, d: 1_000.5, e: .5, f: -.inf, g: 1.e3, h: e5, i: '', j: 0x10, k: '.5', l: 1.2.3}"
    found = read_yaml(text)
    assert found == {
        "a": 1e-6, "b": "1e-6", "c": "2024-07-26", "d": 1000.5, "e": 0.5, "f": -math.inf, "g": 1000.0, "h": "e5", "i": "",
        "j": 16, "k": ".5", "l": "1.2.3",
    }  # fmt: skip
    again = read_yaml(write_yaml(found))
    assert again == found
    assert list(map(type, again.values())) == list(map(type, found.values()))


@pytest.mark.parametrize(
    "text", ["=", "==", "<<", "12:30", "1:30:00", "010", "09", "0b1", "2024-07-26", "5 =", "y"]
)
def test_text_that_yaml_gives_another_meaning_is_text(text, tmp_path):
    """In YAML 1.1, `=` is a default value, `<<` merges a mapping, 12:30 is 750 and 010 is 8."""
    path = write(
        tmp_path, f"run_dir: out\nreward: {{answer_marker: {text}}}\nsampling:\n  stop:\n  - {text}\n"
    )
    config = load_config(path, [f"sampling.stop=[{text}]"])
    assert (config.reward.answer_marker, config.sampling.stop) == (text, [text])
    assert load_config(write(tmp_path, to_yaml(config))) == config
    assert yaml.safe_load(to_yaml(config))["reward"]["answer_marker"] == text or text == "2024-07-26"


def test_a_merge_is_still_a_merge():
    assert read_yaml("a: &x {b: 1}\nc: {<<: *x, d: =}") == {"a": {"b": 1}, "c": {"b": 1, "d": "="}}


def test_text_overrides_are_taken_literally(tmp_path):
    path = write(tmp_path, "run_dir: out\n")
    overrides = [
        "run_dir=2024",
        "data.prompt_template=Q: {prompt} = ?",
        "reward.answer_marker=",
        'data.source="a"',
    ]
    config = load_config(path, overrides)
    assert (config.run_dir, config.reward.answer_marker) == ("2024", "")
    assert config.data == DataConfig(source="a", prompt_template="Q: {prompt} = ?")


def test_null_switches_off_a_key_that_allows_it(tmp_path):
    path = write(tmp_path, "run_dir: out\nloss: {drop_off_policy: 10}\nguard: {max_mismatch_kl: 2}\n")
    config = load_config(path, ["loss.drop_off_policy=null", "guard.max_mismatch_kl=~"])
    assert config == TrainConfig(run_dir="out")


def test_the_supervised_schema_reads_its_own_keys(tmp_path):
    path = write(tmp_path, "run_dir: out\nbatch: {pairs_per_step: 8}\nmax_response_tokens: 9\n")
    config = load_config(path, schema=SftConfig)
    assert (config.batch.pairs_per_step, config.max_response_tokens) == (8, 9)
    assert "batch.pairs_per_step" in message_of(path)


IN_A_FILE = """
smapling: {temperature: 1} -> smapling.temperature; `sampling.temperature`
temperature: 0.5 -> temperature = 0.5; `sampling.temperature`; `eval.temperature`
qqq: 1 -> qqq = 1; top level has; sampling
batch.group_size: 4 -> batch.group_size; nested; batch: group_size: ...
4: 4 -> unknown key 4
seed: {a: 1} -> seed; {'a': 1}; not a section
sampling: {stop: null} -> sampling.stop: found null; write []
sampling: {stop: END} -> sampling.stop: found 'END'; a list of text; [END]
sampling: {stop: [1]} -> sampling.stop[0]: found 1; needs text; '1'
data: {chat_template_kwargs: [1]} -> chat_template_kwargs: found [1]; a mapping
data: {chat_template_kwargs: {1: 2}} -> chat_template_kwargs: found {1: 2}; quote
data: {chat_template_kwargs: {a: {b: .nan}}} -> chat_template_kwargs: found {'a': {'b': nan}}; finite
num_generations: 8 -> num_generations = 8; TRL; `batch.group_size`
actor_rollout_ref: {model: {path: 7}, rollout: {n: 8}} -> actor_rollout_ref.model.path = 7; `model.source`
actor: {x: {}, rollout: {n: 8}} -> actor.rollout.n = 8; `batch.group_size`
trainer: {x: 1, push_to_hub: true} -> trainer.push_to_hub = true; model
sampling: {top_p: 0.9} -> sampling.top_p = 0.9; `eval.top_p`
optimizer: {beta: 0.9} -> optimizer.beta = 0.9; `optimizer.beta1`
ppo_mini_batch_size: 32 -> `batch.groups_per_update`; 32 x 16 responses is 512
overlong_buffer: {enable: true, len: 9} -> `reward.overlong.enabled`
data: {shuffle: 2} -> data.shuffle; found 2; true or false
steps: '3' -> steps; '3'; whole number; remove the quotes: 3
steps: 3.5 -> steps; 3.5; write 3 or 4
seed: 010 -> seed: found '010'; whole number; leading 0 as octal: write 10
data: {few_shot: [{question: a, response: b}]} -> data.few_shot[0].question: found 'a'; its names are prompt, response
loss: {objective: cispo, options: 3} -> loss.options: found 3; changed: leave it out
log: {tensorboard: true, trackers: 3} -> log.tensorboard: found true; leave it out
log: {tensorboard: true, trackers: wandb} -> write log.trackers=['wandb', 'tensorboard']
loss: {drop_off_policy: .nan} -> loss.drop_off_policy; nan; finite number or null
loss: {drop_off_policy: None} -> loss.drop_off_policy; 'None'; write null
run_dir: 2024 -> run_dir; found 2024; quote it: '2024'
run_dir: 1e-6 -> run_dir; found 1e-06; quote it as it is
run_dir: ~ -> run_dir; found null; in quotes if it begins with one of ~
run_dir: ! -> run_dir; found null; in quotes if it begins with one of ~ !
run_dir: : -> line 1, column 10; quote ':'
run_dir: @ -> line 1, column 10; quote ':'
run_dir: no -> run_dir; found false; quote the word
steps: 12:30 -> steps; '12:30'; whole number
run_dir: ' ' -> run_dir; ' '; a name
model: {remat: off} -> model.remat; found false; quote the word
seed: null -> seed; found null; leave the key out
sampling: 3 -> sampling; found 3; `temperature`; indent
sampling: -> sampling; found null; remove the line
"""
OVERRIDDEN = """
seed.a=1 -> seed.a = '1'; set seed
batch.group_sise=8 -> = '8'; `batch.group_size`
sampling.stop_token_ids=3 -> stop_token_ids: found 3; whole numbers; [3]
data.chat_template_kwarg.a=1 -> data.chat_template_kwarg.a = '1'; `data.chat_template_kwargs`
algorithm= -> algorithm: found ''; needs one of dapo, grpo; write one of them, or leave it out
loss.objective.dual_clip=3 -> loss.objective.dual_clip: found 3; {clip: {dual_clip: 3}}
loss.select.frac=0.3 -> loss.select.frac: found 0.3; {high_entropy: {frac: 0.3}}
algorithm.filter_groups.enable=true -> `dynamic_sampling.enabled`
steps=1e3 -> steps; 1000.0; write 1000
optimizer.learning_rate=fast -> 'fast'; write a number, unquoted
seed= -> seed; found null; leave the key out
steps -> key=value
--steps=3 -> --steps=3; write steps=3
steps =3 -> write steps=3
sampling=greedy -> sampling = greedy; whole section; sampling.temperature
reward.overlong=off -> reward.overlong = off; reward.overlong.enabled
steps=[ -> steps: found '['; not YAML; quotes
steps={a: 1, a: 2} -> steps: found '{a: 1, a: 2}'; 'a'; twice
"""
"""The wrong line -> words of the message: key, value, remedy."""


@pytest.mark.parametrize("line", IN_A_FILE.strip().splitlines())
def test_a_wrong_line_of_a_file_is_named_with_key_value_and_remedy(tmp_path, line):
    text, words = line.split(" -> ")
    path = write(tmp_path, ("" if "run_dir" in text else "run_dir: out\n") + text)
    message = message_of(path)
    assert message.startswith(f"{path}: ")
    assert [word for word in words.split("; ") if word not in message] == []


@pytest.mark.parametrize("line", OVERRIDDEN.strip().splitlines())
def test_a_wrong_override_is_named_with_key_value_and_remedy(tmp_path, line):
    override, words = line.split(" -> ")
    message = message_of(write(tmp_path, "run_dir: out\n"), override)
    assert f"override {override!r}: " in message
    assert [word for word in words.split("; ") if word not in message] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run_dir: out\nseed: 1\nsteps: 2\nseed: 3\n", ["line 4", "'seed'", "keep one"]),
        ("run_dir: out\nloss:\n  kl_coef: 0\n  kl_coef: 1\n", ["line 4", "'kl_coef'", "keep one"]),
        ("run_dir: out\nloss: {kl_coef: 1\n", ["line 3", "not YAML", "brackets"]),
        ("run_dir: out\nloss:\n\tkl_coef: 1\n", ["line 3", "not YAML", "tabs"]),
        ("run_dir: !!python/object:os.x 1\n", ["line 1", "os.x"]),
        ("# nothing but a comment\n", ["run_dir: some/folder"]),
        ("- run_dir: out\n", ["a list of 1"]),
        ("3\n", ["found 3"]),
        ("seed: 3\n", ["run_dir is missing", "run_dir=some/folder"]),
    ],
)
def test_a_file_that_is_no_configuration_is_named_with_the_line(tmp_path, text, words):
    path = write(tmp_path, text)
    message = message_of(path)
    assert message.startswith(f"{path}: ")
    assert [word for word in words if word not in message] == []


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"run_dir: \xff\n")
    assert "utf-8" in message_of(path)
    path.write_bytes(b"run_dir: \x00\n")
    assert "#x0000" in message_of(path)


def test_a_missing_file_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "gsm8k.yaml").touch()
    (tmp_path / "countdown.yaml").touch()
    assert f"did you mean {tmp_path / 'gsm8k.yaml'}?" in message_of(tmp_path / "gms8k.yaml")
    assert f"did you mean {tmp_path / 'countdown.yaml'}?" in message_of(tmp_path / "countdown")
    assert "is a folder, needs a file" in message_of(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "give a YAML file, or one of" in message_of(tmp_path / "empty" / "a.yaml")
    assert "no such file (from " in message_of(tmp_path / "nowhere" / "a.yaml")


def test_overrides_must_be_a_list(tmp_path):
    with pytest.raises(ConfigError, match=r"\['steps=3'\]"):
        load_config(write(tmp_path, "run_dir: out\n"), "steps=3")


def test_a_contradiction_names_the_override_that_made_it_and_not_the_others(tmp_path):
    path = write(tmp_path, "run_dir: out\nbatch: {prompts_per_step: 64}\n")
    message = message_of(path, "steps=3", "batch.prompts_per_step=100")
    assert message.startswith(f"{path} with override 'batch.prompts_per_step=100': batch.prompts_per_step")
    path = write(tmp_path, "run_dir: out\ndata: {chat_template_kwargs: [1]}\n")
    assert "chat_template_kwargs: found [1], needs a mapping" in message_of(
        path, "data.chat_template_kwargs.a=1"
    )


@pytest.mark.parametrize("schema", [TrainConfig, SftConfig])
def test_the_resolved_yaml_reads_back_equal(tmp_path, schema):
    kwargs = {"think": False, "date": "1e-4", "tools": [{"name": "null", "n": None}], "b.c": 1}
    template = "Solve: {prompt}\n\n'yes' \"no\" # \\boxed{}\t$x$ é"
    config = schema(
        run_dir="null",
        seed=3,
        data=DataConfig(prompt_template=template, source="1e-4", chat_template_kwargs=kwargs),
        sampling=SamplingConfig(stop=["\n\n", " # 'no'", "1"], stop_token_ids=[3, 0]),
        optimizer=OptimizerConfig(learning_rate=1 / 3, epsilon=1e-17),
    )
    again = load_config(write(tmp_path, to_yaml(config)), schema=schema)
    assert again == config


def test_lists_and_mappings_are_read_from_files_and_overrides(tmp_path):
    path = write(
        tmp_path, 'run_dir: out\nsampling: {stop: ["Q:"]}\ndata: {chat_template_kwargs: {a: {b: 1, c: 2}}}\n'
    )
    config = load_config(path)
    assert (config.sampling.stop, config.data.chat_template_kwargs) == (["Q:"], {"a": {"b": 1, "c": 2}})
    config = load_config(path, ['sampling.stop=["\\n", "A: {"]', "sampling.stop_token_ids=[1, 2]"])
    assert (config.sampling.stop, config.sampling.stop_token_ids) == (["\n", "A: {"], [1, 2])
    assert load_config(path, ["sampling.stop=[]"]).sampling.stop == []
    assert load_config(path, ["data.chat_template_kwargs={x: y}"]).data.chat_template_kwargs == {"x": "y"}


def test_one_name_inside_a_mapping_is_overridden_and_the_others_stay(tmp_path):
    path = write(tmp_path, "run_dir: out\ndata: {chat_template_kwargs: {a: {b: 1, c: 2}, d: 3}}\n")
    overrides = [
        "enable_thinking=false",
        "a.b=x: y",
        "a.b=26 Jul 2024",
        "d=null",
        "tools=[{name: f}]",
        "n.m=1.5",
    ]
    config = load_config(path, [f"data.chat_template_kwargs.{override}" for override in overrides])
    assert config.data.chat_template_kwargs == {
        "a": {"b": "26 Jul 2024", "c": 2},
        "d": None,
        "enable_thinking": False,
        "tools": [{"name": "f"}],
        "n": {"m": 1.5},
    }
    assert load_config(path).data.chat_template_kwargs == {"a": {"b": 1, "c": 2}, "d": 3}


def test_replaced_keys_are_checked_and_the_others_stay():
    config = load_config("quickstart")
    made = replaced(config, {"reward.overlong.penalty_factor": 2, "steps": 3})
    assert changed_keys(config, made).keys() == {"reward.overlong.penalty_factor", "steps"}
    with pytest.raises(ConfigError, match=r"batch\.prompts_per_step: found 3"):
        replaced(config, {"batch.prompts_per_step": 3, "batch.groups_per_update": 2})


def test_changed_keys_are_dotted_and_hold_both_values():
    a = TrainConfig(run_dir="a", loss=LossConfig(kl_coef=0.1))
    b = TrainConfig(run_dir="a", batch=BatchConfig(group_size=8))
    assert changed_keys(a, b) == {"loss.kl_coef": (0.1, 0.0), "batch.group_size": (16, 8)}
    assert changed_keys(a, a) == {}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads(path):
    if path.stem.startswith("aime"):
        assert load_evaluation(path).eval.samples_per_prompt == 32
    else:
        assert load_config(path, schema=SftConfig if "sft" in path.stem else TrainConfig).run_dir


def test_an_evaluation_is_read_from_a_runs_file_or_a_warm_starts_or_its_own(tmp_path):
    run = "run_dir: out\nseed: 3\nmodel: {compute_dtype: bfloat16}\neval: {samples_per_prompt: 5}\nsteps: 7\n"
    found = load_evaluation(write(tmp_path, run), ["eval.top_p=0.5"])
    assert (found.seed, found.compute_dtype) == (3, "bfloat16")
    assert found.eval == EvalConfig(samples_per_prompt=5, top_p=0.5)
    warm = load_evaluation(write(tmp_path, "run_dir: out\nmax_response_tokens: 9\nsampling: {slots: 8}\n"))
    assert warm.sampling.slots == 8
    own = load_evaluation(write(tmp_path, "data: {source: gsm8k, path: x}\n"))
    assert own == load_evaluation(None, ["data.source=gsm8k", "data.path=x"])
    with pytest.raises(ConfigError, match=r"run\.yaml: unknown key datta"):
        load_evaluation(write(tmp_path, "datta: {source: gsm8k}\n"))


@pytest.mark.parametrize(
    ("content", "override"),
    [("steps: 3\n", "run_dir=out"), ("algorithm: opd\nrun_dir: out\n", "teacher.source=preset:tiny")],
)
def test_overrides_may_complete_a_training_configuration(tmp_path, content, override):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_evaluation(path)
    assert load_evaluation(path, [override, "eval.top_p=0.5"]).eval.top_p == 0.5


def test_a_range_of_an_option_names_the_override_of_its_mapping(tmp_path):
    with pytest.raises(
        ConfigError, match=r"override 'loss.objective=.*: loss.objective.cispo.cap: found 0.5"
    ):
        load_config(write(tmp_path, "run_dir: out\n"), ["loss.objective={cispo: {cap: 0.5}}"])


def test_overrides_of_an_evaluation_need_not_fit_the_training(tmp_path):
    """The overlong buffer of 4,096 tokens and the exact loss are for training only."""
    path = write(
        tmp_path, "run_dir: out\ndata: {chat_template_kwargs: {a: 1}}\nsampling: {temperature: 0.9}\n"
    )
    with pytest.raises(ConfigError, match=r"overlong\.buffer_tokens: found 4096"):
        load_config(path, ["sampling.max_response_tokens=10"])
    overrides = [
        "sampling.max_response_tokens=10",
        "sampling.weight_dtype=int8",
        "data.chat_template_kwargs.b=2",
    ]
    found = load_evaluation(path, overrides)
    assert (found.sampling.max_response_tokens, found.sampling.weight_dtype) == (10, "int8")
    assert found.data.chat_template_kwargs == {"a": 1, "b": 2}
    for key in ("compute_dtype", "model.compute_dtype"):
        assert load_evaluation(path, [f"{key}=bfloat16"]).compute_dtype == "bfloat16"
    with pytest.raises(
        ConfigError, match=r"run\.yaml with override 'eval\.top_p=7': eval\.top_p: found 7\.0"
    ):
        load_evaluation(path, ["eval.top_p=7"])
    with pytest.raises(
        ConfigError, match=r"environment\.max_turns: found 3.*no effect; set environment\.source"
    ):
        load_evaluation(path, ["environment.max_turns=3"])
    with pytest.raises(ConfigError, match="needs a list"):
        load_evaluation(path, "eval.top_p=0.5")


@pytest.mark.parametrize("file", ["run_dir: out\n", "run_dir: out\nmax_response_tokens: 9\n", "seed: 1\n"])
@pytest.mark.parametrize(
    "override", ["steps=5", "optimizer.learning_rate=1", "lora.rank=4", "model.source=x"]
)
def test_an_override_that_an_evaluation_ignores_is_refused(file, override, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_evaluation(write(tmp_path, file), ["eval.top_p=0.5", override])
    key = override.partition("=")[0]
    assert str(caught.value) == f"override '{override}': an evaluation does not use {key}: leave it out"


@st.composite
def misspellings(draw):
    """A key of a schema with one letter dropped, or two neighbours swapped."""
    schema = draw(st.sampled_from([TrainConfig, SftConfig]))
    key = draw(st.sampled_from(KEYS[schema]))
    at = draw(st.integers(0, len(key) - 2))
    end = key[at + 2 :]
    wrong = key[:at] + key[at + 1] + (end if draw(st.booleans()) else key[at] + end)
    assume(wrong not in KEYS[schema])
    return schema, key, wrong


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(misspellings())
def test_a_misspelt_key_never_loads_and_is_answered_with_the_right_one(tmp_path, misspelling):
    schema, key, wrong = misspelling
    message = message_of(write(tmp_path, "run_dir: out\n"), f"{wrong}=1", schema=schema)
    assert f"`{key}`" in message


def test_reading_a_configuration_imports_no_jax_and_no_numpy(tmp_path):
    # The package's own __init__ may import jax; an empty package in its place shows what the room imports.
    path = write(tmp_path, "run_dir: out\n")
    code = f"""
import sys, types
package = sys.modules["dapo_jax"] = types.ModuleType("dapo_jax")
package.__path__ = [{str(Path(dapo_jax.config.__file__).parents[1])!r}]
import dapo_jax.config
dapo_jax.config.load_config({str(path)!r}, ["seed=3"])
print(*sorted({{name.split(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    out = done.stdout.split()
    assert "yaml" in out
    assert not {"jax", "numpy", "flax", "optax", "orbax", "grain"} & set(out)
