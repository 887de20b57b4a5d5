"""Audit the accessibility of a page, with a function of our own that a browser runs and with axe-core."""

from __future__ import annotations

from typing import Any

import pytest


def axe(page: Any) -> list[str]:
    """Return the rules of axe-core that a page breaks, each with its elements. Skips the test
    if axe is not installed.
    """
    module = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install 'ridgeline[browser]'")
    found = module.Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes']]}" for one in found]


# It returns problems, one a line: names of controls, unique ids, order of headings, WCAG's contrast of text (4.5, large
# text 3).
AUDIT = r"""() => {
  const problems = [], seen = (e) => e.checkVisibility({ visibilityProperty: true }) && !e.closest('.hidden, .skip');
  const say = (e, what) => problems.push(`${e.tagName}#${e.id}.${e.className?.baseVal ?? e.className}: ${what}`);
  const name = (e) => e.getAttribute('aria-label') || e.labels?.[0]?.textContent.trim() || e.textContent.trim() ||
    document.getElementById(e.getAttribute('aria-labelledby'))?.textContent;
  if (!document.documentElement.lang) problems.push('no language');
  if (document.querySelectorAll('h1').length !== 1) problems.push('not one h1');
  if (document.querySelectorAll('main').length !== 1) problems.push('not one main');
  const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
  if (new Set(ids).size !== ids.length) problems.push('ids that are not unique');
  for (const e of document.querySelectorAll('[aria-describedby], [aria-labelledby], label[for]')) {
    const to = e.getAttribute('aria-describedby') ?? e.getAttribute('aria-labelledby') ?? e.getAttribute('for');
    if (!document.getElementById(to)) say(e, `refers to ${to}, which is not there`);
  }
  for (const e of document.querySelectorAll('input, textarea, select, button, a, meter, fieldset')) {
    const text = e.tagName === 'FIELDSET' ? e.querySelector('legend')?.textContent : name(e);
    if (!text) say(e, 'has no name');
  }
  for (const e of document.querySelectorAll('img')) if (!e.hasAttribute('alt')) say(e, 'has no alt');
  let level = 1;
  for (const e of document.querySelectorAll('h1, h2, h3, h4')) {
    const now = Number(e.tagName[1]);
    if (now > level + 1) say(e, 'skips a level of headings');
    level = now;
  }
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const over = (colors) => {  // from the back to the front
    canvas.clearRect(0, 0, 1, 1);
    for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255);
  };
  const light = (rgb) => rgb.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !seen(e) || e.closest(':disabled, noscript, option')) continue;
    const style = getComputedStyle(e), behind = [];
    for (let p = e; p; p = p.parentElement) behind.unshift(getComputedStyle(p).backgroundColor);
    const ink = e instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(over(behind)), light(over([...behind, ink]))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (a + 0.05) / (b + 0.05);
    const text = walker.currentNode.textContent.trim().slice(0, 20);
    if (ratio < (large ? 3 : 4.5)) say(e, `contrast ${ratio.toFixed(2)} of ${text}`);
  }
  return problems;
}"""
