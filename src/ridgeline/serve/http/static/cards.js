// Show an answer while it is generated, as Markdown or as tokens, with its buttons.

import { copyButton, make } from './dom.js';
import { render } from './markdown.js';
import { TokenText, entries } from './tokens.js';

const REASONS = { stop: 'complete', length: 'reached max tokens', tool_calls: 'calls a tool' };
const PAINT_MS = 60;  // between two renderings of a growing text

// A node with Markdown. It shows the source until the text is rendered.
export class MarkdownText {
  constructor() {
    this.node = make('div', { class: 'rendered' });
    this.painting = null;
    this.plain = false;  // true if rendering takes too long
  }

  show(text) {
    this.text = text;
    if (this.plain || !this.node.firstElementChild) this.node.textContent = text;
    if (!this.plain) this.painting ??= this.#paint();
  }

  async #paint() {
    for (let shown = null; shown !== this.text && !this.plain;) {
      shown = this.text;
      const found = await render(shown);
      this.plain = found === null;
      if (found) this.node.replaceChildren(found);
      else this.node.textContent = this.text;
      this.node.classList.toggle('plain', this.plain);
      await new Promise((next) => setTimeout(next, PAINT_MS));
    }
    this.painting = null;
  }
}

export class Card {
  // markdown: true if the text is Markdown. tools: further buttons. choice: a radio button to choose among answers.
  constructor({ title, markdown, choice = null, tools = [] }) {
    Object.assign(this, { choice, content: '', thought: '', text: '', over: false });
    this.reason = make('span', { class: 'reason' });
    this.said = make('div', { class: 'said', hidden: markdown });
    this.tokens = new TokenText(this.said);
    this.thinking = make('p', { class: 'thought', hidden: true });
    this.markdown = markdown ? new MarkdownText() : null;
    const source = markdown && make('button', { type: 'button', 'aria-pressed': 'false', onclick: () => this.#turn(source) }, 'Tokens');
    const choose = choice && make('label', {}, choice, ' continue with this answer');
    this.node = make('article', { class: 'answer', 'aria-label': title },
      make('header', {}, make('h3', {}, title), this.reason),
      markdown ? make('div', { class: 'shown' }, this.thinking, this.markdown.node) : null, this.said,
      make('footer', {}, copyButton(() => this.content || this.text), source || null, tools.map((tool) => tool(this)), choose));
  }

  #turn(button) {
    const tokens = this.said.hidden;
    this.said.hidden = !tokens;
    this.node.querySelector('.shown').hidden = tokens;
    button.setAttribute('aria-pressed', String(tokens));
  }

  // Add a choice of an event.
  take(choice) {
    const { delta } = choice, thought = delta?.reasoning_content ?? '';
    const content = choice.text ?? delta?.content ?? '';
    const calls = delta?.tool_calls?.map(({ function: f }) => `${f.name ?? ''}${f.arguments ?? ''}`).join('') ?? '';
    this.tokens.append(thought + content + calls, entries(choice.logprobs));
    this.text += thought + content + calls;
    this.content += content;  // sent back in a conversation, without the reasoning
    this.thought += thought;
    this.#show(calls ? this.text : this.content);
    if (choice.finish_reason) this.end(REASONS[choice.finish_reason] ?? choice.finish_reason);
    return thought + content + calls;
  }

  // Show a stored answer.
  restore({ content, thought }) {
    Object.assign(this, { content, thought, text: thought + content });
    this.tokens.append(this.text, []);
    this.#show(content);
    this.end('');
  }

  end(reason) {
    if (this.over) return;
    this.over = true;
    this.tokens.end();
    this.reason.textContent = reason;
  }

  #show(text) {
    if (!this.markdown) return;
    this.thinking.hidden = !this.thought;
    this.thinking.textContent = this.thought;
    this.markdown.show(text);
  }
}
