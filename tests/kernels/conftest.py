"""Collects the tests of `interpreted/` only if TRITON_INTERPRET=1; they run Triton kernels on the
CPU.

The variable must be set before the kernels are defined and changes every kernel of the process. So
the folder is excluded here, and `test_interpreted.py` runs it in a separate process.
"""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
