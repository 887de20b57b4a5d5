// Markdown to HTML, in a thread of its own: some texts take marked minutes, and whoever asks stops waiting before that.

import { Marked } from './vendor/marked/marked.esm.js';

const TITLE_LEVEL = 3;  // of the heading above an answer
const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&#39;' };
const escaped = (text) => text.replace(/[&<>"']/g, (found) => ESCAPES[found]);

// A parser for one text: its headings follow the page's own, and skip no level.
function parser() {
  let level = TITLE_LEVEL;
  return new Marked({
    async: false,
    gfm: true,
    tokenizer: { html() {}, tag() {} },  // neither finds anything: HTML is text
    renderer: {
      heading({ tokens, depth }) {
        level = Math.min(TITLE_LEVEL + depth, level + 1, 6);
        return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
      },
      code({ text, lang }) {
        return `<pre data-language="${escaped(lang?.split(/\s/)[0] ?? '')}"><code>${escaped(text)}</code></pre>`;
      },
      image({ href, text }) {  // is never loaded: that would tell others that somebody reads this
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
    return null;  // too deep for the stack
  }
}

addEventListener('message', ({ data }) => postMessage({ html: parse(data) }));
postMessage({ ready: true });
