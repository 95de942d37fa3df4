"""Package of SGLang's model classes for the supported model families, to which the environment
variable `SGLANG_EXTERNAL_MODEL_PACKAGE` points.

SGLang imports every module of this package when it starts. It imports all of its own model modules,
which takes long, only for an architecture that this package lacks.

- families: the classes.
"""
