"""Pages that show a run: its figures, and the life of every request.

- data: what the page shows, read from the run's files. page: the page, a file that loads nothing.
- panels: its figures.
- trace: the life of every request, from recorded events, for Perfetto.
"""
