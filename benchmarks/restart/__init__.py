"""A run that is killed as a whole and resumed: what it costs."""
