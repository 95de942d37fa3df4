"""Shows a run as an HTML page with figures, and as a trace of its requests on a time axis.

- data: reads the run's files into the values that the page shows.
- page: builds the page, one HTML file that loads no other file.
- panels: the page's figures.
- trace: builds the trace, a file for the viewer Perfetto, from the recorded events of the
  scheduler.
"""
