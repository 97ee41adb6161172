"""Algorithms by name: which keys a name sets, in which order, and which names are refused."""

from inspect import signature

import pytest

from dapo_jax.cli import main
from dapo_jax.config import ALGORITHMS, ConfigError, TrainConfig, load_config, load_evaluation
from dapo_jax.config.algorithms import (
    CLIP_RANGE,
    CLIPS,
    GROUND,
    NOT_OFFERED,
    OBJECTIVES,
    OTHER_NAMES,
    ROWS,
    SELECTIONS,
)
from dapo_jax.config.loading import changed_keys, leaf_values
from dapo_jax.config.reading import read_yaml
from dapo_jax.dapo import objectives, selections

GRADERS = "reward.grader=[{grader: exact}, {grader: math, weight: 0.5}]"
NEEDS = {"gdpo": [GRADERS], "opd": ["teacher.source=shipped:quickstart"]}
"""The two algorithms that need a key which only the user can give."""

CHANGED = {
    "run_dir": "runs/old",
    "loss.objective": {"sapo": {"tau_positive": 3.0}},
    "loss.aggregation": "prompt_mean",
    "loss.kl_coef": 0.5,
    "loss.kl_estimator": "k3_unbiased",
    "loss.select": {"high_entropy": {"frac": 0.5}},
    "loss.drop_off_policy": 0.1,
    "advantage.baseline": "leave_one_out",
    "advantage.scale": "batch_std",
    "reward.overlong.filter_truncated": True,
    "batch.keep": 4,
}
"""Values of another algorithm, none of which may remain."""


def given(values):
    """Returns dotted keys as overrides."""
    return [f"{key}={'null' if value is None else value}" for key, value in values.items()]


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(f"run_dir: out\n{text}\n")
        return path

    return write


def test_other_names_are_of_offered_algorithms():
    assert set(OTHER_NAMES.values()) < ALGORITHMS.keys()
    assert not {*OTHER_NAMES, *ALGORITHMS} & NOT_OFFERED.keys()


