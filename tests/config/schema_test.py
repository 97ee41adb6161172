"""The rules of a configuration, their messages, and values just inside them; from files and from Python."""

import dataclasses
import math

import pytest

from dapo_jax.config import (
    BatchConfig,
    ConfigError,
    DataConfig,
    DynamicSamplingConfig,
    EvaluateConfig,
    LogConfig,
    LossConfig,
    RewardConfig,
    SamplingConfig,
    SftBatchConfig,
    SftConfig,
    TrainConfig,
    evaluation_of,
    load_config,
    load_evaluation,
    to_yaml,
)
from dapo_jax.config.reading import read_yaml
from dapo_jax.config.section import leaf_types, rules_by_key
from dapo_jax.dapo.aggregation import AGGREGATIONS

RULES = rules_by_key(TrainConfig) | rules_by_key(SftConfig) | rules_by_key(EvaluateConfig)
CHOICES = {key: rules.choices for key, rules in RULES.items() if rules.choices}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: out\n")
    return file


def test_the_defaults_are_the_paper_s_recipe():
    config = TrainConfig(run_dir="out")
    # Section 4.1: "prompt batch size of 512 and sample 16 responses for each prompt"; "mini-batch size is 512",
    # so 512 x 16 / 512 = 16 updates of 512 / 16 = 32 groups.
    assert (config.batch.prompts_per_step, config.batch.group_size) == (512, 16)
    assert config.batch.groups_per_update * config.batch.group_size == 512
    assert config.batch.prompts_per_step // config.batch.groups_per_update == 16
    # "expected maximum length as 16,384 tokens and allocate additional 4,096 tokens as the soft punish cache":
    # at most 20,480.
    assert (config.sampling.max_response_tokens, config.reward.overlong.buffer_tokens) == (20480, 4096)
    assert config.data.max_prompt_tokens == 2048
    assert config.row_tokens == 2048 + 20480
    assert config.prompts_per_wave == 1536
    # Clip-Higher, token-level loss (Eq. 8), no KL (Section 2.3), advantage over the group's std (Eq. 9).
    assert (config.loss.clip_ratio_low, config.loss.clip_ratio_high) == (0.2, 0.28)
    loss, reward = config.loss, config.reward
    assert (loss.objective, loss.aggregation, loss.kl_coef) == ("clip", "token_mean", 0.0)
    assert (config.advantage.baseline, config.advantage.scale) == ("group_mean", "group_std")
    # AdamW at a constant 1e-6 with a linear warm-up over 20 rollout steps.
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (1e-6, 20)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.999, 0.1)
    # Rule reward +1 / -1 with soft overlong punishment; dynamic sampling on; training at temperature 1.
    assert (reward.correct, reward.incorrect, reward.overlong.enabled) == (1.0, -1.0, True)
    assert config.dynamic_sampling.enabled
    assert config.sampling.temperature == 1.0
    # "repeat the evaluation set for 32 times"; "temperature to 1.0, and topp to 0.7".
    assert (config.eval.samples_per_prompt, config.eval.temperature, config.eval.top_p) == (32, 1.0, 0.7)


