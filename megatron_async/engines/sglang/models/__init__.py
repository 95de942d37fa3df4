"""SGLang's classes for the supported model families (`SGLANG_EXTERNAL_MODEL_PACKAGE`).

SGLang imports every module of this package when it starts. It imports its other models only for an
architecture that this package lacks.

- families: the classes.
"""
