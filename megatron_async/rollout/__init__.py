"""Runs the scheduler against engines, scorers, prompts and the store.

- driver: the asyncio driver. Every event reaches the scheduler here, one at a time.
- generation: running requests; a partial trajectory is resumed here. One writer a trajectory.
- episodes: calls of environments, and what follows from their replies; also of an evaluation.
- responses: a response: what is wanted of it, one request toward it, and requests to its end.
- admission, prompt_lengths: prompts become groups; what no engine can take is dropped, and counted.
- prompts: training prompts in order, some passed over by their pass rate.
- scoring: from a finished response to its reward in the store.
- fleet: starts engines, notices the dead, restarts them, gives up with one sentence.
- engine_health: what counts against an engine, a request or a prompt; no I/O.
- monitor: asks engines for their load, and after a failure whether they live.
- tracked_engine: an engine as the driver sees it: suspended or not, and which versions' tokens
  are accepted.
- background: the driver's tasks, and the first failure, which ends the run.
- weight_checks, probe: engines verified after an update, by the rules of `weight_sync.verify`.
- shared_devices: turns on devices that engines share with the trainer.
- manager: the whole side behind a handful of calls. manager_host: its process.
- messages: what a trainer and the manager send each other.
- evaluate: accuracy on held-out problems, and when it is measured.
- statistics: counts of the rollout side, and the metrics of each batch.
"""
