"""What had to be mended before a first run on GPUs, taken back place by place.

Names begin with the point of issue 16 ("Ready for GPUs"): 1.1 to 1.9 are its list of defects, 2 are
its checks without a GPU. Each entry puts back what the code did wrong, or plants what such a check
is there to find.
"""

from __future__ import annotations

from typing import Final

from benchmarks.mutations import gpu_checks, gpu_start, gpu_work
from benchmarks.mutations.mutation import Mutation

MUTATIONS: Final[tuple[Mutation, ...]] = (
    *gpu_start.MUTATIONS,
    *gpu_work.MUTATIONS,
    *gpu_checks.MUTATIONS,
)