@pytest.mark.parametrize("before", [{}, CHANGED], ids=["quickstart", "after another algorithm"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_sets_what_its_row_says_and_nothing_else(name, before):
    old = load_config("quickstart", [*given(before), *NEEDS.get(name, [])[: name == "gdpo"]])
    new = load_config("quickstart", [*given(before), f"algorithm={name}", *NEEDS.get(name, [])])
    expected = leaf_values(old) | GROUND | ROWS[name]
    expected |= {"teacher.source": "shipped:quickstart"} if name == "opd" else {}
    assert leaf_values(new) == expected


def test_no_key_of_one_algorithm_remains_when_another_follows():
    """Whatever any algorithm sets, all others set too, except rewards of wrong responses, group sizes and the teacher's rewards, which belong to data and hardware."""
    own = {"reward.incorrect", "batch.group_size", "teacher.rewards"}
    assert {key for row in ROWS.values() for key in row} - own <= GROUND.keys()
    old = load_config("quickstart", ["algorithm=deepseek_v3_2"])
    assert (old.loss.drop_off_policy, old.loss.kl_coef, old.loss.kl_estimator) == (0.5, 1e-3, "k3_unbiased")
    new = load_config("quickstart", ["algorithm=deepseek_v3_2", "algorithm=gspo"]).loss
    assert (new.drop_off_policy, new.kl_coef, new.kl_estimator) == (None, 0.0, "k3")


def test_the_ground_is_plain_clipping_as_the_papers_have_it():
    """The keys that are not at their defaults, which are DAPO's."""
    config = load_config("quickstart", ["algorithm=lite_ppo", "advantage.scale=group_std"])
    assert changed_keys(load_config("quickstart"), config) == {
        "loss.clip_ratio_high": (0.28, 0.2),
        "dynamic_sampling.enabled": (True, False),
        "reward.overlong.enabled": (True, False),
    }


def test_the_defaults_are_dapo(write):
    assert load_config(write("algorithm: dapo")) == TrainConfig(run_dir="out")


@pytest.mark.parametrize(("other", "name"), OTHER_NAMES.items())
def test_another_name_is_the_same_algorithm(other, name):
    extra = NEEDS.get(name, [])
    assert load_config("quickstart", [f"algorithm={other}", *extra]) == load_config(
        "quickstart", [f"algorithm={name}", *extra]
    )


@pytest.mark.parametrize("name", [*NOT_OFFERED, "gpso", "GSPO", ""])
def test_a_name_that_is_not_offered_is_answered_in_one_sentence(name, write):
    text = "algorithm: ''" if not name else f"algorithm: {name}"
    for how in ({"path": "quickstart", "overrides": [f"algorithm={name}"]}, {"path": write(text)}):
        with pytest.raises(ConfigError, match=f"algorithm.*{name}") as caught:
            load_config(**how)
        message = str(caught.value)
        assert "\n" not in message
        if name not in NOT_OFFERED:
            assert all(known in message for known in ALGORITHMS)
            assert name == "" or "did you mean gspo?" in message


def test_keys_of_a_file_follow_its_algorithm_wherever_it_is_written(write):
    for text in (
        "algorithm: gspo\nloss: {clip_ratio_high: 5e-4}",
        "loss: {clip_ratio_high: 5e-4}\nalgorithm: gspo",
    ):
        loss = load_config(write(text)).loss
        assert (loss.objective, loss.clip_ratio_low, loss.clip_ratio_high) == ("gspo", 3e-4, 5e-4)
    options = load_config(
        write("algorithm: sapo\nloss: {objective: {sapo: {tau_positive: 2}}}")
    ).loss.objective
    assert options == {"sapo": {"tau_positive": 2}}


def test_an_algorithm_among_overrides_counts_from_its_place_on(write):
    path = write("loss: {clip_ratio_low: 0.1, objective: {clip: {dual_clip: 3}}}")
    before = load_config(path, ["loss.clip_ratio_high=0.5", "algorithm=gspo"]).loss
    assert (before.clip_ratio_low, before.clip_ratio_high, before.objective) == (3e-4, 4e-4, "gspo")
    after = load_config(path, ["algorithm=gspo", "loss.clip_ratio_high=5e-4"]).loss
    assert (after.clip_ratio_low, after.clip_ratio_high) == (3e-4, 5e-4)
    options = load_config(path, ["algorithm=cispo", "loss.objective.cispo.floor=0.5"]).loss.objective
    assert options == {"cispo": {"cap": 5, "floor": 0.5}}
    assert ALGORITHMS["cispo"]["loss.objective"] == {"cispo": {"cap": 5}}


def test_the_last_algorithm_counts_alone(write):
    """Each of the first two would leave reward.incorrect=0."""
    file = write("algorithm: max_rl")
    assert load_config(file, ["algorithm=pass_at_k", "algorithm=grpo"]) == load_config(
        write(""), ["algorithm=grpo"]
    )
    with pytest.raises(ConfigError, match=r"algorithm=ppo.*critic"):
        load_config(file, ["algorithm=ppo", "algorithm=grpo"])


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: gspo\nloss: {objective: clip}",
        "algorithm: rloo\nadvantage: {baseline: group_mean}",
        "algorithm: rloo\nadvantage: {scale: none}",
        "algorithm: gdpo\nadvantage: {rewards: apart}",
        "algorithm: pass_at_k\nadvantage: {best_of: 8}",
        "algorithm: m2po\nloss: {select: all}",
        "algorithm: gfpo\nbatch: {keep: 4}",
        "algorithm: grpo\nteacher: {source: 'shipped:quickstart'}",
    ],
)
def test_a_file_with_an_algorithm_and_a_key_that_defines_it_is_refused(text, write):
    _, name, section, key, _ = text.replace("\n", " ").replace("{", "").split(" ", 4)
    with pytest.raises(ConfigError, match=f"run.yaml: algorithm: found '{name}'.*{section[:-1]}.{key[:-1]}"):
        load_config(write(text))


