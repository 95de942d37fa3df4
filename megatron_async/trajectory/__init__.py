"""Provides the data types of trajectories, and packs complete groups into training batches.

- columns: the arrays that a token can have besides its id and log-prob, and how they are stored.
- types: policy versions, segments, turns, trajectories, branches, groups, and their states.
- batch: `TokenBatch`, the packed token streams of one optimizer batch, without padding.
- packing: packs complete groups into one `TokenBatch`, with the version, lag and loss mask of every
  token.
- token_checks: detects token ids and log-probs that no policy can produce.
- sample_lag: counts the lag of trajectories in samples.
"""