REFUSED = """
batch.prompts_per_step=100 -> batch.prompts_per_step: found 100; 100 = 3 x 32 + 4; use 96 or 128
batch.group_size=1 -> batch.group_size: found 1; dynamic_sampling.enabled=false
batch.row_tokens=22527 -> row_tokens: found 22527; 2048 + 20480 = 22528 > 22527; raise it to 22528
loss.clip_ratio_high=0.1 -> loss.clip_ratio_high: found 0.1; 0.1 < 0.2; loss.clip_ratio_low
sampling.cache_dtype=int8 -> sampling.cache_dtype: found 'int8'; loss.correction=truncate; loss.old_logprobs=sampler
sampling.cache_dtype=int8 loss.correction=none -> sampling.cache_dtype: found 'int8'
loss.old_logprobs=sampler loss.importance_range=[0,2] -> importance_range: found [0.0, 2.0]; pi_old / pi_sampler; []
loss.old_logprobs=sampler loss.correction=truncate -> loss.correction: found 'truncate'; loss.old_logprobs=trainer
rollout.in_flight=32 loss.correction=none -> loss.correction: found 'none'; rollout.in_flight = 32; loss.old_logprobs=sampler
rollout.in_flight=100 -> rollout.in_flight: found 100; batch.group_size = 16; 0 (waves); use 112
rollout.in_flight=32 rollout.round_tokens=20481 -> rollout.round_tokens: found 20481; max_response_tokens = 20480; such as 1280
loss.correction=none loss.importance_range=[0,2] -> loss.importance_range: found [0.0, 2.0]; loss.correction = 'none'; loss.correction=truncate
loss.importance_range=[0.5,2.0] -> loss.importance_range: found [0.5, 2.0]; loss.correction = 'auto'; loss.correction=mask
loss.correction=mask loss.importance_range=[2] -> loss.importance_range: found [2.0]; two numbers
loss.correction=mask loss.importance_range=[0,2] -> loss.importance_range: found [0.0, 2.0]; two numbers
loss.correction=mask loss.importance_range=[0.5,0.9] -> loss.importance_range: found [0.5, 0.9]; two numbers
loss.correction=mask loss.importance_range=[0.5,.inf] -> loss.importance_range[1]: found inf; finite
loss.correction=mask loss.importance_range=2 -> loss.importance_range: found 2; a list of numbers; [2.0]
reward.incorrect=1 -> reward.correct: found 1.0; reward.incorrect = 1.0
parallel.data=-1 -> parallel.fsdp: found -1; parallel.data is -1 too
parallel.tensor=0 -> parallel.tensor: found 0; -1
parallel.sampler_tensor=-1 -> parallel.sampler_tensor: found -1; 0 or more
dynamic_sampling.prompts_per_wave=50 -> max_waves: found 10; 10 x 50 = 500 < 512; to 11 or more
dynamic_sampling.max_waves=0 -> max_waves: found 0; dynamic_sampling.enabled=false
loss.objective=gsop -> loss.objective: found 'gsop'; did you mean gspo?
loss.objective=rloo -> loss.objective: found 'rloo'; algorithm: rloo
loss.objective=maxrl -> loss.objective: found 'maxrl'; algorithm: maxrl
loss.objective=cispo loss.clip_ratio_high=0.3 -> loss.clip_ratio_high: found 0.3; loss.objective = 'cispo'
loss.objective=cispo loss.clip_ratio_low=0.1 -> loss.clip_ratio_low: found 0.1; loss.objective = 'cispo'
loss.objective.gspo.dual_clip=3 -> loss.objective.gspo.dual_clip: found 3; an option of gspo; leave it out
loss.objective.cispo.cup=3 -> loss.objective.cispo.cup: found 3; cispo; cap
loss.objective={"cispo":2} -> loss.objective.cispo: found 2; name the option; OPTION: 2
loss.objective.topr.cap=3 -> loss.objective.topr.cap: found 3; topr; leave it out
loss.objective.clip.clip_ratio_low=0.1 -> loss.objective.clip.clip_ratio_low: found 0.1; set loss.clip_ratio_low
loss.select.high_entropy.fraction=0.2 -> loss.select.high_entropy.fraction: found 0.2; high_entropy; frac
loss.select.all.frac=0.2 -> loss.select.all.frac: found 0.2; all; leave it out
loss.select={"high_entropy":{}} -> loss.select.high_entropy: found {}; loss.select=high_entropy
loss.select={"high_entropy":{"frac":0.2},"all":{}} -> loss.select: found; one name
loss.select.hi_entropy.frac=0.2 -> loss.select: found 'hi_entropy'; did you mean high_entropy?
loss.objective=kl_cov -> loss.select: found 'all'; loss.objective = 'kl_cov'; high_covariance
loss.select=high_covariance -> loss.select: found 'high_covariance'; loss.objective = 'clip'; kl_cov
loss.objective=vespo loss.correction=truncate -> loss.correction: found 'truncate'; 'vespo'; loss.old_logprobs=sampler
loss.objective=vespo rollout.in_flight=32 -> loss.correction: found 'truncate'; 'vespo'; loss.old_logprobs=sampler
loss.correction=keep_responses loss.importance_range=[0,2] -> loss.importance_range: found [0.0, 2.0]; loss.correction = 'keep_responses'
loss.correction=truncate_responses loss.importance_range=[0.5,2] -> loss.importance_range: found [0.5, 2.0]; truncate_responses
loss.drop_off_policy=-1 -> loss.drop_off_policy: found -1; 0 or more
loss.kl_estimator=k3_unbiased -> loss.kl_estimator: found 'k3_unbiased'; loss.kl_coef
advantage.scale=group_mean -> reward.incorrect: found -1.0; 0 or more; advantage.scale = 'group_mean'
advantage.best_of=2 -> reward.incorrect: found -1.0; 0 or more; advantage.best_of = 2
advantage.best_of=17 reward.incorrect=0 -> advantage.best_of: found 17; batch.group_size = 16
advantage.best_of=8 reward.incorrect=0 batch.keep=7 -> advantage.best_of: found 8; batch.keep = 7
advantage.rewards=apart -> advantage.rewards: found 'apart'; reward.grader; summed
batch.group_size=1 dynamic_sampling.enabled=false -> advantage.baseline: found 'group_mean'; none; batch.group_size = 1
batch.group_size=1 dynamic_sampling.enabled=false advantage.baseline=leave_one_out -> advantage.baseline: found 'leave_one_out'
batch.group_size=1 dynamic_sampling.enabled=false advantage.baseline=length_weighted -> advantage.baseline: found 'length_weighted'
batch.keep=1 -> batch.keep: found 1; 2 to 15; batch.group_size = 16
batch.keep=16 -> batch.keep: found 16; 2 to 15
teacher.source=shipped:quickstart dynamic_sampling.enabled=false dynamic_sampling.skip_solved=2 -> dynamic_sampling.skip_solved: found 2; 0 with teacher.source
batch.keep.longest=8 -> batch.keep: found 'longest'; shortest or reward_per_token or improbable
batch.keep.improbable=7 sampling.temperature=0 -> sampling.temperature: found 0; more than 0
batch.keep.reward_per_token=1 -> batch.keep: found; 2 to 15
batch.keep.reward_per_token=x -> batch.keep.reward_per_token: found 'x'; a whole number
environment.source=guess environment.credit=turn advantage.baseline=none -> environment.credit: found 'turn'; episode; group_mean
environment.source=guess environment.credit=turn advantage.scale=batch_std -> environment.credit: found 'turn'; group_std
environment.source=guess environment.variables=[TOKEN] -> environment.variables: found ['TOKEN']; unless the source is a command
teacher.coef=2 -> teacher.coef: found 2; teacher.source
teacher.source=shipped:quickstart -> dynamic_sampling.enabled: found true; teacher.source; teacher.rewards=true
teacher.source=shipped:quickstart dynamic_sampling.enabled=false batch.keep.reward_per_token=8 -> batch.keep: found; teacher.source
teacher.source=shipped:quickstart dynamic_sampling.enabled=false batch.keep.improbable=8 -> batch.keep: found; teacher.source
teacher.source=self algorithm=opd -> teacher.prompt: found ''; a template that contains {prompt} with teacher.source = 'self'
teacher.source=self algorithm=opd teacher.prompt={prompt} teacher.kl=full -> teacher.kl: found 'full'; 'sampled' with teacher.source = 'self'
teacher.source=self algorithm=opd teacher.prompt={prompt} environment.source=guess -> environment.source: found 'guess'; no environment
teacher.source=shipped:quickstart algorithm=opd teacher.prompt={prompt} -> teacher.prompt: found '{prompt}'; '' with teacher.source = 'shipped:quickstart'
rollout.saved=true -> teacher.source: found ''; a teacher with rollout.saved
teacher.source=shipped:quickstart algorithm=opd rollout.saved=true -> batch.group_size: found 16; 1 with rollout.saved
teacher.source=shipped:quickstart algorithm=opd rollout.saved=true batch.group_size=1 -> batch.groups_per_update: found 32; batch.prompts_per_step, or teacher.kl=full
teacher.source=shipped:quickstart algorithm=opd rollout.saved=true batch.group_size=1 teacher.kl=full -> data.deduplicate: found true; false
teacher.source=shipped:quickstart dynamic_sampling.enabled=false environment.source=guess environment.credit=turn -> environment.credit: found 'turn'; episode; teacher.rewards=true
teacher.source=shipped:quickstart dynamic_sampling.enabled=false advantage.rewards=apart reward.grader=[{"grader":"exact"},{"grader":"math"}] -> advantage.rewards: found 'apart'; summed; teacher.rewards=true
teacher.source=shipped:quickstart teacher.rewards=true sampling.temperature=0.9 -> sampling.temperature: found 0.9; teacher.source
teacher.source=shipped:quickstart teacher.rewards=true loss.select=low_covariance -> loss.select: found 'low_covariance'; teacher.source
teacher.source=shipped:quickstart dynamic_sampling.enabled=false teacher.kl=full loss.objective=kl_cov loss.select=high_covariance -> loss.select: found 'high_covariance'; teacher.source
sampling.max_response_tokens=64 -> buffer_tokens: found 4096; 4096 > 64; here 12; enabled=false
environment.source=guess environment.episode_tokens=64 -> buffer_tokens: found 4096; environment.episode_tokens = 64; here 12
reward.overlong.buffer_tokens=0 -> buffer_tokens: found 0; 1 or more; reward.overlong.enabled=false
sampling.temperature=0 -> sampling.temperature: found 0.0; eval.temperature
lora.rank=2 lora.targets=[qproj] -> lora.targets: found ['qproj']; write q_proj instead of qproj
lora.rank=2 lora.targets=[all-linear] -> lora.targets: found ['all-linear']; write all instead of all-linear
lora.rank=2 lora.targets=[q_proj,gate_up_proj] -> lora.targets; write gate_proj and up_proj instead of gate_up_proj
lora.rank=2 lora.targets=[lm_head] -> lora.targets; remove lm_head
loss.aggregation=token-mean -> loss.aggregation: found 'token-mean'; did you mean token_mean?
loss.aggregation=xyz -> 'xyz'; token_mean or prompt_mean or sequence_mean or token_sum_norm or sequence_sum; write one
model.attention=cudnn -> model.compute_dtype: found 'float32'; bfloat16
model.source= -> model.source: found ''
data.template_date=26.7.2024 -> data.template_date; 26.7.2024; YEAR-MONTH-DAY
data.prompt_template=Solve -> data.prompt_template: found 'Solve'; {prompt}
data.chat_template_kwargs.messages=1 -> chat_template_kwargs.messages: found 1; remove it
sampling.stop=["x",""] -> sampling.stop: found ['x', '']
sampling.stop_token_ids=[0,-1] -> sampling.stop_token_ids[1]: found -1; 0 or more
rollout.in_flight=16 rollout.answer_rounds=1001 -> rollout.answer_rounds: found 1001; 0 to 1000
steps=-1 -> steps: found -1; 0: evaluate only
seed=4294967296 -> seed: found 4294967296; less than 2**32
loss.clip_ratio_low=1.5 -> loss.clip_ratio_low: found 1.5; at most 1
loss.objective.clip.dual_clip=1 -> loss.objective.clip.dual_clip: found 1; more than 1, or null
loss.objective.cispo.cap=-5 -> loss.objective.cispo.cap: found -5; 1 or more
loss.objective.cispo.cap=null -> loss.objective.cispo.cap: found null; a number
loss.objective.cispo.floor=7 -> loss.objective.cispo.floor: found 7; 0 to 1
loss.objective.reinforce.cap=0.5 -> loss.objective.reinforce.cap: found 0.5; 1 or more
loss.objective.sapo.tau_negative=0 -> loss.objective.sapo.tau_negative: found 0; more than 0
loss.objective.dppo.divergence=tvv -> loss.objective.dppo.divergence: found 'tvv'; did you mean tv?
loss.objective.dppo.delta_low=-0.2 -> loss.objective.dppo.delta_low: found -0.2; 0 or more
loss.objective.dppo.kl=yes -> loss.objective.dppo.kl: found true; a number
loss.objective.vespo.k_positive=[2] -> loss.objective.vespo.k_positive: found [2]; a number
loss.select.high_entropy.frac=20 -> loss.select.high_entropy.frac: found 20; at most 1
loss.select.low_covariance.frac=0 -> loss.select.low_covariance.frac: found 0; more than 0
loss.select.low_covariance.low=6 -> loss.select.low_covariance.high: found 5.0; more than low = 6
loss.select.low_second_moment.limit=0 -> loss.select.low_second_moment.limit: found 0; more than 0
loss.importance_range=[0,0.5] -> loss.importance_range: found [0.0, 0.5]; 1 or more
optimizer.learning_rate=0 -> optimizer.learning_rate: found 0; more than 0
sampling.temperature=1e-9 -> sampling.temperature; 0.001 to 1000
eval.temperature=1e-9 -> eval.temperature; 0 (greedy), or 0.001 to 1000
cluster.workers=true -> cluster.workers: found true; cluster.address
cluster.address=auto -> cluster.address: found 'auto'; cluster.workers or cluster.samplers
cluster.address=head cluster.workers=true -> cluster.address: found 'head'; HOST:PORT
cluster.address=auto cluster.workers=true workers.count=0 -> cluster.workers: found true; workers.count of 1 or more
cluster.address=auto cluster.workers=true environment.source=guess -> cluster.workers: found true; workers.count of 1 or more
environment.max_turns=3 -> environment.max_turns: found 3; environment.source
dynamic_sampling.surplus=carry rollout.max_staleness=1 -> rollout.max_staleness: found 1; rollout.in_flight
rollout.answer_rounds=2 -> rollout.answer_rounds: found 2; rollout.in_flight
data.source=mixture data.mixture=[{"source":"arithmetic"}] data.train_split=train[:9] -> data.train_split: found 'train[:9]'; no value; data.mixture
data.source=mixture data.mixture=[{"source":"arithmetic"}] data.path=a.jsonl -> data.path: found 'a.jsonl'; no value; data.mixture
lora.alpha=16 -> lora.alpha: found 16.0; lora.rank
eval.top_k=2147483648 -> eval.top_k; 1 to 2**31 - 1
eval.top_p=0 -> eval.top_p; more than 0 and at most 1
"""
"""Overrides -> words of the message: key and value, need, remedy."""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_configuration_that_cannot_run_is_refused_with_the_arithmetic(path, line):
    overrides, words = line.split(" -> ")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides.split(" "))
    assert [word for word in words.split("; ") if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("every", "steps", "logged"), [(10, 25, [1, 10, 20, 25]), (10, 3, [1, 3]), (1, 3, [1, 2, 3]), (0, 25, [])]
)
def test_rollouts_of_the_first_and_the_last_step_are_logged_whatever_the_interval(every, steps, logged):
    config = TrainConfig(run_dir="a", steps=steps, log=LogConfig(rollouts_every_steps=every))
    assert [step for step in range(1, steps + 1) if config.logs_rollouts(step)] == logged


