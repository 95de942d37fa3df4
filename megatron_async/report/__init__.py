"""Shows a run as a page with figures, and as a trace of every request.

- data: reads the run's files into the values that the page shows.
- page: builds the page, a file that loads nothing.
- panels: the page's figures.
- trace: spans of every request, from recorded events, for Perfetto.
"""
