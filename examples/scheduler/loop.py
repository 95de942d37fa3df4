"""Drive the scheduler with your own loop; a toy engine ends each request at a random time."""

import random
from collections import deque

from megatron_async.config import build_config
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import PolicyVersion

SIZES = {"groups_per_batch": 2, "group_size": 2, "concurrency": 8, "updates_per_batch": 1}


def run(preset: str, steps: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Run the loop until `steps` batches are emitted; return the group ids of each batch."""
    start, rng, running, groups = PolicyVersion(0, 0), random.Random(seed), set(), 0
    schedule = build_config({"schedule": {"preset": preset, **SIZES}}).schedule
    scheduler = Scheduler(schedule, first_step=0, version=start)
    events, batches = deque([ev.EngineUp("engine", start, kv_capacity_tokens=100_000)]), []
    while len(batches) < steps:
        if not events:  # no event is pending, so the engine generates a token for each request
            events += [ev.TokensArrived(i, 1, len(batches)) for i in sorted(running)]
            events += [ev.Finished(i) for i in sorted(running) if rng.random() < 0.25]
        event = events.popleft()
        running -= {event.trajectory_id} if isinstance(event, ev.Finished | ev.Aborted) else set()
        for action in scheduler.step(event):
            match action:
                case ev.RequestPrompts(count=n):  # group g has trajectories 2 g and 2 g + 1
                    new = range(groups, groups := groups + n)
                    specs = [ev.GroupSpec(g, (2 * g, 2 * g + 1), prompt_tokens=10) for g in new]
                    events.append(ev.PromptsAvailable(tuple(specs)))
                case ev.Submit(trajectory_id=i):
                    running.add(i)
                case ev.Abort(trajectory_id=i):  # keeps its tokens; `Submit` resumes it later
                    events.append(ev.Aborted(i))
                case ev.Score(trajectory_id=i):
                    events.append(ev.RewardReady(i, reward=rng.random()))
                case ev.EmitBatch(step=step, group_ids=group_ids):
                    batches.append(group_ids)
                    events += [ev.BatchTaken(step), ev.UpdateRequested(step + 1)]
                case ev.AllowUpdate(number=n):  # a real trainer would send its weights here
                    events.append(ev.WeightsPublished(PolicyVersion(0, n)))
    return batches


if __name__ == "__main__":
    print(run("copris", steps=8))
