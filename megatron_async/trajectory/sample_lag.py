"""Lag in samples: how many trajectories were trained between a version and the batch that uses it.

PipelineRL counts lag so: a bound in samples does not move when the batch size does.

Invariants
- The lag of a trajectory is that of its oldest trained token (docs/semantics.md section 1).
  Version a in batch n: the trajectories of batches a .. n - 1 on the current lineage, which is 0
  on-policy.
- A batch that the trainer could not use has trained nothing, for the batches that are packed after
  it was dropped.

After a resume, the size of a batch that compaction has taken is not known: it counts with the usual
size, and one of which a part was taken with what is left. Lags that reach back over such a batch
are estimates.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from megatron_async.trajectory.batch import TokenBatch


class SamplesTrained:
    """Counts trajectories by the step that trains them."""

    def __init__(
        self,
        first_step: int = 0,
        batch_size: int = 0,
        sizes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`sizes` of the batches before `first_step`; one that is not there counts `batch_size`."""
        self._before = [0]  # [n]: in batches 0 .. n - 1
        for step in range(first_step):
            self.add(sizes.get(step, batch_size))

    def add(self, samples: int) -> None:
        """Take the size of the next batch."""
        self._before.append(self._before[-1] + samples)

    def drop(self, step: int) -> None:
        """Take back batch `step`, of which nothing was trained."""
        samples = self._before[step + 1] - self._before[step]
        for later in range(step + 1, len(self._before)):
            self._before[later] -= samples

    def between(self, version: int, step: int) -> int:
        """Trained by updates `version` .. `step` - 1."""
        return self._before[step] - self._before[version]

    def lag_E(self, batch: TokenBatch) -> npt.NDArray[np.int64]:
        """Return the lag of each trained trajectory; `batch` is the next or an earlier one."""
        trained_T = batch.loss_mask_T > 0
        if not batch.num_sequences:
            return np.zeros(0, np.int64)
        version_T = np.where(trained_T, batch.version_T, batch.step + 1)
        oldest_E = np.minimum.reduceat(version_T, batch.cu_seqlens_S1[batch.first_E])
        oldest_E = oldest_E[oldest_E <= batch.step]
        first = int(oldest_E.min(initial=batch.step))
        before = np.asarray(self._before[first : batch.step + 1])
        return before[-1] - before[oldest_E - first]
