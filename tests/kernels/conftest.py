"""Tests that run Triton kernels on CPU live in `interpreted/` and need TRITON_INTERPRET=1.

The variable must be set before the kernels are defined and changes every kernel of the process,
so the folder is left out here and run by `test_interpreted.py` in a process of its own.
"""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
