// Render Markdown. Models are not trusted: HTML in their text stays text, a sanitizer checks the result, and a text that
// takes too long is shown as its source.

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
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,  // no links into this server, no scripts
  RETURN_DOM_FRAGMENT: true,
};

let worker = null, last = Promise.resolve();

// Return the text as a document fragment, or null if it is too long or takes too long. Texts are rendered one by one.
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

// Return a worker that has loaded its modules, or null if it cannot load them.
function start() {
  const made = new Worker('page/markdown-worker.js', { type: 'module' });
  return new Promise((ready) => {
    made.addEventListener('message', () => ready(made), { once: true });
    made.addEventListener('error', () => ready(null), { once: true });
  });
}

// Return the worker's answer to a text, or undefined if it does not answer in time.
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

// Add the language and a copy button above a block of code.
function frame(block) {
  const language = (block.dataset.language ?? '').slice(0, 32), node = make('div', { class: 'code' },
    make('div', { class: 'code-head' }, make('span', {}, language || 'code'), copyButton(() => block.textContent)));
  block.replaceWith(node);
  block.tabIndex = 0;  // lets the keyboard scroll long lines
  block.setAttribute('role', 'group');
  block.setAttribute('aria-label', language ? `Code, ${language}` : 'Code');
  node.append(block);
}
