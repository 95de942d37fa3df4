"""Defines recipes: the schedule, advantage, loss, correction and hyper-parameters of published
methods.

Precedence (docs/semantics.md section 3): recipe < schedule preset < YAML file < command line.

Sources of the values:
- copris: CoPRIS, arXiv 2511.05589, and its authors' script (777pomingzi/CoPRIS,
  CoPRIS_scripts/run_CoPRIS.sh).
- pipeline_rl: PipelineRL, arXiv 2509.19128.
- prime_rl: PRIME-RL; `aipo_delta` and `aipo_form` are assumed.
- rapid: the RAPID paper. Its N_step of 32 is assumed to count generations, so an update has 8
  groups of 4, and the 8 updates of a batch have 64 groups.
- grpo: DeepSeekMath, arXiv 2402.03300, with the KL term of the GRPO baseline in the RAPID paper.
- dapo: DAPO, arXiv 2503.14476. Its overlong buffer is 4,096 of 20,480 tokens, a share of 0.2.
- pg and sft: the baselines of these names in the RAPID paper.

Schedule presets are named combinations of the settings of `ScheduleConfig`, one for each of the
five published schedules.

Invariants
- A recipe sets `algorithm.correction` only by `preset`. If a user chooses another preset, no
  setting of the recipe's correction remains.
"""

from collections.abc import Mapping
from typing import Any, Final

# Synchronous schedules: one policy version generates a whole batch. The trainer trains on it before
# the next batch is started.
_DRAINED: Final = {
    "refill": "batch",
    "boundary": "drain",
    "weight_update": "boundary",
    "overlap": False,
    "max_async_level": 0,
    "on_stale": "wait",
}
# In-flight schedules: generation continues while the trainer works. A weight update pauses engines
# for the transfer and changes the weights of running requests.
_IN_FLIGHT: Final = {
    "refill": "continuous",
    "boundary": "continue",
    "weight_update": "in_flight",
    "overlap": True,
}
SCHEDULE_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sync": _DRAINED,
    "rapid": {**_DRAINED, "updates_per_batch": 8, "group_size": 4},
    "copris": {
        "refill": "continuous",
        "boundary": "abort",
        "weight_update": "boundary",
        "overlap": False,
        "max_async_level": None,
    },
    "pipeline": {**_IN_FLIGHT, "kv": "keep", "max_async_level": None},
    "async": {**_IN_FLIGHT, "kv": "recompute", "max_async_level": 2, "on_stale": "drop"},
}

RECIPES: Final[Mapping[str, Mapping[str, dict[str, Any]]]] = {
    "copris": {
        "schedule": {"preset": "copris", "concurrency": 1024, "groups_per_batch": 64},
        "algorithm": {
            "advantage": {"estimator": "grpo"},
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0},
            "correction": {"preset": "bypass"},
        },
    },
    "pipeline_rl": {
        "schedule": {"preset": "pipeline"},
        "algorithm": {
            "advantage": {"estimator": "dr_grpo"},
            "loss": {"name": "reinforce", "weight": "token", "weight_threshold": 5.0},
            "correction": {"preset": "bypass"},
        },
    },
    "prime_rl": {
        "schedule": {"preset": "async"},
        "algorithm": {
            "advantage": {"estimator": "dr_grpo"},
            "loss": {"name": "aipo", "aipo_delta": 8.0, "aipo_form": "objective"},
            "correction": {"preset": "bypass"},
        },
    },
    "rapid": {
        "schedule": {"preset": "rapid", "groups_per_batch": 64},
        "sampling": {"max_new_tokens": 2048},
        "optimizer": {"lr": 1e-6},
        "algorithm": {
            "advantage": {"estimator": "rapid"},
            "loss": {"name": "rapid", "aggregation": "seq_mean_token_sum"},
            "rapid": {"eta": 2.0, "clip_policy_weight": True, "leave_one_out": False},
            "correction": {"preset": "bypass"},
        },
    },
    "grpo": {
        "schedule": {"preset": "sync"},
        "algorithm": {
            "advantage": {"estimator": "grpo"},
            "loss": {"name": "ppo_clip", "aggregation": "seq_mean_token_mean"},
            "correction": {"preset": "disabled"},
            "kl": {"loss_coef": 0.04, "loss_estimator": "k3"},
        },
    },
    "dapo": {
        "schedule": {"preset": "sync", "dynamic_sampling": True},
        "algorithm": {
            "advantage": {"estimator": "grpo"},
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
            "correction": {"preset": "disabled"},
            "overlong": {"buffer_share": 0.2, "penalty": 1.0},
        },
    },
    "pg": {
        "schedule": {"preset": "sync"},
        "algorithm": {
            "advantage": {"estimator": "pg"},
            "loss": {"name": "reinforce", "weight": "none"},
            "correction": {"preset": "bypass"},
        },
    },
    "sft": {
        "sft": {"optimizer": {"lr": 2e-5}},
        "algorithm": {
            "advantage": {"estimator": "none"},
            "loss": {"name": "sft"},
            "correction": {"preset": "disabled"},
        },
    },
}


def recipe_defaults(recipe: str) -> dict[str, Any]:
    """Return the settings of a recipe as a nested mapping."""
    settings = RECIPES[recipe]
    return {**settings, "algorithm": {"recipe": recipe, **settings["algorithm"]}}
