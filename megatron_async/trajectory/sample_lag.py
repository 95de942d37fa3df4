"""Counts lag in samples, which is the number of trajectories trained since a policy version.

A sample is one trajectory. PipelineRL counts lag in samples rather than in updates, because a
bound in samples keeps its meaning when the batch size changes.

Invariants
- The lag of a trajectory is the lag of its oldest trained token (docs/semantics.md section 1). If
  policy version a generated that token and the token is in batch n, the lag is the number of
  trajectories in the batches a to n - 1 of the current lineage. On-policy (a = n), this is 0.
- A batch that the trainer could not use counts as 0 trajectories in every lag that is computed
  after the batch was dropped.

After a resume, the size of a batch that compaction has removed from the store is not known, so the
usual batch size is assumed. If compaction has removed only some trajectories of a batch, the
remaining ones are counted. Lags that include such a batch are estimates.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from megatron_async.trajectory.batch import TokenBatch


class SamplesTrained:
    """Counts the trajectories of each batch, and computes lags in samples from the counts."""

    def __init__(
        self,
        first_step: int = 0,
        batch_size: int = 0,
        sizes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Start with the sizes of the batches before `first_step`, which come from the store.

        Args:
            first_step: Number of the first batch that will be added.
            batch_size: Size that is assumed for a batch before `first_step` that `sizes` lacks.
            sizes: Number of trajectories of each batch before `first_step`, by step.
        """
        # Element n is the number of trajectories in the batches 0 to n - 1.
        self._before = [0]
        for step in range(first_step):
            self.add(sizes.get(step, batch_size))

    def add(self, samples: int) -> None:
        """Add the next batch, which has `samples` trajectories."""
        self._before.append(self._before[-1] + samples)

    def drop(self, step: int) -> None:
        """Set the size of batch `step` to 0, because the trainer could not train it."""
        samples = self._before[step + 1] - self._before[step]
        for later in range(step + 1, len(self._before)):
            self._before[later] -= samples

    def between(self, version: int, step: int) -> int:
        """Return the number of trajectories in the batches `version` to `step` - 1."""
        return self._before[step] - self._before[version]

    def lag_E(self, batch: TokenBatch) -> npt.NDArray[np.int64]:
        """Return the lag in samples of each trajectory of `batch`, by its oldest trained token.

        The lag in samples is the number of trajectories trained between the token's policy version
        and `batch`. Trajectories without trained tokens are left out. `batch` must have been added
        before, or be the next one to add.
        """
        trained_T = batch.loss_mask_T > 0
        if not batch.num_sequences:
            return np.zeros(0, np.int64)
        version_T = np.where(trained_T, batch.version_T, batch.step + 1)
        oldest_E = np.minimum.reduceat(version_T, batch.cu_seqlens_S1[batch.first_E])
        oldest_E = oldest_E[oldest_E <= batch.step]
        first = int(oldest_E.min(initial=batch.step))
        before = np.asarray(self._before[first : batch.step + 1])
        return before[-1] - before[oldest_E - first]
