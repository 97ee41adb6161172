"""Watchers of `dynamic_sampling`, `batch`, `loss` and `optimizer`: they see trained groups, the loss of a token, a change of weights."""

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.dapo.objectives import wanted
from tests.run.keys.looking import by_length, refusal, rounded
from tests.run.keys.watch_sampling import option
from tests.run.keys.watching import differs, echoes, watch


def even(sample):
    """Long responses to every second prompt are correct."""
    return sample.prompt.ordinal % 2 == 0 and by_length(sample)


def trained(reward):
    """Sees the ordinals of the first step's groups, and the numbers of carried and sampled groups."""

    def see(look):
        found = look.collected(reward=reward)
        return [group.prompt.ordinal for group in found.groups], len(found.carry), len(found.sampled)

    return see


def microbatches(look):
    return look.minibatches(reward=by_length)


def shape(look):
    """Rows and tokens of the first microbatch."""
    return microbatches(look)[0][0].tokens.shape


def microbatches_of_update(look):
    return len(microbatches(look)[0])


def weights(look):
    """1 / weight of the tokens in the first update: one group with responses of 3, 3, 6 and 6 tokens."""
    return sorted({round(1 / float(w)) for m in microbatches(look)[0] for w in m.weights[m.mask]})


def advantages_of(minibatches):
    return sorted({round(float(a), 4) for m in minibatches[0] for a in m.advantages[m.mask]})


def advantages(look):
    return advantages_of(microbatches(look))


def trained_lengths(look):
    """The numbers of tokens of the trained responses to the first prompt."""
    return [rollout.response_tokens for rollout in look.collected(reward=by_length).groups[0].rollouts]


def minibatch_order(look):
    """The order of a step's groups in its updates, as ordinals of prompts."""
    run = look.run(reward=by_length)
    groups = look.collected(run).groups
    return [group.prompt.ordinal for minibatch in run.batches.split(groups, 1) for group in minibatch]


def token_loss(ratio, advantage):
    """Sees the loss of one token with this ratio to the old policy."""

    def see(look):
        look.run()
        logprobs, old = np.full((1, 1), np.log(ratio) - 5, np.float32), np.full((1, 1), -5, np.float32)
        objective, ones = look.updates.objective, jnp.ones((1, 1))
        loss, _ = objective(
            jnp.asarray(logprobs),
            jnp.asarray(old),
            jnp.full((1, 1), advantage, jnp.float32),
            jnp.ones((1, 1), bool),
            weights=jnp.ones((1, 1), jnp.float32),
            **({"segment_ids": ones.astype(jnp.int32)} if "segment_ids" in wanted(objective) else {}),
        )
        return rounded(loss)

    return see


def change(*gradients):
    """Sees the change of a weight of 2 by the last of these gradients, at a learning rate of 1."""

    def see(look):
        look.run()
        optimizer, weight = look.updates.optimizer, {"w": jnp.full((1,), 2.0)}
        state = optimizer.init(weight)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
            for gradient in gradients:
                changed, state = optimizer.update({"w": jnp.full((1,), gradient)}, state, weight)
        return rounded(changed["w"])

    return see


def rate(step):
    """Sees the learning rate of a step, to four digits."""
    return lambda look: float(f"{look.run().learning_rate(step):.4g}")


def moments(look):
    """The kinds of memory that hold the optimizer's moments."""
    return sorted({leaf.sharding.memory_kind for leaf in jax.tree.leaves(look.started().opt_state)})


