// The playground: send prompts and conversations, and show the answers while they are generated.

import { ServerError, ask, events } from './api.js';
import { Card } from './cards.js';
import * as chats from './chats.js';
import { byId, make, seconds, significant } from './dom.js';
import { History } from './history.js';
import * as keys from './keys.js';
import * as parameters from './parameters.js';

const TOP_LOGPROBS = 5;

export class Playground {
  constructor(fail) {
    this.fail = fail;  // shows an error
    this.model = null;
    this.example = null;
    this.talk = chats.empty();
    this.cards = [];
    this.running = null;  // the run in progress
    parameters.build();
    this.history = new History({ again: (i, text) => this.#again(i, text), redo: (i) => this.#redo(i) });
    this.list = new chats.ChatList({ open: (id) => this.open(id), forget: () => this.#forget(), current: () => this.talk.id });
    byId('request').addEventListener('submit', (event) => { event.preventDefault(); this.send(); });
    byId('stop').addEventListener('click', () => this.#stop());
    byId('clear').addEventListener('click', () => this.clear());
    byId('example').addEventListener('click', () => this.#tryExample());
    byId('request').addEventListener('change', (event) => event.target.name === 'mode' && this.#setMode());
    byId('system').addEventListener('change', () => { this.talk.system = byId('system').value; this.#keep(); });
    byId('keys').append(...keys.help().map((part) => (Array.isArray(part) ? combined(part) : part)));
    document.addEventListener('keydown', (event) => this.#key(event));
    addEventListener('pagehide', () => this.#keep());
  }

  #key(event) {
    if (byId('playground').hidden) return;
    if (event.key === 'Escape') this.#stop();
    const inPrompt = event.target === byId('prompt') && keys.sends(event);
    if (!inPrompt && !(event.key === 'Enter' && (event.ctrlKey || event.metaKey))) return;
    event.preventDefault();
    this.send();
  }

  // Set up the playground for the server's model. Completion is the default without a chat template that reads roles.
  serve({ model, chat, roles, example }) {
    this.model = model;
    this.example = example;
    this.markdown = roles;  // a template that ignores roles belongs to a model that continues any text, which may not be Markdown
    const radio = document.querySelector('[value=chat]'), first = this.shownChat === undefined;
    const kept = first && chat && chats.opened() ? chats.load(chats.opened()) : null;
    radio.disabled = !chat;
    byId('no-chat').hidden = chat && roles;
    byId('no-chat').textContent = chat
      ? 'This model’s chat template ignores roles, so the model continues the text of the messages.'
      : 'This model has no chat template; start the server with --chat-template to give it one.';
    if (kept) this.talk = kept;
    if (kept || (first && roles && !byId('prompt').value)) radio.checked = true;
    if (!chat) document.querySelector('[value=completion]').checked = true;
    this.#setMode();
  }

  get chat() {
    return document.querySelector('[name=mode]:checked').value === 'chat';
  }

  #setMode() {
    const { chat } = this;
    if (chat !== this.shownChat) {  // answers belong to the mode in which they were generated
      this.#stop();
      this.shownChat = chat;
      this.#showTalk();
    }
    for (const id of ['chats-row', 'system-row', 'history']) byId(id).hidden = !chat;
    byId('clear').hidden = chat;
    byId('example').hidden = chat || !this.example;
    byId('prompt-label').textContent = chat ? 'Message' : 'Prompt';
    byId(chat ? 'history' : 'status').after(byId('answers'));  // in a chat, new messages are at the bottom
    byId('prompt').rows = chat ? 3 : 5;
    byId('prompt').placeholder = chat ? 'Type a message' : this.example?.prompt ?? '';
    byId('send').textContent = chat ? 'Send' : 'Generate';
    chats.setOpened(chat && this.talk.messages.length ? this.talk.id : null);
    this.list.show();
  }

  // Show a stored chat, or a new one for null.
  open(id) {
    this.#stop();
    this.fail(null);
    const found = id && chats.load(id);
    if (id && !found) this.fail(new Error('This chat no longer exists.'));
    this.talk = found || chats.empty();
    this.#showTalk();
    chats.setOpened(this.talk.messages.length ? this.talk.id : null);
    this.list.show();
    byId('prompt').focus();
  }

  // Show a new chat after the shown one was deleted.
  #forget() {
    this.talk.messages = [];
    this.open(null);
  }

  #stop() {
    this.running?.abort.abort();
    this.#keep();
  }

  #showTalk() {
    const talk = this.chat ? this.talk : chats.empty();
    byId('system').value = this.talk.system;
    byId('status').textContent = '';
    this.history.show(talk.messages, this.markdown);
    this.#deal(talk.answers.length, talk.chosen);
    talk.answers.forEach((answer, i) => this.cards[i].restore(answer));
  }

  clear() {
    this.#stop();
    this.#deal(0);
    byId('status').textContent = '';
    byId('prompt').value = '';
    byId('prompt').focus();
  }

  #tryExample() {
    byId('prompt').value = this.example.prompt;
    for (const [name, value] of Object.entries(this.example.parameters)) byId(name).value = value;
    this.send();
  }

  send() {
    const text = byId('prompt').value, what = this.chat ? 'message' : 'prompt';
    if (!text) return this.#failed(new parameters.FieldError('prompt', `Write a ${what} first.`));
    if (!this.chat) return this.#run(() => this.#completion(text));
    const answer = this.talk.answers[this.talk.chosen]?.content;
    const said = [...this.talk.messages, ...(answer ? [{ role: 'assistant', content: answer }] : []), { role: 'user', content: text }];
    return this.#run(() => this.#turn(said), () => { byId('prompt').value = ''; });
  }

  #again(i, text) {
    return this.#run(() => this.#turn([...this.talk.messages.slice(0, i), { role: 'user', content: text }]));
  }

  #redo(i) {
    return this.#run(() => this.#turn(this.talk.messages.slice(0, i)));
  }

  // Send a request and show its answers. make_: makes the request. begun: called once the server has accepted it.
  async #run(make_, begun = () => {}) {
    if (this.running) return;
    let request;
    try {
      request = make_();
    } catch (error) {
      this.#failed(error);
      return;
    }
    this.fail(null);
    const run = { abort: new AbortController(), started: performance.now(), first: null, tokens: 0, cards: [], talk: null };
    this.running = run;
    this.#busy();
    try {
      const response = await ask(request.path, { body: request.body, signal: run.abort.signal });
      this.#begin(request, run);
      begun();
      for await (const event of events(response)) this.#take(event, run);
      this.#done(run, 'Done');
    } catch (error) {
      for (const card of run.cards) card.end('stopped');
      if (error.name === 'AbortError') this.#done(run, 'Stopped');
      else this.#failed(error);
    } finally {
      this.#keep();
      this.running = null;
      this.#busy();
    }
  }

  #common() {
    return { model: this.model, ...parameters.read(), stream: true, stream_options: { include_usage: true } };
  }

  #completion(prompt) {
    const common = this.#common(), probabilities = byId('show-logprobs').checked;
    return { path: 'v1/completions', body: { ...common, prompt, ...(probabilities && { logprobs: TOP_LOGPROBS }) }, answers: common.n ?? 1 };
  }

