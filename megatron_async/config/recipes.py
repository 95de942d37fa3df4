"""Named recipes: which schedule, advantage, loss, correction and hyper-parameters a source uses.

Precedence (docs/semantics.md section 3): recipe < schedule preset < YAML file < command line.
Sources: copris CoPRIS, arXiv 2511.05589, with the values of its authors' script
(777pomingzi/CoPRIS, CoPRIS_scripts/run_CoPRIS.sh);
pipeline_rl PipelineRL, arXiv 2509.19128; prime_rl PRIME-RL (delta and form assumed); rapid RAPID;
grpo DeepSeekMath, arXiv 2402.03300, with the KL of RAPID's baseline; dapo DAPO, arXiv 2503.14476;
pg and sft as in RAPID's comparison. RAPID's N_step of 32 is read as generations, so 8 groups of 4
an update, 64 groups for its 8 updates (assumed). DAPO's overlong buffer is 4,096 of 20,480 tokens.

The presets are the five schedules and their defaults: named points of `ScheduleConfig`'s space.

Invariants
- A recipe names a correction only by its preset, so that choosing another preset replaces
  it as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

SCHEDULE_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "sync": {
            "refill": "batch",
            "boundary": "drain",
            "weight_update": "boundary",
            "overlap": False,
            "max_async_level": 0,
            "on_stale": "wait",
        },
        "rapid": {
            "refill": "batch",
            "boundary": "drain",
            "weight_update": "boundary",
            "overlap": False,
            "updates_per_batch": 8,
            "group_size": 4,
            "max_async_level": 0,
            "on_stale": "wait",
        },
        "copris": {
            "refill": "continuous",
            "boundary": "abort",
            "weight_update": "boundary",
            "overlap": False,
            "max_async_level": None,
        },
        "pipeline": {
            "refill": "continuous",
            "boundary": "continue",
            "weight_update": "in_flight",
            "kv": "keep",
            "overlap": True,
            "max_async_level": None,
        },
        "async": {
            "refill": "continuous",
            "boundary": "continue",
            "weight_update": "in_flight",
            "kv": "recompute",
            "overlap": True,
            "max_async_level": 2,
            "on_stale": "drop",
        },
    }
)


def schedule_defaults(preset: str) -> dict[str, Any]:
    """Defaults of one preset, as a nested mapping of settings. Raises KeyError for no preset."""
    return {"schedule": {"preset": preset, **SCHEDULE_PRESETS[preset]}}


RECIPES: Final[MappingProxyType[str, dict[str, dict[str, Any]]]] = MappingProxyType(
    {
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
)


def recipe_defaults(recipe: str) -> dict[str, Any]:
    """Defaults of one recipe, as a nested mapping of settings. Raises KeyError for no recipe."""
    settings = RECIPES[recipe]
    return {**settings, "algorithm": {"recipe": recipe, **settings["algorithm"]}}
