"""SGLang imports every module of this package (`SGLANG_EXTERNAL_MODEL_PACKAGE`) at its start.

The rest of its models it imports only for an architecture that is not here.

- families: SGLang's own classes of our model families.
"""