def test_a_wave_has_three_times_the_prompts_that_a_step_trains_on():
    """The recipe's ratio, 1536 to 512, at 8: so a small run does not sample 1536 prompts at once."""
    small = TrainConfig(run_dir="a", batch=BatchConfig(prompts_per_step=8, groups_per_update=8))
    assert small.prompts_per_wave == small.resolved().dynamic_sampling.prompts_per_wave == 24
    changed = dataclasses.replace(small, dynamic_sampling=DynamicSamplingConfig(prompts_per_wave=10))
    assert changed.prompts_per_wave == 10
    assert changed.resolved() == changed


@pytest.mark.parametrize(
    "overrides",
    [
        "loss.clip_ratio_high=0.2",
        "loss.clip_ratio_low=0.999 loss.clip_ratio_high=5",
        "loss.old_logprobs=sampler loss.importance_range=[]",
        "dynamic_sampling.enabled=false batch.group_size=1 advantage.baseline=none",
        "dynamic_sampling.enabled=false dynamic_sampling.prompts_per_wave=0 dynamic_sampling.max_waves=0",
        "dynamic_sampling.prompts_per_wave=512 dynamic_sampling.max_waves=1",
        "reward.overlong.enabled=false sampling.max_response_tokens=64",
        "reward.overlong.buffer_tokens=20480",
        "environment.source=guess environment.episode_tokens=30000 reward.overlong.buffer_tokens=30000",
        "batch.row_tokens=22528",
        "steps=0 eval.every_steps=0 checkpoint.every_steps=0 log.rollouts_every_steps=0",
        "eval.temperature=0 eval.top_p=1 eval.top_k=-1 eval.prompts=5",
        "parallel.fsdp=4 parallel.tensor=-1",
        "optimizer.beta1=0 optimizer.weight_decay=0 optimizer.warmup_steps=0",
        "seed=4294967295",
        "loss.clip_ratio_low=1 loss.clip_ratio_high=1",
        "loss.objective=cispo loss.clip_ratio_high=0.2",
        "loss.objective.cispo.floor=1 loss.objective.cispo.cap=1 loss.select.high_entropy.frac=1",
        "loss.objective.dppo.cap=null loss.objective.dppo.kl=0 loss.select.low_covariance.low=-1",
        "loss.objective=vespo rollout.in_flight=32 loss.old_logprobs=sampler",
        'loss.objective={"mine.py:loss":{"anything":3,"dual_clip":3}} loss.select=high_covariance',
        "batch.keep=15 advantage.best_of=15 reward.incorrect=0",
        "environment.source=guess environment.credit=turn advantage.scale=none",
        "teacher.source=shipped:quickstart teacher.rewards=true",
        "teacher.source=shipped:quickstart teacher.rewards=true teacher.kl=full loss.select=low_covariance",
        "reward.answer_marker=",
    ],
)
def test_values_just_inside_the_rules_load_unchanged(path, overrides):
    config = load_config(path, overrides.split(" "))
    for override in overrides.split(" "):
        key, _, text = override.partition("=")
        value = config
        for name in key.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        expected = text if isinstance(value, str) else read_yaml(text)
        assert value == expected


