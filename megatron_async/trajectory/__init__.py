"""Trajectories and packed batches.

- columns: what each token has, declared by name and type.
- types: policy versions, segments, trajectories, groups and their states.
- batch: `TokenBatch`, one optimizer batch as packed streams without padding.
- packing: complete groups to one batch; every token has its version, lag and mask.
- token_checks: values that a token of the policy can have.
- sample_lag: lag in samples.
"""
