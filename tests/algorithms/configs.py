"""Loss configurations for the property tests: every surrogate and option, with odd thresholds."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from megatron_async_kernels.loss_types import LossConfig, RejectionRule

RULES = [
    RejectionRule("token", "k1", math.log(0.5), math.log(4.0)),
    RejectionRule("token", "k3", -math.inf, 0.3),
    RejectionRule("seq_sum", "k1", math.log(0.7), math.log(3.0)),
    RejectionRule("seq_mean", "k2", -math.inf, 0.5),
    RejectionRule("seq_mean", "k1", 0.0, 1.0),
    RejectionRule("seq_max", "k3", -math.inf, 2.0),
]

loss_configs = st.builds(
    LossConfig,
    surrogate=st.sampled_from(["reinforce", "aipo", "ppo_clip", "gspo", "cispo", "sft"]),
    ratio_to=st.sampled_from(["rollout", "old"]),
    aggregation=st.sampled_from(
        ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
    ),
    fixed_normalizer=st.sampled_from([1.0, 7.0]),
    clip_low=st.sampled_from([0.2, 0.0, 0.9]),
    clip_high=st.sampled_from([0.28, 0.0, 3.0]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    aipo_delta=st.sampled_from([8.0, 1.0, 0.5]),
    weight_level=st.sampled_from(["none", "token", "sequence"]),
    weight_upper=st.sampled_from([None, 5.0, 1.0]),
    weight_lower=st.sampled_from([None, 0.5, 1.0]),
    rejection=st.lists(st.sampled_from(RULES), max_size=2, unique=True).map(tuple),
    kl_estimator=st.sampled_from(["none", "k2", "k3"]),
    kl_coef=st.sampled_from([0.04, 1.5]),
    kl_weight_upper=st.sampled_from([2.0, 1.0]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    staleness_clip=st.sampled_from([2.0, 1.25]),
)
