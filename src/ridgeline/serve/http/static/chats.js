// Store chats in the browser, each under its own name, so that two tabs do not overwrite each other.

import { byId, make } from './dom.js';
import * as storage from './storage.js';

const PREFIX = 'ridgeline-chat:', VERSION = 1, OPEN = 'ridgeline-open-chat', TITLE_CHARACTERS = 48;

// messages: up to the last message of the user. answers: answers to it; the chat continues with the chosen one.
export const empty = () => ({ version: VERSION, id: freshId(), model: '', changed: '', system: '', messages: [], answers: [], chosen: 0 });
const freshId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;

const texts = (one, ...names) => one !== null && typeof one === 'object' && names.every((name) => typeof one[name] === 'string');
const sound = (chat) => texts(chat, 'id', 'model', 'changed', 'system') && chat.version === VERSION &&
  Array.isArray(chat.messages) && chat.messages.every((one) => texts(one, 'role', 'content')) &&
  Array.isArray(chat.answers) && chat.answers.every((one) => texts(one, 'content', 'thought')) && Number.isInteger(chat.chosen);

function read(name) {
  try {
    const chat = JSON.parse(storage.get('localStorage', name));
    return sound(chat) ? chat : null;
  } catch {
    return null;
  }
}

export const load = (id) => read(PREFIX + id);
export const keep = (chat) => storage.set('localStorage', PREFIX + chat.id, JSON.stringify(chat));

// The id of the chat that a tab shows, which a reload opens again; null for none.
export const opened = () => storage.get('sessionStorage', OPEN);
export const setOpened = (id) => (id ? storage.set('sessionStorage', OPEN, id) : storage.remove('sessionStorage', OPEN));

// All chats, newest first, and the number of those that this page cannot read.
function all() {
  const found = storage.names('localStorage', PREFIX).map(read), chats = found.filter(Boolean);
  return { chats: chats.sort((a, b) => b.changed.localeCompare(a.changed)), unread: found.length - chats.length };
}

const title = ({ messages }) => {
  const text = messages[0]?.content.trim().replace(/\s+/g, ' ') ?? '';
  return text.length > TITLE_CHARACTERS ? `${text.slice(0, TITLE_CHARACTERS)}…` : text;
};

// A chat as messages of the API: the system message, the conversation, the chosen answer.
export function told({ system, messages, answers, chosen }) {
  const answer = answers[chosen]?.content;
  return [...(system ? [{ role: 'system', content: system }] : []), ...messages, ...(answer ? [{ role: 'assistant', content: answer }] : [])];
}

// The list of chats with its buttons. open(id): shows a chat, or a new one for null. forget(): called when the shown chat
// was deleted. current(): the id of the shown chat.
export class ChatList {
  constructor({ open, forget, current }) {
    this.current = current;
    byId('chats').addEventListener('change', (event) => open(event.target.value || null));
    byId('new-chat').addEventListener('click', () => open(null));
    byId('export-chats').addEventListener('click', () => download(all().chats));
    byId('delete-chat').addEventListener('click', () => {
      if (!confirm('Delete this chat?')) return;
      storage.remove('localStorage', PREFIX + current());
      forget();
    });
    byId('delete-chats').addEventListener('click', () => {
      const { chats, unread } = all(), count = chats.length + unread;
      if (!confirm(`Delete ${count === 1 ? 'the chat' : `all ${count} chats`} that this browser keeps?`)) return;
      for (const name of storage.names('localStorage', PREFIX)) storage.remove('localStorage', name);
      forget();
    });
    addEventListener('storage', () => this.show());  // another tab has changed something
  }

  show() {
    const { chats, unread } = all(), current = this.current(), kept = chats.some(({ id }) => id === current);
    byId('chats').replaceChildren(make('option', { value: '', selected: !kept }, 'New chat'),
      ...chats.map((chat) => make('option', { value: chat.id, selected: chat.id === current }, title(chat))));
    byId('export-chats').disabled = !chats.length;
    byId('delete-chats').disabled = !chats.length && !unread;
    byId('delete-chat').disabled = !kept;
    byId('unread-chats').textContent = unread ? `This page cannot read ${unread} of them.` : '';
  }
}

function download(chats) {
  const exported = chats.map((chat) => ({ model: chat.model, changed: chat.changed, messages: told(chat), answers: chat.answers }));
  const url = URL.createObjectURL(new Blob([JSON.stringify(exported, null, 2)], { type: 'application/json' }));
  make('a', { href: url, download: 'ridgeline-chats.json' }).click();
  URL.revokeObjectURL(url);
}
