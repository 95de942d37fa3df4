"""Builds a self-contained HTML page about one run, or about several runs next to each other.

Invariants
- The page loads no other file: it contains plotly's script (4.8 MB) and every value.
- Text that comes from a run (prompts, responses, messages) is escaped.
- Colors follow the system's light or dark mode; on paper they are light.
"""

import html
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime

from plotly.offline import get_plotlyjs

from megatron_async.report.data import ReportSample, RunData
from megatron_async.report.panels import COLORS, PANELS, Figure

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #8884; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; } }
@media print { :root { --ink: #000; --paper: #fff; color-scheme: light; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1240px; margin: 20px auto; padding: 0 16px; }
h1 { font-size: 22px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 28px 0 8px; break-after: avoid; }
h3 { font-size: 14px; font-weight: normal; margin: 8px 0 0; }
table { border-collapse: collapse; } td, th { padding: 2px 14px 2px 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid var(--line); }
.grid { display: grid; gap: 10px 18px;
        grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); }
.grid > * { min-width: 0; break-inside: avoid; } .none { opacity: .6; padding: 12px 0; }
.sample { break-inside: avoid; border: 1px solid var(--line); border-radius: 6px;
          padding: 8px 12px; margin: 8px 0; }
h1, th, td + td, li, pre, .sample { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; margin: 6px 0; font-size: 12px; } pre:empty { display: none; }
.good { margin: 0; font-size: 12px; opacity: .75; }
.quiet { opacity: .75; } @media (max-width: 800px) { .grid { grid-template-columns: 1fr; } }
"""
# plotly's colors do not follow the color scheme of the page. This script sets the color of plotly's
# text to the color of the page's text, again when the color scheme changes or the page is printed.
_SCRIPT = """
const dark = matchMedia('(prefers-color-scheme: dark)'), printing = matchMedia('print');
function recolor() {
  const ink = dark.matches && !printing.matches ? '#e6e6e6' : '#1b1b1b';
  for (const plot of document.querySelectorAll('.js-plotly-plot'))
    Plotly.relayout(plot, {'font.color': ink});
}
dark.addEventListener('change', recolor); printing.addEventListener('change', recolor);
addEventListener('beforeprint', recolor); recolor();
document.body.dataset.ready = 'yes';
"""


def report_page(runs: Sequence[RunData]) -> str:
    """Return the HTML of a page about these runs."""
    names = " and ".join(html.escape(run.name) for run in runs)
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    sections = [
        f"<h1>{names}</h1><p class=quiet>made {made} by megatron-async report</p>",
        _totals(runs),
        "<h2>Over the steps</h2>",
        _figures(runs),
        "<h2>Warnings</h2>",
        _columns(runs, _warnings),
        f"<h2>{'Episodes' if any(run.episode_endings for run in runs) else 'Trajectories'}</h2>",
        _columns(runs, _samples),
    ]
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{names}</title>"
        '<meta name=viewport content="width=device-width">'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
        f"{''.join(sections)}<script>{_SCRIPT}</script></body></html>\n"
    )


def _totals(runs: Sequence[RunData]) -> str:
    """Return the HTML of a table with settings and totals, one column for each run."""
    columns = [
        {**run.settings, **dict(run.summary.facts()), "warnings": str(len(run.warnings))}
        for run in runs
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = ((name, *(column.get(name, "-") for column in columns)) for name in names)
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    body = "".join(f"<tr><td>{'</td><td>'.join(map(_wrapping, row))}</td></tr>" for row in rows)
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _wrapping(text: str) -> str:
    """Return the text as HTML in which a line may break after a slash, for long paths."""
    return html.escape(text).replace("/", "/<wbr>")


def _figures(runs: Sequence[RunData]) -> str:
    """Return the HTML of all figures. One run has them in two columns, several runs in one column
    each.

    The figures of the same panel have the same axes for all runs.
    """
    cells = []
    for number, panel in enumerate(PANELS):
        row = [panel.figure(run) for run in runs]
        if any(row):
            _same_axes([figure for figure in row if figure is not None])
            cells += [_cell(figure, panel.good, f"f{number}-{i}") for i, figure in enumerate(row)]
    return f'<div class=grid style="--columns:{max(2, len(runs))}">{"".join(cells)}</div>'


def _same_axes(figures: Sequence[Figure]) -> None:
    """Give the figures of one panel, which show different runs, the same range of the vertical
    axis, unless the axis is logarithmic."""
    if len(figures) < 2 or figures[0].layout.yaxis.type == "log":
        return
    low = min((bound for figure in figures for bound in _extent(figure)), default=0.0)
    high = max((bound for figure in figures for bound in _extent(figure)), default=0.0)
    for figure in figures:
        figure.update_yaxes(range=[min(0.0, low), high + 0.05 * (high - low or 1.0)])


def _extent(figure: Figure) -> tuple[float, ...]:
    """Return the lowest and the highest value that a figure draws; return an empty tuple if it
    draws none.

    For stacked bars or areas, the sum counts. For a value with an error bar, the upper end of the
    bar counts.
    """
    ends: list[float] = []
    stacks: defaultdict[float, float] = defaultdict(float)
    for trace in figure.data:
        errors = getattr(trace, "error_y", None)
        above = (errors.array if errors is not None else None) or [0.0] * len(trace.y)
        for x, y, more in zip(trace.x, trace.y, above, strict=False):
            if isinstance(y, int | float):
                ends.append(y + more)
                stacks[x] += y
    if any(trace.type == "bar" or trace.stackgroup for trace in figure.data):
        ends += stacks.values()
    return (min(ends), max(ends)) if ends else ()


def _cell(figure: Figure | None, good: str, name: str) -> str:
    """Return the HTML of one figure with its title; if `figure` is None, return the HTML of a note
    that the run has no such metrics.

    Args:
        good: Description of a good curve.
        name: Id of the HTML element.
    """
    if figure is None:
        return "<div class=none>this run has no such metrics</div>"
    # The title is moved from the figure to the HTML, because plotly does not wrap a long title.
    title, figure.layout.title = figure.layout.title.text, None
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    return f"<div><h3>{title}</h3><p class=good>Good: {good}</p>{drawn}</div>"


def _columns(runs: Sequence[RunData], section: Callable[[RunData], str]) -> str:
    """Return the HTML in which the results of `section` for all runs are next to each other."""
    columns = "".join(f"<div>{section(run)}</div>" for run in runs)
    return f'<div class=grid style="--columns:{len(runs)}">{columns}</div>'


def _warnings(run: RunData) -> str:
    """Return the HTML of a run's list of warnings."""
    if not run.warnings:
        return "<p class=quiet>none</p>"
    rows = "".join(
        f"<li><b>{html.escape(str(w['name']))}</b>, step {w['step']:.0f}: "
        f"{_with_code(str(w['message']))}</li>"
        for w in run.warnings
    )
    return f"<ul>{rows}</ul>"


def _with_code(message: str) -> str:
    """Return a message as HTML, with text in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(message))


def _samples(run: RunData) -> str:
    """Return the HTML of all samples of a run."""
    if not run.samples:
        return "<p class=quiet>no trajectory has a reward yet</p>"
    return "".join(_sample(sample) for sample in run.samples)


def _sample(sample: ReportSample) -> str:
    """Return the HTML of a prompt and its response, with a color for each policy version."""
    versions = dict.fromkeys(piece.version for piece in sample.pieces)
    colors = dict(zip(versions, itertools.cycle(COLORS), strict=False))

    def span(version: str | None, title: str, text: str) -> str:
        color = f"background:{colors[version]}55"
        return f'<span style="{color}" title="{html.escape(title)}">{html.escape(text)}</span>'

    response = "".join(
        _heading(p.heading)
        + span(p.version, f"{_author(p.version, p.engine)}, {p.tokens} tokens", p.text)
        for p in sample.pieces
    )
    prompt = f"<pre class=quiet>{html.escape(sample.prompt)}</pre>" if sample.prompt else ""
    legend = " ".join(span(v, "", f"\u00a0{_author(v, '')}\u00a0") for v in versions)
    return (
        f"<div class=sample><b>{html.escape(sample.why)}</b> "
        f"<span class=quiet>{html.escape(sample.facts)}</span>"
        f"{prompt}<pre>{response}</pre>"
        f"<div>{legend}</div></div>"
    )


def _heading(text: str) -> str:
    """Return the HTML of a heading inside a response; empty if there is none."""
    return f"</pre><div class=quiet>{html.escape(text)}</div><pre>" if text else ""


def _author(version: str | None, engine: str) -> str:
    """Return in words who wrote a text: the environment (if `version` is None), or a policy version
    on an engine."""
    written = "environment" if version is None else f"policy {version}"
    return f"{written} on {engine}" if engine else written
