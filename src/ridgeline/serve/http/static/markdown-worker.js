// Convert Markdown to HTML in a worker thread. marked takes minutes for some texts; the page stops waiting before that.

import { Marked } from './vendor/marked/marked.esm.js';

const TITLE_LEVEL = 3;  // level of the heading above an answer
const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&#39;' };
const escaped = (text) => text.replace(/[&<>"']/g, (found) => ESCAPES[found]);

// A parser for one text. Its headings continue the levels of the page and skip no level.
function parser() {
  let level = TITLE_LEVEL;
  return new Marked({
    async: false,
    gfm: true,
    tokenizer: { html() {}, tag() {} },  // HTML stays text
    renderer: {
      heading({ tokens, depth }) {
        level = Math.min(TITLE_LEVEL + depth, level + 1, 6);
        return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
      },
      code({ text, lang }) {
        return `<pre data-language="${escaped(lang?.split(/\s/)[0] ?? '')}"><code>${escaped(text)}</code></pre>`;
      },
      image({ href, text }) {  // never loaded, since loading would tell another server that the text was read
        return `<a href="${escaped(href)}">${escaped(text || href)}</a>`;
      },
      checkbox({ checked }) {
        return checked ? '☑ ' : '☐ ';
      },
    },
  });
}

function parse(text) {
  try {
    return parser().parse(text);
  } catch {
    return null;  // nested too deeply for the stack
  }
}

addEventListener('message', ({ data }) => postMessage({ html: parse(data) }));
postMessage({ ready: true });
