// The fields of a request that a person may set: a table, the form made of it, and the form read.

import { byId, make } from './dom.js';

const NUMBERS = [
  ['temperature', 'Temperature', { min: 0, step: 0.1 }, '0 takes the likeliest token'],
  ['top_p', 'Top p', { min: 0, max: 1, step: 0.05 }, 'only the likeliest tokens that sum to this'],
  ['top_k', 'Top k', { min: -1, step: 1 }, 'only so many of the likeliest tokens'],
  ['min_p', 'Min p', { min: 0, max: 1, step: 0.01 }, 'at least this share of the likeliest one'],
  ['max_tokens', 'Max tokens', { min: 1, step: 1, value: 128 }, 'of an answer'],
  ['seed', 'Seed', { step: 1 }, 'the same seed, the same answer'],
  ['presence_penalty', 'Presence penalty', { min: -2, max: 2, step: 0.1 }, 'for tokens that came already'],
  ['frequency_penalty', 'Frequency penalty', { min: -2, max: 2, step: 0.1 }, 'for each time that they came'],
  ['repetition_penalty', 'Repetition penalty', { min: 0, step: 0.05 }, 'divides their logits; 1 is none'],
  ['n', 'Number of answers', { min: 1, step: 1, value: 1 }, 'side by side'],
];

export function build() {
  const fields = NUMBERS.map(([name, label, limits, help]) => make('div', { class: 'field' },
    make('label', { for: name }, label),
    make('input', { id: name, name, type: 'number', inputmode: 'decimal', placeholder: 'default', ...limits,
      step: 'any', 'data-step': limits.step, 'aria-describedby': `${name}-help` }),
    make('p', { id: `${name}-help`, class: 'help' }, help)));
  byId('parameters').append(...fields,
    make('div', { class: 'field wide' },
      make('label', { for: 'stop-strings' }, 'Stop at'),
      make('textarea', { id: 'stop-strings', name: 'stop', rows: 2, spellcheck: 'false', 'aria-describedby': 'stop-help' }),
      make('p', { id: 'stop-help', class: 'help' }, 'one text a line; \\n stands for a new line')),
    make('div', { class: 'field wide' },
      make('label', { class: 'check' }, make('input', { id: 'show-logprobs', type: 'checkbox', checked: true }), ' Token probabilities'),
      make('p', { class: 'help' }, 'hover over a token, or walk with the arrow keys')));
  byId('parameters').addEventListener('input', (event) => event.target.removeAttribute('aria-invalid'));
  for (const input of byId('parameters').querySelectorAll('[data-step]')) input.addEventListener('keydown', spin);
}

// Any number is allowed; the arrow keys take the steps that make sense.
function spin(event) {
  const direction = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!direction) return;
  event.preventDefault();
  const { min, max, dataset, valueAsNumber } = event.target, step = Number(dataset.step);
  const next = (Number.isNaN(valueAsNumber) ? 0 : valueAsNumber) + direction * step;
  const least = min === '' ? -Infinity : Number(min), most = max === '' ? Infinity : Number(max);
  event.target.value = Number(Math.min(most, Math.max(least, next)).toFixed(6));
}

// Throws FieldError for what is no number; whether it is a sensible one, the server says.
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export function read() {
  const found = {};
  for (const [name, label] of NUMBERS) {
    const input = byId(name);
    if (input.validity.badInput) throw new FieldError(name, `${label} is no number.`);
    if (input.value !== '') found[name] = Number(input.value);
  }
  const stop = byId('stop-strings').value.split('\n').filter(Boolean).map((line) => line.replaceAll('\\n', '\n'));
  if (stop.length) found.stop = stop;
  return found;
}

// The field that an error is about, if it is one of these.
export function field(error) {
  const name = error.field ?? error.param ?? [...NUMBERS.map(([one]) => one), 'stop'].find((one) =>
    new RegExp(`\\b${one}\\b`).test(error.message));
  return name === 'stop' ? byId('stop-strings') : NUMBERS.some(([one]) => one === name) ? byId(name) : null;
}
