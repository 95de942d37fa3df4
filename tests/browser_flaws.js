// `flawsOf` returns messages about the visible flaws of a document in a window of `width` pixels.
// A part that scrolls by itself (code, a wide table) may be wider than the window. The element
// `article` contains the text that was written in Markdown.

const RAW = {
  'a list item': /(^|\n)\s*[-*+] \S/,
  'emphasis': /\*\*\S/,
  'a link': /\]\(\S/,
  'a heading': /^#{1,6} /m,
  'a table': /\|\s*:?-{3,}/,
  'code': /`/,
  'a directive': /:::/,
  'columns': /\S {3,}\S/,
  'a tag': /<\/?[a-z]+[ >]/,
  'an entity': /&(#\d+|[a-z]+);/,
};

function flawsOf(doc, width) {
  const found = new Set();
  if (doc.documentElement.scrollWidth > width) found.add('the page scrolls sideways');
  for (const text of textsOf(doc)) {
    if (text.parentElement.closest('article') && !text.parentElement.closest('code'))
      for (const [what, pattern] of Object.entries(RAW))
        if (pattern.test(text.data)) found.add(`${what} in raw Markdown: ${shown(text.data)}`);
    for (const word of brokenWords(doc, text)) found.add(`a broken word: ${word}`);
  }
  for (const element of doc.body.querySelectorAll('*:not(svg *)'))
    if (element.checkVisibility({opacityProperty: true, visibilityProperty: true})) {
      if (isClipped(doc, element)) found.add(`clipped: ${shown(element.textContent)}`);
      if (isOutside(doc, element, width)) found.add(`outside: ${shown(element.textContent)}`);
    }
  for (const label of clippedLabels(doc)) found.add(`clipped in a figure: ${label}`);
  for (const pair of overlappingLabels(doc)) found.add(`overlapping labels: ${pair}`);
  for (const image of doc.images)
    if (!image.naturalWidth) found.add(`missing picture: ${image.getAttribute('src')}`);
  for (const {name} of doc.defaultView.performance.getEntriesByType('resource'))
    if (/^(https?:)?\/\//.test(name)) found.add(`loaded from the network: ${name}`);
  return [...found];
}

const shown = text => text.trim().replace(/\s+/g, ' ').slice(0, 60);

function* textsOf(doc) {
  const walk = doc.createTreeWalker(doc.querySelector('article') || doc.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walk.nextNode());)
    if (text.data.trim() && !text.parentElement.closest('script, style, pre')) yield text;
}

function* brokenWords(doc, text) {
  for (const {0: word, index} of text.data.matchAll(/(?<![\p{L}\p{N}])--[\w-]+|[\p{L}\p{N}_]+/gu)) {
    const range = doc.createRange();
    range.setStart(text, index);
    range.setEnd(text, index + word.length);
    const lines = [...range.getClientRects()].filter(box => box.width > 0);
    if (lines.some(box => box.top > lines[0].bottom - 1)) yield word;
  }
}

function isClipped(doc, element) {
  const {overflowX} = doc.defaultView.getComputedStyle(element);
  return ['hidden', 'clip'].includes(overflowX) && element.clientWidth > 0
    && element.scrollWidth > element.clientWidth + 1
    && element.getBoundingClientRect().right > 0; // A closed drawer is left of the window.
}

function isOutside(doc, element, width) {
  const box = element.getBoundingClientRect();
  if (!box.width || (box.right <= width + 1 && box.left >= -1)) return false;
  for (let part = element; part; part = part.parentElement) {
    const {overflowX, position} = doc.defaultView.getComputedStyle(part);
    if (overflowX !== 'visible' || position === 'fixed') return false;
  }
  return true;
}

function* clippedLabels(doc) {
  for (const label of doc.querySelectorAll('svg text')) {
    const box = label.getBoundingClientRect(), room = label.ownerSVGElement.getBoundingClientRect();
    if (box.width && (box.right > room.right + 1 || box.left < room.left - 1)) yield label.textContent;
  }
}

function* overlappingLabels(doc) {
  for (const figure of doc.querySelectorAll('.js-plotly-plot')) {
    const labels = [...figure.querySelectorAll('svg text')]
      .map(label => ({text: label.textContent, box: label.getBoundingClientRect()}))
      .filter(({text, box}) => text && box.width);
    for (const [i, {text, box}] of labels.entries())
      for (const other of labels.slice(i + 1))
        if (overlap(box, other.box)) yield `${text} / ${other.text}`;
  }
}

function overlap(a, b) {
  return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
}
