"""Provides a headless Chromium for tests: the content of a page after its scripts, and its visible
flaws.

`launch/test.sh` installs Chromium (Debian: chromium-headless-shell).
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.wanted import needs

_SWITCH = "MEGATRON_ASYNC_BROWSER"
_BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
needs_browser = needs(_BROWSER, "Chromium (Debian: chromium-headless-shell)", _SWITCH)
_HARNESS = """<!doctype html><meta charset=utf-8><body><pre id=flaws></pre><script>{flaws}
async function draw(page, width) {{
  const frame = document.createElement('iframe');
  frame.style = `border:0; height:900px; width:${{width}}px`;
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  await new Promise(done => setTimeout(done, 500)); // Time for the page's scripts.
  const found = flawsOf(frame.contentDocument, width);
  frame.remove();
  return found.map(flaw => `${{page.split('/').slice(-3).join('/')}} at ${{width}} px: ${{flaw}}`);
}}
(async () => {{
  const found = [];
  for (const page of {pages}) for (const width of {widths}) found.push(...await draw(page, width));
  document.getElementById('flaws').textContent = JSON.stringify(found);
  document.body.dataset.ready = 'yes';
}})();
</script>"""


def drawn(page: Path, *options: str) -> tuple[str, str]:
    """Return document and console of a page that sets `data-ready`, after its scripts, without
    network access."""
    assert _BROWSER, f"Chromium is not installed; set {_SWITCH}=0 to skip its tests"
    done = subprocess.run(
        [
            _BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=60000",
            "--window-size=1280,2000",
            *options,
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert 'data-ready="yes"' in done.stdout, done.stderr[-2000:]
    return done.stdout, done.stderr


def flaws(pages: Sequence[Path], folder: Path, widths: Sequence[int] = (1280, 400)) -> list[str]:
    """Return the flaws that `browser_flaws.js` finds in each page, in windows of these widths."""
    harness = folder / "harness.htm"
    script = Path(__file__).with_name("browser_flaws.js").read_text()
    uris = json.dumps([page.as_uri() for page in pages])
    harness.write_text(_HARNESS.format(flaws=script, pages=uris, widths=list(widths)))
    document, _ = drawn(harness, "--allow-file-access-from-files")
    found = re.search(r'<pre id="flaws">(.*?)</pre>', document, re.DOTALL)
    assert found is not None
    flaws: list[str] = json.loads(html.unescape(found[1]))
    return flaws