OFF, IN_FLIGHT = ("none", 0.0, math.inf), "rollout.in_flight=32"


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ("", OFF),
        ("loss.correction=none", OFF),
        ("loss.importance_range=[0,3]", ("truncate", 0.0, 3.0)),
        (IN_FLIGHT, ("truncate", 0.0, 2.0)),
        (f"{IN_FLIGHT} loss.importance_range=[0,1]", ("truncate", 0.0, 1.0)),
        ("loss.correction=truncate", ("truncate", 0.0, 2.0)),
        ("loss.correction=truncate loss.importance_range=[0,5]", ("truncate", 0.0, 5.0)),
        ("loss.correction=mask", ("mask", 0.5, 2.0)),
        (f"{IN_FLIGHT} loss.correction=keep_responses", ("keep_responses", 0.99, 1.01)),
        ("loss.correction=mask loss.importance_range=[1,5]", ("mask", 1.0, 5.0)),
        ("loss.correction=keep_responses loss.importance_range=[0.25,1]", ("keep_responses", 0.25, 1.0)),
        # The ratio of the loss is to the sampler already.
        (f"{IN_FLIGHT} loss.old_logprobs=sampler", OFF),
        (f"{IN_FLIGHT} loss.old_logprobs=sampler loss.correction=none", OFF),
        ("sampling.cache_dtype=int8 sampling.weight_dtype=int8 loss.old_logprobs=sampler", OFF),
        # Any importance weights correct a rounded sampler.
        ("sampling.cache_dtype=int8 loss.importance_range=[0,2]", ("truncate", 0.0, 2.0)),
        ("sampling.cache_dtype=int8 loss.correction=truncate", ("truncate", 0.0, 2.0)),
        ("sampling.weight_dtype=int8 loss.correction=keep_responses", ("keep_responses", 0.99, 1.01)),
        (f"sampling.weight_dtype=int8 {IN_FLIGHT}", ("truncate", 0.0, 2.0)),
    ],
)
def test_the_correction_is_resolved_in_one_place(path, overrides, found):
    config = load_config(path, overrides.split())
    assert config.correction == found
    assert all(isinstance(bound, float) for bound in config.correction[1:])
    path.write_text(to_yaml(config))
    assert load_config(path).correction == found


