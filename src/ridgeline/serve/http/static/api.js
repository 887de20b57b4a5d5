// Send requests to the server of this page. ServerError is the class of all its errors.

import * as storage from './storage.js';

const STORED_KEY = 'ridgeline-key';
let entered = null;  // the key, for browsers that store nothing

export class ServerError extends Error {
  constructor(status, { message, param = null } = {}, retryAfter = null) {
    super(message ?? `the server answered with status ${status}`);
    Object.assign(this, { status, param, retryAfter });
  }

  // A sentence that says what the user can do.
  get advice() {
    if (this.status === 0) return 'Is the server still running?';
    if (this.status === 401) return 'Enter a valid API key.';
    if (this.status === 429) return `Try again in ${this.retryAfter ?? 1} s.`;
    if (this.status === 503) return 'The engine is restarting; try again in a moment.';
    return '';
  }
}

export function setKey(key) {
  entered = key;
  storage.set('sessionStorage', STORED_KEY, key);
}

export async function ask(path, { body, signal } = {}) {
  const key = entered ?? storage.get('sessionStorage', STORED_KEY);
  const headers = { ...(body && { 'Content-Type': 'application/json' }), ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { method: body ? 'POST' : 'GET', headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError(0, { message: 'The server cannot be reached.' });
  }
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new ServerError(response.status, told.error, response.headers.get('Retry-After'));
  }
  return response;
}

// Yield the JSON data of each server-sent event up to [DONE]. Throws an error that the stream contains.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === 'AbortError') throw error;
        throw new ServerError(0, { message: 'The connection was lost before the answer was complete.' });
      });
      if (done) throw new ServerError(0, { message: 'The answer ended before it was complete.' });
      const parts = (text + value).split(/\r?\n\r?\n/);
      text = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith('data:')).map((line) => line.slice(5).trim());
        if (data[0] === '[DONE]') return;
        if (!data.length) continue;
        const event = JSON.parse(data.join('\n'));
        if (event.error) throw new ServerError(event.error.code === 'engine_down' ? 503 : 400, event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // an aborted stream is closed already
  }
}
