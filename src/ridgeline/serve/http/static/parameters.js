// The sampling form: it is built from the parameters that the server declares, and read.

import { PARAMETERS } from './declared.js';
import { byId, make } from './dom.js';

export function build() {
  const fields = PARAMETERS.map(([name, label, limits, help]) => make('div', { class: 'field' },
    make('label', { for: name }, label),
    make('input', { id: name, name, type: 'number', inputmode: 'decimal', placeholder: 'default', ...limits,
      step: 'any', 'data-step': limits.step, 'aria-describedby': `${name}-help` }),
    make('p', { id: `${name}-help`, class: 'help' }, help)));
  byId('parameters').append(...fields,
    make('div', { class: 'field wide' },
      make('label', { for: 'stop-strings' }, 'Stop at'),
      make('textarea', { id: 'stop-strings', name: 'stop', rows: 2, spellcheck: 'false', 'aria-describedby': 'stop-help' }),
      make('p', { id: 'stop-help', class: 'help' }, 'Texts that end an answer, one on each line; \\n means a new line.')),
    make('div', { class: 'field wide' },
      make('label', { class: 'check' }, make('input', { id: 'show-logprobs', type: 'checkbox', checked: true }), ' Token probabilities'),
      make('p', { class: 'help' }, 'Point at a token, or use the arrow keys.')));
  byId('parameters').addEventListener('input', (event) => event.target.removeAttribute('aria-invalid'));
  for (const input of byId('parameters').querySelectorAll('[data-step]')) input.addEventListener('keydown', spin);
}

// Any number is allowed; an arrow key changes it by the parameter's step.
function spin(event) {
  const direction = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!direction) return;
  event.preventDefault();
  const { min, max, dataset, valueAsNumber } = event.target, step = Number(dataset.step);
  const next = (Number.isNaN(valueAsNumber) ? 0 : valueAsNumber) + direction * step;
  const least = min === '' ? -Infinity : Number(min), most = max === '' ? Infinity : Number(max);
  event.target.value = Number(Math.min(most, Math.max(least, next)).toFixed(6));
}

// Throws FieldError for a value that is not a number. The server checks its range.
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export function read() {
  const found = {};
  for (const [name, label] of PARAMETERS) {
    const input = byId(name);
    if (input.validity.badInput) throw new FieldError(name, `${label} is not a number.`);
    if (input.value !== '') found[name] = Number(input.value);
  }
  const stop = byId('stop-strings').value.split('\n').filter(Boolean).map((line) => line.replaceAll('\\n', '\n'));
  if (stop.length) found.stop = stop;
  return found;
}

// Returns the field that an error names, or null.
export function field(error) {
  const name = error.field ?? error.param ?? [...PARAMETERS.map(([one]) => one), 'stop'].find((one) =>
    new RegExp(`\\b${one}\\b`).test(error.message));
  return name === 'stop' ? byId('stop-strings') : PARAMETERS.some(([one]) => one === name) ? byId(name) : null;
}
