"""Provides the rollout side of a run: it drives the scheduler, engines, scorers, prompts and the
store.

- driver: asyncio driver. Every event reaches the scheduler through it, one event at a time.
- generation: running generation requests. It resumes partial trajectories, and lets only one
  request at a time write to a trajectory.
- episodes: calls to environments and handling of their replies, for training and for evaluations.
- responses: specification of a response, one generation request, and the loop that sends requests
  until a response is complete.
- admission: turns prompts into groups, and drops and counts prompts that no engine can process.
- prompt_lengths: limit on the tokens of a prompt and its response.
- prompts: training prompts in order; skips some of them by their pass rate.
- scoring: scores finished responses and stores their rewards.
- fleet: starts engines, detects dead engines, restarts them, and ends the run if none is left.
- engine_health: rules for whether a failure counts against an engine, a request or a prompt. No
  I/O.
- monitor: polls engines for their load, and checks whether an engine on which a request failed
  still replies.
- tracked_engine: the driver's state of one engine: whether its liveness checks are suspended, and
  for which policy versions its tokens are accepted.
- background: the driver's background tasks, and the first failure of the run, which ends it.
- weight_checks, probe: verification of engines after a weight update: compares their checksums, and
  compares log-probs of tokens that they sample with the trainer's. The limits are in
  `weight_sync.verify`.
- shared_devices: alternating use of devices that engines share with the trainer.
- manager: the calls that a trainer makes to the rollout side. manager_host: the process in which
  the manager runs.
- messages, trainer_task: values that a trainer and the manager exchange.
- evaluate: accuracy on held-out problems, and when it is measured.
- statistics: counters of the rollout side, and the metrics of each batch.
"""