@pytest.mark.parametrize(
    ("graders", "words"),
    [
        ([{"grader": "exact", "weight": 0}], ["reward.grader[0].weight: found 0", "not 0"]),
        ([{"grader": "exact", "weight": float("inf")}], ["reward.grader[0]: found", "finite"]),
        ([{"grader": "exact"}, {"grader": " "}], ["reward.grader[1].grader: found ' '", "a name"]),
    ],
)
def test_a_list_of_graders_that_cannot_be_summed_is_refused(graders, words):
    with pytest.raises(ConfigError) as caught:
        RewardConfig(grader=graders)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_list_of_graders_has_mappings(path):
    with pytest.raises(ConfigError, match=r"reward\.grader\[0\]: found 'exact', needs a mapping"):
        load_config(path, ["reward.grader=[exact]"])
    with pytest.raises(ConfigError, match=r"reward\.grader: found \[\], needs a grader"):
        load_config(path, ["reward.grader=[]"])


@pytest.mark.parametrize(("key", "words"), sorted(CHOICES.items()))
def test_every_choice_of_a_key_loads(path, key, words):
    needs = {
        "cudnn": ["model.compute_dtype=bfloat16"],
        "turn": ["environment.source=guess"],
        "template": ["environment.source=command:true"],
        "int8": ["loss.importance_range=[0,2]"],
        "float8_e4m3fn": ["loss.importance_range=[0,2]"],
        "high_covariance": ["loss.objective=kl_cov"],
        "k3_unbiased": ["loss.kl_coef=0.1"],
        "group_mean": ["reward.incorrect=0"],
        "apart": ["reward.grader=[{grader: exact}, {grader: math}]"],
        "full": ["teacher.source=shipped:quickstart", "teacher.rewards=true"],
    }
    for word in words:
        if key in leaf_types(TrainConfig):
            value = f".{word}=8" if key == "batch.keep" else f"={word}"
            load_config(path, [f"{key}{value}", *needs.get(word, [])])
        else:
            load_evaluation(None, [f"{key}={word}"])