def moments_of_a_matrix(look):
    """The number of the optimizer's arrays for one of the matrices."""
    look.run()
    state = jax.eval_shape(look.updates.optimizer.init, look.updates.params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return len([path for path in paths if "'gate'" in path])


def adapters(look):
    """Rank, scale and targets of the adapters; None without adapters."""
    look.run()
    shape = look.engine.decoder.lora
    names = {
        jax.tree_util.keystr(path).split("'")[3]
        for path, _ in jax.tree_util.tree_leaves_with_path(look.updates.params)
    }
    assert (shape is None) == ("query" in names)
    assert (shape is None) == (not look.updates.frozen)
    return shape and [shape.rank, shape.scale, shape.targets]


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = {"lora.rank": 4}
TAUGHT = {"teacher.source": "model", "dynamic_sampling.enabled": False}
NO_DECAY = {"optimizer.weight_decay": 0.0}
SCHEDULED = {"steps": 100, "optimizer.learning_rate": 1.0}
LINEAR = {"optimizer.schedule": "linear", **SCHEDULED}
FOUR = {"batch.prompts_per_step": 4, "dynamic_sampling.prompts_per_wave": 4}

WATCHERS = [
    # Ordinals 0 and 2 are informative, of the first wave 0, 1, 2.
    watch("dynamic_sampling.prompts_per_wave", trained(even), (3, ([0, 2], 0, 3)), (4, ([0, 2], 0, 4))),
    watch(
        "dynamic_sampling.on_shortfall",
        refusal(trained(even)),
        ("error", "ShortfallError"),
        ("train_fewer", ""),
        also={"dynamic_sampling.max_waves": 1, "dynamic_sampling.prompts_per_wave": 2},
    ),
    watch(
        "dynamic_sampling.surplus", trained(by_length), ("discard", ([0, 1], 0, 3)), ("carry", ([0, 1], 1, 3))
    ),
    watch("batch.prompts_per_step", trained(by_length), (2, ([0, 1], 0, 3)), (3, ([0, 1, 2], 0, 3))),
    echoes("batch.group_size", lambda look: len(look.rollouts()), 4, 8),
    watch("batch.groups_per_update", lambda look: len(microbatches(look)), (1, 2), (2, 1)),
    watch("batch.rows_per_microbatch", shape, (8, (8, 10)), (16, (16, 10))),
    # The longest prompt and response there may be: 4 + 6.
    watch("batch.row_tokens", shape, (0, (8, 10)), (24, (8, 24))),
    # 0.5 of the ratio at a negative advantage: the loss stays at 1 - low. Twice at a positive one: at -(1 + high).
    watch("loss.clip_ratio_low", token_loss(0.5, -1.0), (0.2, [0.8]), (0.1, [0.9])),
    watch("loss.clip_ratio_high", token_loss(2.0, 1.0), (0.28, [-1.28]), (0.5, [-1.5])),
    watch(
        "loss.objective",
        token_loss(10.0, -1.0),
        ("clip", [10.0]),
        ({"clip": {"dual_clip": 3.0}}, [3.0]),
        what="with a dual clip",
    ),
    # 1 / 18 of 18 tokens; 1 / 4 / 3 and 1 / 4 / 6 of four responses; 1 / 4 / 6 at a limit of 6.
    watch(
        "loss.aggregation",
        weights,
        ("token_mean", [18]),
        ("sequence_mean", [12, 24]),
        ("token_sum_norm", [24]),
        ("sequence_sum", [4]),
    ),
    watch(
        "sampling.max_response_tokens",
        weights,
        (6, [24]),
        (8, [32]),
        what="divisor of token_sum_norm",
        also={"loss.aggregation": "token_sum_norm"},
    ),
    # Rewards, with the penalty, of -1, -1, 0 and 0: 0.5 around their mean, with a deviation of (4 x 0.25 / 3) ** 0.5 = 0.577.
    # The other group has the same rewards: 8 of them deviate by (8 x 0.25 / 7) ** 0.5 = 0.5345. 2 x 6 tokens have -0.5 and 2 x 12 have 0.5: the mean is
    # 1 / 6, and the variance (12 x (2 / 3) ** 2 + 24 x (1 / 3) ** 2) / 35 = 8 / 35.
    watch(
        "advantage.scale",
        advantages,
        ("group_std", [-0.866, 0.866]),
        ("none", [-0.5, 0.5]),
        ("batch_std", [-0.9354, 0.9354]),
        ("whiten_tokens", [-1.3944, 0.6972]),
    ),
    # 4 / 3 of 0.5. By length, the mean is (3 + 3) x -1 / 18 = -1 / 3.
    watch(
        "advantage.baseline",
        advantages,
        ("group_mean", [-0.5, 0.5]),
        ("leave_one_out", [-0.6667, 0.6667]),
        ("length_weighted", [-0.6667, 0.3333]),
        ("none", [-1.0, 0.0]),
        also={"advantage.scale": "none"},
    ),
    # Verdicts 1, -1, 1, -1 with the weights 1 and 3, and penalties 0, 0, -1, -1: sums 4, -4, 3, -5 around -0.5. Apart, +-1 / 1.1547 four times, and
    # +-0.5 / 0.5774: 4 x 0.866 + 0.866 and so on.
    watch(
        "advantage.rewards",
        lambda look: advantages_of(look.minibatches()),
        ("summed", [-4.5, -3.5, 3.5, 4.5]),
        ("apart", [-4.3301, -2.5981, 2.5981, 4.3301]),
        also={
            "advantage.scale": "none",
            "reward.grader": [{"grader": "exact"}, {"grader": "exact", "weight": 3.0}],
        },
    ),
    # Rewards 0, 0, 1, 1. With one of the others, a wrong response has a correct one in 2 of 3 cases: 2 / 3 around 5 / 6.
    watch(
        "advantage.best_of",
        advantages,
        (1, [-0.5, 0.5]),
        (2, [-0.1667, 0.1667]),
        also={"advantage.scale": "none", "reward.incorrect": 0.0, "reward.overlong.enabled": False},
    ),
    # -1 / 3 twice and 0 / 6 twice. The rarer of the better responses and one of the others are kept.
    watch(
        "batch.keep",
        trained_lengths,
        ({"shortest": 3}, [3, 3, 6]),
        ({"reward_per_token": 3}, [3, 6, 6]),
        ({"improbable": 2}, [3, 6]),
        what="with an order",
    ),
    echoes("loss.old_logprobs", option("old_logprobs"), "trainer", "sampler"),
    # Nothing is in flight, so auto is none.
    watch(
        "loss.correction",
        option("correction"),
        ("auto", "none"),
        ("truncate", "truncate"),
        ("mask", "mask"),
        ("keep_responses", "keep_responses"),
        ("truncate_responses", "truncate_responses"),
    ),
    watch(
        "loss.importance_range",
        option("correction"),
        ([], "none"),
        ([0.0, 3.0], "truncate"),
        what="with auto",
    ),
    *(
        watch(
            "loss.importance_range",
            option("importance_range"),
            ([], unset),
            ([least, 4.0], (least, 4.0)),
            what=f"of {kind}",
            also={"loss.correction": kind},
        )
        for kind, unset, least in (
            ("truncate", (0.0, 2.0), 0.0),
            ("mask", (0.5, 2.0), 0.25),
            ("keep_responses", (0.99, 1.01), 0.25),
        )
    ),
    # Twice the old probability at the advantage 1: the ratio is clipped at 1.28, or not clipped but weighs log p = log 2 - 5 by at most 1.5.
    watch("loss.objective", token_loss(2.0, 1.0), ("clip", [-1.28]), ("reinforce", [8.6137])),
    watch(
        "loss.objective",
        token_loss(2.0, 1.0),
        ("reinforce", [8.6137]),
        ({"reinforce": {"cap": 1.5}}, [6.4603]),
        what="with options",
    ),
    watch(
        "loss.clip_ratio_high",
        token_loss(2.0, 1.0),
        (0.28, [-1.3231]),
        (0.5, [-1.6487]),
        what="of gmpo",
        also={"loss.objective": "gmpo"},
    ),
    echoes("loss.drop_off_policy", option("drop_off_policy"), None, 0.5),
    echoes("loss.kl_estimator", option("kl_estimator"), "k3", "k3_unbiased", also={"loss.kl_coef": 0.1}),
    echoes("loss.select", option("select"), "all", "high_entropy"),
    watch(
        "loss.select",
        option("select_options"),
        ("high_entropy", ()),
        ({"high_entropy": {"frac": 0.5}}, (("frac", 0.5),)),
        what="with options",
    ),
    echoes("loss.kl_coef", option("kl_coef"), 0.0, 0.1),
    watch("teacher.rewards", advantages, (False, [0.0]), (True, [-0.866, 0.866]), also=TAUGHT),
    echoes("teacher.coef", option("teacher_coef"), 1.0, 0.5, also=TAUGHT),
    echoes("teacher.kl", option("teacher_kl"), "sampled", "full", also=TAUGHT),
    differs("seed", minibatch_order, 0, 1, what="order of learning", also=FOUR),
    # AdamW has two moments of a matrix, Muon has one.
    watch("optimizer.name", moments_of_a_matrix, ("adamw", 2), ("muon", 1)),
    echoes("optimizer.learning_rate", rate(100), 1e-06, 0.5),
    watch("optimizer.warmup_steps", rate(5), (20, 0.25), (0, 1.0), also={"optimizer.learning_rate": 1.0}),
    # Of 100 steps, 20 are the warm-up. Of the 80 that follow, 20 have passed before step 41, and 40 before step 61: (1 + cos(pi / 4)) / 2 = 0.8536.
    watch(
        "optimizer.schedule",
        rate(41),
        ("constant", 1.0),
        ("linear", 0.75),
        ("cosine", 0.8536),
        also=SCHEDULED,
    ),
    watch("optimizer.decay_steps", rate(91), (0, 0.125), (20, 0.5), also=LINEAR),
    watch("optimizer.end_factor", rate(61), (0.0, 0.5), (0.2, 0.6), also=LINEAR),
    # Gradients 1 and 0. With b1 = 0.9, b2 = 0.999: the first moment is 0.9 x 0.1 / (1 - 0.81), the second 0.999 x 0.001 / (1 - 0.998001).
    watch("optimizer.beta1", change(1.0, 0.0), (0.9, [-0.6701]), (0.0, [0.0]), also=NO_DECAY),
    watch("optimizer.beta2", change(1.0, 0.0), (0.999, [-0.6701]), (0.5, [-0.8204]), also=NO_DECAY),
    # A gradient of 1e-8: 1e-8 / (1e-8 + epsilon).
    watch("optimizer.epsilon", change(1e-8), (1e-8, [-0.5]), (3e-8, [-0.25]), also=NO_DECAY),
    watch("optimizer.weight_decay", change(0.0), (0.1, [-0.2]), (0.3, [-0.6])),
    # A gradient of 4 that is scaled down to 1 or not: 1 / (1 + 3) and 4 / (4 + 3).
    watch(
        "optimizer.max_grad_norm",
        change(4.0),
        (1.0, [-0.25]),
        (5.0, [-0.5714]),
        also={**NO_DECAY, "optimizer.epsilon": 3.0},
    ),
    watch("lora.alpha", adapters, (32.0, [4, 8.0, ALL]), (2.0, [4, 0.5, ALL]), also=RANK),
    watch(
        "lora.targets",
        adapters,
        (["all"], [4, 8.0, ALL]),
        (["attention"], [4, 8.0, ALL[:4]]),
        (["mlp", "v_proj"], [4, 8.0, ("v_proj", *ALL[4:])]),
        also=RANK,
    ),
    echoes("optimizer.offload", option("offload"), False, True),
    watch(
        "optimizer.offload",
        moments,
        (False, ["device"]),
        (True, ["pinned_host"]),
        what="where the moments lie",
    ),
]
