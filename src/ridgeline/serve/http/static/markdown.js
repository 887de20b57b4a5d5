// Markdown as elements. Models are not trusted: HTML in their text stays text, a sanitizer goes over what is left, and
// a text that takes too long is shown as it is.

import { copyButton, make } from './dom.js';
import DOMPurify from './vendor/dompurify/purify.es.mjs';

const PATIENCE_MS = 1000, MOST_CHARACTERS = 1 << 18;
const ALLOWED = {
  ALLOWED_TAGS: ['a', 'blockquote', 'br', 'code', 'del', 'em', 'h4', 'h5', 'h6', 'hr', 'li', 'ol', 'p', 'pre', 'strong', 'table',
    'tbody', 'td', 'th', 'thead', 'tr', 'ul', '#text'],
  ALLOWED_ATTR: ['align', 'data-language', 'href', 'start'],
  ADD_URI_SAFE_ATTR: ['align', 'data-language', 'start'],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,  // no address of this server, and no script
  RETURN_DOM_FRAGMENT: true,
};

let worker = null, last = Promise.resolve();

// The text as a fragment of the document; null if it is too long or takes too long. One text at a time.
export function render(text) {
  if (text.length > MOST_CHARACTERS) return Promise.resolve(null);
  last = last.then(() => parse(text)).then((html) => (html === null ? null : fragment(html)));
  return last;
}

async function parse(text) {
  worker ??= await start();
  if (!worker) return null;
  const html = await reply(worker, text);
  if (html === undefined) {
    worker.terminate();
    worker = null;
  }
  return html ?? null;
}

// A worker that has loaded its parts; null if it cannot.
function start() {
  const made = new Worker('page/markdown-worker.js', { type: 'module' });
  return new Promise((ready) => {
    made.addEventListener('message', () => ready(made), { once: true });
    made.addEventListener('error', () => ready(null), { once: true });
  });
}

// What the worker says to a text; undefined if it says nothing in time.
function reply(to, text) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, PATIENCE_MS);
    to.addEventListener('message', ({ data }) => { clearTimeout(timer); resolve(data.html); }, { once: true });
    to.postMessage(text);
  });
}

function fragment(html) {
  const made = DOMPurify.sanitize(html, ALLOWED);
  for (const link of made.querySelectorAll('a')) {
    link.target = '_blank';
    link.rel = 'noopener noreferrer nofollow';
  }
  for (const block of made.querySelectorAll('pre')) frame(block);
  return made;
}

// The language above a block of code, and a button that copies it.
function frame(block) {
  const language = (block.dataset.language ?? '').slice(0, 32), node = make('div', { class: 'code' },
    make('div', { class: 'code-head' }, make('span', {}, language || 'code'), copyButton(() => block.textContent)));
  block.replaceWith(node);
  block.tabIndex = 0;  // a long line is scrolled with the keyboard too
  block.setAttribute('role', 'group');
  block.setAttribute('aria-label', language ? `Code, ${language}` : 'Code');
  node.append(block);
}
