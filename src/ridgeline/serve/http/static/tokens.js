// Show an answer as spans of tokens, with their probabilities on hover or focus.

import { byId, make } from './dom.js';

// Return log probabilities in either of OpenAI's formats as [{token, logprob, top: [{token, logprob}]}].
export function entries(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs }));
  }
  return logprobs.tokens.map((token, i) => ({
    token,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
}

export class TokenText {
  constructor(node) {
    this.node = node;
    this.waiting = [];  // tokens without complete text: parts of a character, or the beginning of a stop string
    node.addEventListener('pointerover', (event) => this.#show(event.target));
    node.addEventListener('pointerout', hide);
    node.addEventListener('focusin', (event) => this.#show(event.target));
    node.addEventListener('focusout', hide);
    node.addEventListener('keydown', (event) => this.#walk(event));
  }

  append(text, tokens) {
    if (!tokens.length && !this.waiting.length) {
      if (text) this.node.append(text);
      return;
    }
    this.waiting.push(...tokens);
    if (!text) return;
    const given = this.waiting;
    this.waiting = [];
    if (given.map(({ token }) => token).join('') === text) given.forEach((entry) => this.#add(entry.token, [entry]));
    else this.#add(text, given);
  }

  // Show the remaining tokens without text, such as the end-of-sequence token.
  end() {
    for (const entry of this.waiting.splice(0)) this.#add(visible(entry.token), [entry]).classList.add('unseen');
  }

  #add(text, given) {
    const span = make('span', { class: 'token', tabindex: this.node.querySelector('.token') ? -1 : 0 }, text);
    const chance = Math.exp(given.reduce((sum, { logprob }) => sum + logprob, 0));
    span.style.setProperty('--doubt', (1 - chance).toFixed(3));
    span.entries = given;
    this.node.append(span);
    return span;
  }

  #show(span) {
    if (!span.entries) return;
    const tip = byId('tip');
    tip.replaceChildren(...span.entries.map(describe));
    tip.hidden = false;
    span.setAttribute('aria-describedby', 'tip');
    const at = span.getClientRects()[0], size = tip.getBoundingClientRect();
    const above = at.top - size.height - 8;
    tip.style.top = `${above > 0 ? above : at.bottom + 8}px`;
    tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
  }

  #walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const tokens = [...this.node.querySelectorAll('.token')], next = tokens[tokens.indexOf(event.target) + step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

export function hide() {
  byId('tip').hidden = true;
  document.querySelector('[aria-describedby="tip"]')?.removeAttribute('aria-describedby');
}

function describe({ token, logprob, top }) {
  const others = top.some((one) => one.token === token) ? top : [{ token, logprob }, ...top];
  const rows = [...others].sort((a, b) => b.logprob - a.logprob);
  return make('table', {}, make('caption', {}, 'Most likely tokens'),
    make('tbody', {}, rows.map((one) => {
      const bar = make('span', { class: 'bar' });
      bar.style.width = `${100 * Math.exp(one.logprob)}%`;
      return make('tr', { class: one.token === token && 'taken' },
        make('th', { scope: 'row' }, visible(one.token)),
        make('td', { class: 'track' }, bar),
        make('td', {}, percent(one.logprob)));
    })));
}

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value > 0 && value < 0.1 ? '< 0.1 %' : `${value.toFixed(1)} %`;
};

const MARKS = { '\n': '⏎', '\t': '⇥', '\r': '␍', ' ': '␣' };
const visible = (token) => token.replace(/[\n\t\r ]/g, (found) => MARKS[found]);