  #turn(said) {
    const common = this.#common(), probabilities = byId('show-logprobs').checked;
    const messages = chats.told({ system: byId('system').value, messages: said, answers: [], chosen: 0 });
    const body = { ...common, messages, ...(probabilities && { logprobs: true, top_logprobs: TOP_LOGPROBS }) };
    return { path: 'v1/chat/completions', body, answers: common.n ?? 1, said };
  }

  // Replace the answers on the page once the server has accepted the request.
  #begin({ answers, said }, run) {
    if (said) {
      run.talk = this.talk;
      Object.assign(this.talk, { messages: said, answers: [], chosen: 0, model: this.model, system: byId('system').value });
      this.history.show(said, this.markdown);
      chats.setOpened(this.talk.id);
    }
    this.#deal(answers);
    run.cards = this.cards;
    this.#keep();
    this.#busy();
  }

  // Make cards for `count` answers.
  #deal(count, chosen = 0) {
    this.cards = Array.from({ length: count }, (_, i) => this.#card(i, count, i === chosen));
    byId('answers').replaceChildren(...this.cards.map(({ node }) => node));
  }

  #card(i, count, chosen) {
    const title = count > 1 ? `Answer ${i + 1}` : 'Answer', { chat } = this;
    const choice = chat && count > 1
      ? make('input', { type: 'radio', name: 'continue', checked: chosen, onchange: () => { this.talk.chosen = i; this.#keep(); } }) : null;
    const again = () => make('button', { type: 'button', 'data-runs': true, onclick: () => this.#redo(this.talk.messages.length) }, 'Regenerate');
    const append = (card) => make('button', { type: 'button', onclick: () => this.#append(card) }, 'Append to prompt');
    const tools = !chat ? [append] : i === 0 ? [again] : [];  // Regenerate replaces all answers
    return new Card({ title, markdown: chat && this.markdown, choice, tools });
  }

  #append(card) {
    const prompt = byId('prompt');
    prompt.value += card.text;
    prompt.focus();
    prompt.scrollTop = prompt.scrollHeight;
  }

  #take(event, run) {
    if (event.usage) run.tokens = event.usage.completion_tokens;
    for (const choice of event.choices) if (run.cards[choice.index].take(choice)) run.first ??= performance.now();
  }

  // Store the shown chat, or the one whose answers are being generated, with the text so far.
  #keep() {
    const talk = this.running?.talk ?? this.talk;
    if (!talk.messages.length) return;
    if (this.running?.talk) {
      talk.answers = this.running.cards.map(({ content, thought }) => ({ content, thought }));
      talk.changed = new Date().toISOString();
    }
    if (!chats.keep(talk)) this.fail(new Error('This browser has no space to store this chat. Export your chats and delete some.'));
    this.list.show();
  }

  #done(run, word) {
    if (run.cards.length && run.cards !== this.cards) return;  // another chat is shown now
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

  #busy() {
    const busy = this.running !== null;
    byId('send').disabled = busy;
    byId('stop').disabled = !busy;
    for (const button of byId('request').querySelectorAll('[data-runs]')) button.disabled = busy;
    byId('answers').setAttribute('aria-busy', String(busy));
    if (busy) byId('status').textContent = 'Generating …';
  }
}

const combined = (names) => make('span', {}, names.flatMap((name, i) => [i ? '+' : '', make('kbd', {}, name)]));