def test_the_choices_of_the_loss_are_those_that_it_knows():
    assert tuple(CHOICES["loss.aggregation"]) == AGGREGATIONS


def test_every_number_but_two_rewards_has_a_range():
    kinds = leaf_types(TrainConfig) | leaf_types(SftConfig) | leaf_types(EvaluateConfig)
    numbers = {key for key, kind in kinds.items() if kind in (int, float, float | None)}
    assert {key for key in numbers if not RULES[key].range} == {"reward.correct", "reward.incorrect"}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: LossConfig(clip_ratio_low=1.5), "loss.clip_ratio_low: found 1.5"),
        (lambda: RewardConfig(correct=-1.0), "reward.correct: found -1.0"),
        (lambda: BatchConfig(group_size=True), "batch.group_size: found true"),
        (lambda: BatchConfig(group_size=[16]), "batch.group_size: found [16], needs a whole number"),
        (lambda: TrainConfig(run_dir=""), "run_dir: found ''"),
        (lambda: SftConfig(run_dir="a", batch=SftBatchConfig(row_tokens=2111)), "2048 + 64 = 2112 > 2111"),
        (lambda: dataclasses.replace(TrainConfig(run_dir="a"), steps=-1), "steps: found -1"),
        (lambda: RewardConfig(overlong={"enabled": False}), "overlong: found {'enabled': False}"),
        (lambda: TrainConfig(run_dir="a", loss=BatchConfig()), "loss: found BatchConfig("),
        (lambda: DataConfig(shuffle=1), "data.shuffle: found 1, needs true or false"),
        (lambda: SamplingConfig(stop=("a",)), "sampling.stop: found ('a',), needs a list of text"),
        (
            lambda: DataConfig(chat_template_kwargs={"a": {1}}),
            "chat_template_kwargs: found {'a': {1}}, needs",
        ),
    ],
)
def test_building_a_section_in_python_is_checked_too(build, words):
    with pytest.raises(ConfigError) as caught:
        build()
    assert words in str(caught.value)


def test_a_supervised_run_needs_no_room_for_the_overlong_buffer():
    config = SftConfig(run_dir="out", sampling=SamplingConfig(max_response_tokens=64))
    assert config.reward.overlong.buffer_tokens == 4096


def test_the_temperature_of_evaluations_has_a_key_of_its_own(tmp_path):
    """`sampling.temperature` is for training. In a training configuration, an evaluation ignores it."""
    with pytest.raises(ConfigError, match=r"sampling\.temperature: found 0\.0.*eval\.temperature"):
        evaluation_of(SftConfig(run_dir="out", sampling=SamplingConfig(temperature=0.0)))
    (tmp_path / "train.yaml").write_text("run_dir: out\nsampling: {temperature: 0.9}\n")
    (tmp_path / "eval.yaml").write_text("sampling: {temperature: 0.9}\n")
    assert load_evaluation(tmp_path / "train.yaml").eval.temperature == 1.0
    for path, overrides in (("eval.yaml", []), ("train.yaml", ["sampling.temperature=0.5"])):
        with pytest.raises(ConfigError, match=r"sampling\.temperature: found 0\..*eval\.temperature"):
            load_evaluation(tmp_path / path, overrides)
