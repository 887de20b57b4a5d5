// Show the messages before the last answer. Each can be edited or answered again.

import { byId, make } from './dom.js';
import { MarkdownText } from './cards.js';
import { sends } from './keys.js';

// again(i, text): replaces message i of the user by this text. redo(i): answers the messages before message i again.
export class History {
  constructor({ again, redo }) {
    Object.assign(this, { again, redo });
  }

  // markdown: true if the model's messages are Markdown.
  show(messages, markdown) {
    byId('history').replaceChildren(...messages.map((message, i) => this.#item(message, i, markdown)));
  }

  #item({ role, content }, i, markdown) {
    const mine = role === 'user', item = make('li', { class: mine ? 'user' : 'assistant' });
    const name = mine ? 'You' : 'Model', said = mine || !markdown ? make('div', { class: 'said' }, content) : rendered(content);
    const tool = mine
      ? make('button', { type: 'button', 'data-runs': true, 'aria-label': `Edit message ${i + 1}`, onclick: () => this.#edit(item, content, i) }, 'Edit')
      : make('button', { type: 'button', 'data-runs': true, 'aria-label': `Regenerate message ${i + 1}`, onclick: () => this.redo(i) }, 'Regenerate');
    item.append(make('div', { class: 'message-head' }, make('h3', { class: 'role' }, name), tool), said);
    return item;
  }

  #edit(item, content, i) {
    const before = [...item.childNodes], id = `edit-${i}`;
    const text = make('textarea', { id, rows: Math.min(12, content.split('\n').length + 1), spellcheck: 'false', 'aria-describedby': `${id}-help` });
    const send = () => text.value && this.again(i, text.value);
    const back = () => { item.replaceChildren(...before); item.querySelector('button').focus(); };
    text.value = content;
    text.addEventListener('keydown', (event) => {
      if (sends(event)) { event.preventDefault(); event.stopPropagation(); send(); }
      if (event.key === 'Escape') { event.stopPropagation(); back(); }
    });
    item.replaceChildren(make('label', { class: 'role', for: id }, 'Your message'), text,
      make('div', { class: 'actions' },
        make('button', { type: 'button', class: 'primary', 'data-runs': true, onclick: send }, 'Send'),
        make('button', { type: 'button', onclick: back }, 'Cancel'),
        make('p', { id: `${id}-help`, class: 'help' }, 'This replaces the message and removes all later messages.')));
    text.focus();
  }
}

function rendered(content) {
  const text = new MarkdownText();
  text.show(content);
  return text.node;
}
