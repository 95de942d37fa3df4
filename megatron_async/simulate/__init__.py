"""Cost models and a virtual clock that drive the same scheduler."""
