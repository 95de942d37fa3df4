"""Scripts that repeat experiments of CoPRIS, PipelineRL, PRIME-RL and RAPID, one script for each.

Each script has a negative control: a variant of the experiment in which the effect must be absent.
"""