def test_distillation_needs_a_teacher_which_a_file_may_name(write):
    text = "algorithm: opd\nteacher: {source: 'shipped:quickstart'}"
    assert load_config(write(text)).teacher.source == "shipped:quickstart"
    teacher = "teacher.source=shipped:quickstart"
    assert load_config("quickstart", [teacher, "algorithm=opd"]) == load_config(
        "quickstart", ["algorithm=opd", teacher]
    )
    for name in ("opd", "on_policy_distillation"):
        with pytest.raises(ConfigError, match=r"teacher\.source: found ''.*opd"):
            load_config("quickstart", [f"algorithm={name}"])


def test_an_error_about_a_key_names_the_algorithm_that_sets_it():
    with pytest.raises(
        ConfigError, match=r"'algorithm=pass_at_k'.*advantage\.best_of: found 4.*group_size = 2"
    ):
        load_config("quickstart", ["algorithm=pass_at_k", "batch.group_size=2"])


def test_a_configuration_with_an_algorithm_is_also_one_for_an_evaluation(write):
    assert load_evaluation(write("algorithm: max_rl")).reward.incorrect == 0.0
    assert load_evaluation("quickstart", ["algorithm=max_rl"]).reward.incorrect == 0.0


@pytest.mark.parametrize("value", ["3", "", "null", "[grpo]", "off"])
def test_an_algorithm_that_is_not_a_name_is_refused_with_the_names(value, write):
    with pytest.raises(
        ConfigError, match=r"algorithm: found .*, needs one of dapo, grpo.*; write one of them"
    ):
        load_config(write(f"algorithm: {value}"))


def test_verl_s_section_algorithm_is_an_unknown_key(write):
    with pytest.raises(ConfigError, match="unknown key algorithm"):
        load_config(write("algorithm: {adv_estimator: grpo}"))


@pytest.mark.parametrize("before", ["algorithm=dapo", "loss.objective=clip", "seed=0"])
def test_an_option_may_follow_the_name_that_reads_it(before, write):
    overrides = [before, "loss.objective.clip.dual_clip=3"]
    assert load_config(write("loss: {objective: clip}"), overrides).loss.objective == {
        "clip": {"dual_clip": 3}
    }
    with pytest.raises(ConfigError, match=r"loss\.objective: found 'clip', needs a mapping"):
        load_config(write("loss: {objective: clip}"), [before, "loss.objective.cispo.cap=3"])


def test_a_warm_start_has_no_algorithm():
    from dapo_jax.config import SftConfig

    with pytest.raises(ConfigError, match="unknown key algorithm = 'grpo'"):
        load_config("quickstart_sft", ["algorithm=grpo"], schema=SftConfig)


def test_the_command_line_prints_keys_and_no_algorithm(capsys):
    assert main(["config", "quickstart", "algorithm=gspo", "--changed"]) == 0
    written = read_yaml(capsys.readouterr().out)
    assert written["loss"] == {
        "objective": "gspo",
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "aggregation": "sequence_mean",
    }
    assert (written["dynamic_sampling"]["enabled"], written["reward"]["overlong"]["enabled"]) == (
        False,
        False,
    )
    assert main(["config", "quickstart", "--changed"]) == 0
    before = read_yaml(capsys.readouterr().out)
    assert written.keys() - before.keys() == {"loss"}
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in ALGORITHMS)


def options_of(function):
    """Returns the names of the keyword-only parameters with a default."""
    parameters = signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is not one.empty}


def test_the_tables_of_options_are_what_the_functions_have():
    defaults = signature(objectives.dapo_loss).parameters
    assert tuple(defaults[name].default for name in CLIPS) == CLIP_RANGE
    found = {name: options_of(function) for name, function in objectives.OBJECTIVES.items()}
    found["clip"] -= {"weights"}
    assert found == {name: set(options) for name, options in OBJECTIVES.items()}
    chosen = {name: options_of(function) for name, function in selections.SELECTIONS.items()}
    assert {"all": set(), **chosen} == {name: set(options) for name, options in SELECTIONS.items()}
