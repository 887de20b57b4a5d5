// Make elements. Text of a model or a server is added as text; no HTML is parsed here. (markdown.js renders answers.)

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const make = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);
export const draw = (tag, props = {}, ...children) => fill(document.createElementNS(SVG, tag), props, children);
export const byId = (id) => document.getElementById(id);

// A button that copies what text() returns. Browsers offer the clipboard only to secure pages; on others it copies a
// selection.
export function copyButton(text) {
  const button = make('button', { type: 'button', onclick: () => copy(text(), button) }, 'Copy');
  return button;
}

async function copy(text, button) {
  let copied;
  if (navigator.clipboard) {
    copied = await navigator.clipboard.writeText(text).then(() => true, () => false);
  } else {
    const area = make('textarea', { class: 'hidden' });
    area.value = text;
    button.after(area);
    area.select();
    copied = document.execCommand('copy');
    area.remove();
    button.focus();
  }
  button.textContent = copied ? 'Copied' : 'Not copied';
  setTimeout(() => { button.textContent = 'Copy'; }, 1500);
}

// A table. columns: their headers, none of them empty. rows: lists of a header and cells.
export function table(caption, columns, rows) {
  return make('table', {},
    make('caption', { class: 'hidden' }, caption),
    make('thead', {}, make('tr', {}, columns.map((column) => make('th', { scope: 'col' }, column)))),
    make('tbody', {}, rows.map(([name, ...cells]) =>
      make('tr', {}, make('th', { scope: 'row' }, name), cells.map((cell) => make('td', {}, cell))))));
}

const PREFIXES = [[1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']];

export function quantity(value, unit) {
  const [size, prefix] = PREFIXES.find(([least]) => Math.abs(value) >= least) ?? [1, ''];
  return `${significant(value / size)} ${prefix}${unit}`;
}

export function seconds(value) {
  if (value >= 1) return `${significant(value)} s`;
  return value >= 1e-3 ? `${significant(value * 1e3)} ms` : `${significant(value * 1e6)} µs`;
}

export function significant(value) {
  if (value === 0) return '0';
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString('en', { maximumFractionDigits: Math.min(digits, 6) });
}

export const whole = (value) => Math.round(value).toLocaleString('en');
