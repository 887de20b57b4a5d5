// Prompts and conversations: n answers at once, as they come.

import { ServerError, ask, events } from './api.js';
import { byId, make, seconds, significant } from './dom.js';
import * as parameters from './parameters.js';
import { TokenText, entries } from './tokens.js';

const TOP_LOGPROBS = 5;
const REASONS = { stop: 'complete', length: 'cut at the longest length', tool_calls: 'calls a tool' };

export class Playground {
  constructor(fail) {
    this.fail = fail;  // shows an error
    this.model = null;
    this.messages = [];  // of the conversation, without the answers that are on the page
    this.cards = [];
    this.abort = null;
    parameters.build();
    byId('request').addEventListener('submit', (event) => { event.preventDefault(); this.send(); });
    byId('stop').addEventListener('click', () => this.abort?.abort());
    byId('clear').addEventListener('click', () => this.clear());
    byId('request').addEventListener('change', (event) => event.target.name === 'mode' && this.#setMode());
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.abort?.abort();
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey) && !byId('playground').hidden) this.send();
    });
  }

  // What the server serves. Without a chat template there are completions only.
  serve({ model, chat }) {
    this.model = model;
    const radio = document.querySelector('[value=chat]');
    radio.disabled = !chat;
    byId('no-chat').hidden = chat;
    if (chat && !byId('prompt').value && !this.cards.length) radio.checked = true;
    this.#setMode();
  }

  get chat() {
    return document.querySelector('[name=mode]:checked').value === 'chat';
  }

  #setMode() {
    byId('system-row').hidden = byId('history').hidden = !this.chat;
    byId('prompt-label').textContent = this.chat ? 'Message' : 'Prompt';
    byId(this.chat ? 'history' : 'status').after(byId('answers'));  // a conversation goes downwards
    byId('prompt').rows = this.chat ? 3 : 5;
    byId('prompt').placeholder = this.chat ? 'Say something' : 'def fibonacci(n):';
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.cards = [];
    byId('history').replaceChildren();
    byId('answers').replaceChildren();
    byId('status').textContent = '';
    byId('prompt').value = '';
    byId('prompt').focus();
  }

  async send() {
    if (this.abort) return;
    let request;
    try {
      request = this.#request();
    } catch (error) {
      this.#failed(error);
      return;
    }
    this.fail(null);
    this.abort = new AbortController();
    this.#busy(true);
    const run = { started: performance.now(), first: null, tokens: 0 };
    try {
      const response = await ask(request.path, { body: request.body, signal: this.abort.signal });
      this.#begin(request);
      for await (const event of events(response)) this.#take(event, run);
      this.#done(run, 'Done');
    } catch (error) {
      this.#end('stopped');
      if (error.name === 'AbortError') this.#done(run, 'Stopped');
      else this.#failed(error);
    } finally {
      this.abort = null;
      this.#busy(false);
    }
  }

  #request() {
    const text = byId('prompt').value, chosen = parameters.read(), probabilities = byId('show-logprobs').checked;
    const common = { model: this.model, ...chosen, stream: true, stream_options: { include_usage: true } };
    if (!this.chat) {
      if (!text) throw new parameters.FieldError('prompt', 'Write a prompt first.');
      const body = { ...common, prompt: text, ...(probabilities && { logprobs: TOP_LOGPROBS }) };
      return { path: 'v1/completions', body, answers: chosen.n ?? 1 };
    }
    if (!text) throw new parameters.FieldError('prompt', 'Write a message first.');
    const system = byId('system').value, answer = this.#chosen();
    const told = [...this.messages, ...(answer ? [{ role: 'assistant', content: answer }] : []), { role: 'user', content: text }];
    const messages = system ? [{ role: 'system', content: system }, ...told] : told;
    const body = { ...common, messages, ...(probabilities && { logprobs: true, top_logprobs: TOP_LOGPROBS }) };
    return { path: 'v1/chat/completions', body, answers: chosen.n ?? 1, told };
  }

  // The answer that a conversation goes on with.
  #chosen() {
    const card = this.cards.find(({ choice }) => choice?.checked) ?? this.cards[0];
    return card && this.messages.length ? card.content : null;
  }

  // The server has taken the request: what was on the page makes room.
  #begin({ answers, told }) {
    this.cards = Array.from({ length: answers }, (_, i) => this.#card(i, answers));
    byId('answers').replaceChildren(...this.cards.map(({ node }) => node));
    if (!told) return;
    this.messages = told;
    byId('history').replaceChildren(...told.map(({ role, content }) => make('li', { class: role },
      make('span', { class: 'role' }, role === 'user' ? 'You' : 'Model'), make('div', { class: 'said' }, content))));
    byId('prompt').value = '';
  }

  #card(i, answers) {
    const said = make('div', { class: 'said' }), reason = make('span', { class: 'reason' });
    const copy = make('button', { type: 'button', onclick: () => navigator.clipboard.writeText(card.text) }, 'Copy');
    const tools = [copy];
    const title = answers > 1 ? `Answer ${i + 1}` : 'Answer';
    let choice = null;
    if (this.chat && answers > 1) {
      choice = make('input', { type: 'radio', name: 'continue', checked: i === 0 });
      tools.push(make('label', {}, choice, ' go on with this one'));
    } else if (!this.chat) {
      tools.push(make('button', { type: 'button', onclick: () => this.#append(card) }, 'Append to prompt'));
    }
    const node = make('article', { class: 'answer', 'aria-label': title },
      make('header', {}, make('h3', {}, title), reason), said, make('footer', {}, tools));
    const card = { node, said, reason, choice, text: '', content: '', tokens: new TokenText(said) };
    return card;
  }

  #append(card) {
    const prompt = byId('prompt');
    prompt.value += card.text;
    prompt.focus();
    prompt.scrollTop = prompt.scrollHeight;
  }

  #take(event, run) {
    if (event.usage) run.tokens = event.usage.completion_tokens;
    for (const choice of event.choices) {
      const card = this.cards[choice.index], thought = choice.delta?.reasoning_content ?? '';
      const text = choice.text ?? `${thought}${choice.delta?.content ?? ''}`;
      const calls = choice.delta?.tool_calls?.map(({ function: f }) => `${f.name ?? ''}${f.arguments ?? ''}`).join('') ?? '';
      if (text || calls) run.first ??= performance.now();
      card.text += text + calls;
      card.content += choice.delta?.content ?? '';  // what the conversation goes on with: thoughts are not told again
      card.tokens.append(text + calls, entries(choice.logprobs));
      if (choice.finish_reason) {
        card.tokens.end();
        card.reason.textContent = REASONS[choice.finish_reason] ?? choice.finish_reason;
        card.over = true;
      }
    }
  }

  #end(reason) {
    for (const card of this.cards.filter(({ over }) => !over)) card.reason.textContent = reason;
  }

  #done(run, word) {
    const now = performance.now(), parts = [`${word} after ${seconds((now - run.started) / 1e3)}`];
    if (run.first) parts.push(`first text after ${seconds((run.first - run.started) / 1e3)}`);
    if (run.tokens) {
      parts.push(`${run.tokens} tokens`, `${significant(run.tokens / ((now - run.started) / 1e3))} tokens/s`);
    }
    byId('status').textContent = `${parts.join(', ')}.`;
  }

  #failed(error) {
    byId('status').textContent = '';
    const input = error.field === 'prompt' ? byId('prompt') : parameters.field(error);
    if (input) {
      input.setAttribute('aria-invalid', 'true');
      input.focus();
      input.addEventListener('input', () => input.removeAttribute('aria-invalid'), { once: true });
    }
    if (!(error instanceof ServerError || error instanceof parameters.FieldError)) console.error(error);
    this.fail(error);
  }

  #busy(busy) {
    byId('send').disabled = busy;
    byId('stop').disabled = !busy;
    byId('answers').setAttribute('aria-busy', String(busy));
    if (busy) byId('status').textContent = 'Generating …';
  }
}
